"""The loop with groups in flight across updates: staleness, continued responses, order, positions, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos.fork_server import until
from tests.virtual import TimedEngine, VirtualLoop
from verl.config import load
from verl.config.schema.algorithm import FilterGroupsConfig
from verl.data.stream import PromptStream
from verl.engine.rollout.base import SamplingParams
from verl.errors import UserError
from verl.rollout.attempt import RolloutSettings, response_seed
from verl.rollout.event_loop import BackgroundLoop
from verl.rollout.groups import RolloutManager
from verl.rollout.resumable import ResumableGeneration
from verl.rollout.schedule import DynamicSchedule, PromptSchedule, Versions
from verl.tracking.step_metrics import Counters
from verl.tracking.timer import Phases
from verl.trainer.colocation import Colocation
from verl.trainer.parts import Parts
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trajectory import Batch, Prompt
from verl.weight_sync.verify import SyncResult
from verl.workers.roles import Policy
from verl.workers.update_plan import UpdateResult

BATCH, N = 4, 2


class Rows:
    """A data set of `size` prompts in file order."""

    def __init__(self, size: int = 20):
        self._size = size

    def __len__(self) -> int:
        return self._size

    def order(self, *, seed: int, shuffle: bool, epoch: int = 0) -> np.ndarray:
        return np.random.default_rng([seed, epoch]).permutation(self._size)

    def prompt(self, row: int, epoch: int = 0) -> Prompt:
        return Prompt(uid=f"0:{row}@{epoch}", ids=np.arange(3), messages="q", row=row, epoch=epoch)


class Quiet:
    """Tracking, checkpoints and report that keep what they are given."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.records: dict[int, dict[str, Any]] = {}
        self.positions: dict[int, dict[str, Any]] = {}
        self.tokenizer = None

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        self.records[step] = metrics

    def progress(self, name: str, total: int, beat: Any = None):
        return lambda count: None

    def save(self, step: int, loop: dict[str, Any], *_: Any) -> None:
        self.positions[step] = loop["data_position"]

    def resume(self) -> int:
        return 0

    def __getattr__(self, name: str):
        return lambda *args, **kwargs: None


class Run(Policy):
    """A whole PPOTrainer in virtual time: real loop, stream and rollouts; the model is a wait of `update_s`."""

    def __init__(
        self,
        folder: Path,
        staleness: int,
        engine: TimedEngine,
        *more: str,
        steps: int = 6,
        update_s: float = 5.0,
    ):
        self.engine, self.batches, self.ended = engine, [], []
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.quiet = Quiet(folder)
        self.stream = PromptStream(Rows(), batch_size=BATCH, seed=1, shuffle=True)
        self.update_s = update_s
        self.config = load(
            [
                "algorithm.adv_estimator=grpo", f"trainer.max_staleness={staleness}", "trainer.save_freq=1",
                f"data.train_batch_size={BATCH}", f"actor_rollout_ref.rollout.n={N}",
                "trainer.val_before_train=False", "trainer.sync_proof=off", "trainer.max_refused_steps=1", *more,
            ]
        )  # fmt: skip
        settings_ = RolloutSettings(SamplingParams(max_tokens=64), n=N, seed=3)
        rollouts = RolloutManager(engine, settings_, decode=lambda ids: "", on_finished=self._score)
        rewards = Space(score_batch=self._nothing, check_errors=lambda batch: {}, judge=None)
        workers = Space(
            policy=self,
            roles={"actor": self},
            trained=lambda policy: [self],
            sampler=engine,
            weight_sync=self,
            profiler=None,
            devices=1,
        )
        parts = Parts(
            self.stream,
            rollouts,
            rewards,
            workers,
            Colocation(self.config, engine),
            None,
            None,
            self.quiet,
            self.quiet,
            Phases(),
            self.runner,
            Counters(),
            {},
        )
        self.trainer = PPOTrainer(self.config, parts, steps)

    async def _nothing(self, batch: Batch) -> None: ...

    async def _score(self, trajectory) -> None:
        await asyncio.sleep(0.25)
        trajectory.score = float(trajectory.length)

    # the actor and the weight sync, as far as the loop asks

    name, phase, updates_per_step, compute_dtype = "actor", "update_actor", 1, "torch.float32"

    def memory(self) -> dict[str, float]:
        return {}

    def balance(self, batch: Batch) -> dict[str, float]:
        return {}

    def update(self, batch: Batch, *, step: int) -> UpdateResult:
        self.batches.append(batch)
        self.runner.run(asyncio.sleep(self.update_s))
        return UpdateResult(metrics={})

    def push(self, version: int, *, verify: bool = False) -> SyncResult:
        self.engine.load_weights((), version)
        self.ended.append(self.runner.get_loop().time())
        return SyncResult(0, 0.0)

    def go(self) -> Run:
        with self.runner:
            self.trainer.fit()
        return self


def lengths(seed: int) -> int:
    """Long-tailed: most responses have 3 to 10 tokens, some up to 60."""
    return 3 + seed % 8 + (50 if seed % 11 == 0 else 0)


def responses(run: Run) -> list[list[tuple[str, int, list[int]]]]:
    return [[(t.uid, t.index, t.response_ids.tolist()) for t in batch] for batch in run.batches]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_staleness_is_bounded_and_order_is_that_of_the_draws(tmp_path, staleness) -> None:
    run = Run(tmp_path, staleness, TimedEngine(lengths), steps=10).go()
    order = PromptStream(Rows(), batch_size=BATCH, seed=1, shuffle=True)
    draws = [p.uid for _ in range(10) for p in order.take()]
    assert [t.uid for batch in run.batches for t in batch if t.index == 0] == draws
    lags = []
    for step, batch in enumerate(run.batches, 1):
        for t in batch:
            assert t.versions == tuple(sorted(set(t.versions))) and t.score == t.length
            lags.append(step - 1 - min(t.versions))
    assert min(lags) >= 0 and max(lags) == staleness, "the bound is kept, and used"
    worst = max(r["training/off_policy/trajectory_staleness_worst/max"] for r in run.quiet.records.values())
    assert worst == staleness
    assert not run.engine.under_way, "nothing is begun that no step will train on"


@pytest.mark.parametrize(
    ("staleness", "every", "most"), [(0, 1, None), (0, 3, None), (1, 3, None), (1, 3, 4), (2, 2, None)]
)
def test_weights_are_pushed_every_so_many_steps(tmp_path, staleness, every, most) -> None:
    more = [
        f"trainer.weight_sync_every={every}",
        f"trainer.max_steps_per_version={most}",
        "trainer.save_freq=-1",
    ]
    own = "actor_rollout_ref.rollout.nnodes=1"
    run = Run(tmp_path, staleness, TimedEngine(lengths), *more, own, steps=11).go()
    order = PromptStream(Rows(), batch_size=BATCH, seed=1, shuffle=True)
    assert [t.uid for batch in run.batches for t in batch if t.index == 0] == [
        p.uid for _ in range(11) for p in order.take()
    ]
    assert len(run.ended) == 1 + -(-11 // every), "the start, every t steps, and the last step"
    lags = [(step - 1) // every - min(t.versions) for step, batch in enumerate(run.batches, 1) for t in batch]
    assert min(lags) >= 0 and max(lags) == staleness
    begun = {step: min(min(t.versions) for t in batch) for step, batch in enumerate(run.batches, 1)}
    limit = most or (1 + staleness) * every
    assert all(step <= version * every + limit for step, version in begun.items())
    held = [record["training/weight_version"] for record in run.quiet.records.values()]
    assert held == [(step - 1) // every + 1 for step in range(1, 12)]


def test_a_resume_after_a_push_draws_what_the_run_would_have_drawn() -> None:
    stream = PromptStream(Rows(), batch_size=BATCH, seed=1, shuffle=True)
    whole, drawn = PromptSchedule(stream, Versions(every=3, staleness=1), last_step=12), []
    for step in range(1, 13):
        drawn += [prompt.uid for prompt in whole.due(step)]
        if step == 6:
            saved = whole.position(6)
    again = PromptStream(Rows(), batch_size=BATCH, seed=1, shuffle=True)
    again.load_state(saved)
    resumed = PromptSchedule(again, Versions(every=3, staleness=1), last_step=12)
    assert [prompt.uid for step in range(7, 13) for prompt in resumed.due(step)] == drawn[6 * BATCH :]


def test_an_interrupted_response_is_what_it_would_have_been(tmp_path) -> None:
    whole = Run(tmp_path, 0, TimedEngine(lengths)).go()
    parts = Run(tmp_path, 2, TimedEngine(lengths)).go()
    assert responses(parts) == responses(whole)
    carried = [t for batch in parts.batches for t in batch if t.extra.get("interruptions")]
    assert carried and any(len(t.versions) > 1 for t in carried)
    for t in carried:
        expected = {TimedEngine.log_prob(v) for v in t.versions}
        assert set(t.rollout_log_probs.tolist()) == {float(np.float32(x)) for x in expected}
        seed = response_seed(3, t.uid, t.index)
        assert t.response_ids.tolist() == [TimedEngine.token(seed, j) for j in range(lengths(seed))]
        assert np.all(np.diff(t.rollout_log_probs) <= 0), "oldest version first"
    assert all("interruptions" not in t.extra for batch in whole.batches for t in batch)


def test_continued_requests_share_no_prefix_cache_but_untouched_ones_do(tmp_path) -> None:
    run = Run(tmp_path, 1, TimedEngine(lengths)).go()
    groups = run.engine.groups
    assert any(start for _, start in groups.values())
    for request, (group, start) in groups.items():
        assert group == (None if start else request.split("#")[0]), "one group, one prompt"


def test_sampling_runs_while_the_trainer_computes(tmp_path) -> None:
    """Updates of 30 s, responses of about 10: hidden behind each other one step takes the longer of the two."""
    engines = [TimedEngine(lambda seed: 10) for _ in range(2)]
    sync, ahead = (Run(tmp_path, k, e, update_s=30.0).go() for k, e in enumerate(engines))
    steps = [np.diff(run.ended) for run in (sync, ahead)]
    assert steps[0] == pytest.approx(40.25, abs=0.5) and steps[1][1:] == pytest.approx(30, abs=0.5)


def test_more_staleness_hides_longer_stragglers(tmp_path) -> None:
    """A few responses of 60 tokens among responses of 5, and updates of 8 seconds."""

    def length(seed: int) -> int:
        return 60 if seed % 13 == 0 else 5

    times = {k: Run(tmp_path, k, TimedEngine(length), steps=8, update_s=8.0).go().ended[-1] for k in (0, 1, 4)}
    assert times[4] < times[1] < times[0]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_checkpoint_holds_the_first_draw_not_trained(tmp_path, staleness) -> None:
    run = Run(tmp_path, staleness, TimedEngine(lengths), steps=9).go()
    for step in range(1, 9):
        resumed = PromptStream(Rows(), batch_size=BATCH, seed=1, shuffle=True)
        resumed.load_state(run.quiet.positions[step])
        following = [t.uid for t in run.batches[step] if t.index == 0]
        assert [p.uid for p in resumed.take()] == following, f"after step {step}"
    assert [r["training/epoch"] for r in run.quiet.records.values()] == [0] * 5 + [1] * 4


def test_without_partial_rollout_no_response_has_two_versions(tmp_path) -> None:
    run = Run(tmp_path, 1, TimedEngine(lengths), "trainer.partial_rollout=False").go()
    assert all(len(t.versions) == 1 for batch in run.batches for t in batch)
    assert {step - 1 - t.versions[0] for step, batch in enumerate(run.batches, 1) for t in batch} == {0, 1}


def test_continued_and_evicted_responses_are_counted(tmp_path) -> None:
    class Forgetful(TimedEngine):
        """Keeps its first weights and says so: what a pool would do whose host missed every transfer."""

        def load_weights(self, weights, version):
            return None

    run = Run(tmp_path, 1, TimedEngine(lengths)).go()
    continued = [sum("interruptions" in t.extra for t in batch) for batch in run.batches]
    found = [r["training/off_policy/continued_samples"] for r in run.quiet.records.values()]
    assert found == continued and sum(found) > 0
    assert all(r["training/off_policy/evicted_samples"] == 0 for r in run.quiet.records.values())
    stuck = Run(tmp_path, 1, Forgetful(lengths), steps=4).go()
    evicted = [r["training/off_policy/evicted_samples"] for r in stuck.quiet.records.values()]
    assert evicted == [0, 0, BATCH * N, BATCH * N]
    for t in stuck.batches[2]:
        assert t.score is None and "written with version 0, the oldest is 1" in t.score_error
        assert not t.loss_mask.any()
    assert not any(
        "off_policy/evicted" in name for name in Run(tmp_path, 0, TimedEngine(lengths)).go().quiet.records[1]
    )


def test_a_sampler_of_prompts_that_learns_must_not_be_drawn_ahead() -> None:
    class Learning(list):
        def update(self, batch):
            return None

    stream = PromptStream(Rows(), batch_size=BATCH, seed=1, shuffle=True, sampler=Learning(range(20)))
    with pytest.raises(UserError, match=r"set trainer\.max_staleness=0"):
        PromptSchedule(stream, Versions(staleness=1), last_step=3)
    with pytest.raises(UserError, match=r"set trainer\.max_staleness=0"):
        DynamicSchedule(stream, FilterGroupsConfig(), Versions(staleness=1), last_step=3, score=None, check=None)
    PromptSchedule(stream, Versions(), last_step=3)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3), st.integers(1, 6), st.integers(1, 7))
def test_draws_never_run_past_the_bound(ahead: int, first: int, last: int) -> None:
    stream = PromptStream(Rows(), batch_size=BATCH, seed=1, shuffle=True)
    draws = PromptSchedule(stream, Versions(staleness=ahead), last_step=last)
    begun = first - 1
    for step in range(first, last + 1):
        begun += len(draws.due(step)) // BATCH
        assert begun == max(first - 1, min(step + ahead, last)) and draws.due(step) == []


def test_pause_waits_for_requests_that_reach_the_engine_late() -> None:
    """A pool hands requests on one tick later: an abort before that finds nothing, so it must come again."""

    class Late(TimedEngine):
        async def generate(self, *args, **kwargs):
            await asyncio.sleep(0.5)
            return await super().generate(*args, **kwargs)

    async def go():
        engine = Late(lambda seed: 4)
        requests = ResumableGeneration(engine, asyncio.get_running_loop().time)
        response = asyncio.ensure_future(requests.generate([1], SamplingParams(8, seed=5), request_id="a"))
        await asyncio.sleep(0.1)
        assert await requests.pause() == 1 and not engine.under_way
        engine.load_weights((), 9)
        late = asyncio.ensure_future(requests.generate([1], SamplingParams(8, seed=6), request_id="b"))
        await asyncio.sleep(50)
        assert not late.done() and not response.done(), "nothing runs while paused"
        await requests.resume()
        done = await asyncio.gather(response, late)
        return done, await requests.busy()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        (first, second), busy = runner.run(go())
    assert first.token_ids.tolist() == [TimedEngine.token(5, j) for j in range(4)] and first.versions == (9,)
    assert first.parts == 2 and second.parts == 1 and first.finish_reason == "stop"
    assert len(busy) == 2 and busy[0][0] == 0 and busy[1][0] >= 50


def test_an_abort_that_nobody_paused_for_is_handed_on() -> None:
    async def go():
        engine = TimedEngine(lambda seed: 9)
        requests = ResumableGeneration(engine)
        response = asyncio.ensure_future(requests.generate([1], SamplingParams(8, seed=5), request_id="a"))
        await asyncio.sleep(3.5)
        engine.abort()
        return await response

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        completion = runner.run(go())
    assert completion.finish_reason == "abort" and len(completion.token_ids) == 3 and completion.parts == 1


def test_the_budget_is_that_of_the_whole_response() -> None:
    async def go():
        engine = TimedEngine(lambda seed: 100)
        requests = ResumableGeneration(engine)
        response = asyncio.ensure_future(requests.generate([1], SamplingParams(7, seed=5), request_id="a"))
        for _ in range(3):
            await asyncio.sleep(2.5)
            await requests.pause()
            await requests.resume()
        return await response

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        completion = runner.run(go())
    assert completion.finish_reason == "length" and len(completion.token_ids) == 7


def test_an_error_in_the_background_reaches_the_loop(tmp_path) -> None:
    engine = TimedEngine(lengths)
    run = Run(tmp_path, 1, engine)
    calls = []

    def decode(ids: list[int]) -> str:
        calls.append(ids)
        if len(calls) == 20:
            raise OSError("the tokenizer is gone")
        return ""

    run.trainer.parts.rollouts._attempts._decode = decode
    with pytest.raises(OSError, match="tokenizer is gone"):
        run.go()


def test_background_loop_runs_between_calls_and_ends_what_is_left() -> None:
    seen = []

    async def tick():
        while True:
            await asyncio.sleep(0.005)
            seen.append(1)

    async def begin():
        return asyncio.ensure_future(tick())

    async def fail():
        raise ValueError("no")

    async def cancelled():
        raise asyncio.CancelledError

    with BackgroundLoop() as loop:
        task = loop.run(begin())
        until(lambda: len(seen) >= 3)
        with pytest.raises(ValueError, match="no"):
            loop.run(fail())
        with pytest.raises(asyncio.CancelledError):
            loop.run(cancelled())
    assert task.cancelled()


def test_a_step_whose_rewards_are_all_the_same_is_said_once_and_counted(tmp_path: Path) -> None:
    class Flat(Run):
        async def _score(self, trajectory) -> None:
            await super()._score(trajectory)
            trajectory.score = 1.0

    run, told = Flat(tmp_path, 0, TimedEngine(lengths), steps=3), []
    run.quiet.event = lambda kind, **fields: told.append((kind, fields))  # type: ignore[attr-defined]
    run.go()
    flat = [fields for kind, fields in told if kind == "no_signal"]
    assert [fields["scores"] for fields in flat] == [[1.0]] * 3
    (said,) = [fields["message"] for fields in flat if fields["message"]]
    assert "every advantage is 0" in said and "scores: 1.0" in said and "verl reward check" in said
