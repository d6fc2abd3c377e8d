"""A group of training ranks does the same work whether it is called in this process or from afar."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl.engine.training.base import MicroBatch, TrainingEngine, TrainStepResult
from verl.engine.training.packing import MicroBatching, pack, split_rows
from verl.platform import processes
from verl.trajectory import Batch, Prompt, Segment, Trajectory, flat
from verl.workers import payloads
from verl.workers.group import DirectCalls, WorkerGroup
from verl.workers.roles import Policy, Role, update_plan
from verl.workers.training_worker import Worker
from verl.workers.update_plan import UpdateResult

OUTPUTS = {"log_probs": "old_log_probs", "entropy": "entropy"}


class CountingEngine(TrainingEngine):
    """log p = −(token + 1) / (10 · version). Every update makes a version; what it was given is written down. One that
    holds no outputs computes as the others do and has nothing to say, as all but the last stage of a pipeline."""

    def __init__(self, share: bool = True, holds_outputs: bool = True) -> None:
        self.version, self.steps, self.holds_outputs = 1, list[dict[str, Any]](), holds_outputs
        self.state = {"weights": b"w", "optimizer": b"o"}
        self._how = MicroBatching(share_prompt=share)

    def forward(self, rows, outputs=("log_probs",), *, temperature):
        if not self.holds_outputs:
            return {}
        found = -(flat(rows, "response_ids") + 1).astype(np.float32) / 10 / self.version
        return {name: found if name == "log_probs" else -found for name in outputs}

    def step(self, rows, loss, outputs=("log_probs",), *, temperature):
        value = 0.0
        if rows and self.holds_outputs:
            found = torch.tensor(self.forward(rows, temperature=temperature)["log_probs"], requires_grad=True)
            value = float(loss(MicroBatch(rows, found, -found))[0].detach())
        ids = [(row.uid, row.index) for row in rows]
        self.steps.append({"loss": value, "rows": ids, "masks": [row.loss_mask.tolist() for row in rows]})
        self.version += 1
        size = sum(pack(chunk, self._how).size for chunk in split_rows(rows, self._how))
        return TrainStepResult({}, 1.0, tokens=size)

    def schedule(self, total_steps):
        pass

    def advance(self):
        return 0.1

    def named_weights(self):
        for name in "abc":
            self.steps.append({"gathered": name})
            yield name, torch.zeros(1)

    def save_weights(self, directory):
        directory.write_bytes(self.state["weights"])

    def save_optimizer(self, directory):
        directory.write_bytes(self.state["optimizer"])

    def load_weights(self, directory):
        self.state["weights"] = directory.read_bytes()

    def load_optimizer(self, directory):
        self.state["optimizer"] = directory.read_bytes()


class CountingWorker(Worker):
    """A rank whose engines only count."""

    def __init__(self) -> None:
        super().__init__(settings())

    def restart(self, config: Any, rank: int, world: int, share: bool, holds_outputs: bool) -> None:
        Worker.__init__(self, config, rank, world)
        self.engines = {role: CountingEngine(share, holds_outputs) for role in ("actor", "ref")}
        self.engines["ref"].state = {"weights": b"ref", "optimizer": b"none"}

    def steps(self) -> list[dict[str, Any]]:
        return self.engines["actor"].steps

    def state(self) -> dict[str, bytes]:
        return self.engines["actor"].state


class FarCalls:
    """Calls as Ray makes them: everything is pickled on its way, and arrays arrive read-only."""

    shares_rows = False

    def __init__(self, count: int):
        self.workers, self.sent = [CountingWorker() for _ in range(count)], list[tuple[str, Any]]()

    def call(self, method, *args, each=None, doing=""):
        given = [args] * len(self.workers) if each is None else each
        self.sent.append((method, given))
        return [travel(getattr(worker, method)(*travel(own))) for worker, own in zip(self.workers, given, strict=True)]

    def share(self, value, media=()):
        return [value, *(one.inputs for one in payloads.distinct_media(media))]


def travel(value: Any) -> Any:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


def settings(**keys: Any) -> SimpleNamespace:
    actor = {
        "ppo_mini_batch_size": 2,
        "ppo_epochs": 1,
        "shuffle": False,
        "loss_scale_factor": None,
        "loss_agg_mode": "seq-mean-token-mean",
        "clip_ratio": 0.2,
    }
    correction = keys.pop("rollout_correction", None)
    rollout = SimpleNamespace(
        temperature=1.0,
        nnodes=0,
        checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1, backend="naive"),
    )
    return SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(actor=SimpleNamespace(**actor | keys), rollout=rollout),
        algorithm=SimpleNamespace(rollout_correction=correction),
        data=SimpleNamespace(max_response_length=8, train_batch_size=4),
        trainer=SimpleNamespace(device="cpu"),
    )


class Ranks:
    """Workers with engines that only count, called one way or the other. The first half of the ranks of one row holds
    no outputs."""

    def __init__(self, dp_ranks: list[int] | None, config: SimpleNamespace, share: bool = True):
        self.dp_ranks = ranks = dp_ranks or [0]
        self.calls: Any = DirectCalls(CountingWorker()) if dp_ranks is None else FarCalls(len(ranks))
        self.holds = [rank not in ranks[number + 1 :] for number, rank in enumerate(ranks)]
        each = [(config, rank, len(ranks), share, holds) for rank, holds in enumerate(self.holds)]
        self.calls.call("restart", each=each)
        facts = [
            {"dp_rank": rank, "roles": ["actor", "ref"], "holds_outputs": holds}
            for rank, holds in zip(ranks, self.holds, strict=True)
        ]
        group = WorkerGroup(self.calls, facts, plan=update_plan(config))
        self.policy, self.reference = Policy("actor", group, group.plan), Role("ref", group)

    def steps(self) -> list[dict[str, Any]]:
        """What each update did, over the ranks that hold different rows."""
        steps = [found for found, holds in zip(self.calls.call("steps"), self.holds, strict=True) if holds]
        return [
            {
                "loss": sum(part["loss"] for part in parts),
                "rows": sorted(row for part in parts for row in zip(part["rows"], part["masks"], strict=True)),
            }
            for parts in zip(*steps, strict=True)
        ]


WAYS = [None, [0], [0, 1], [0, 0, 1, 1]]
ways = pytest.mark.parametrize("dp_ranks", WAYS, ids=["direct", "far", "two ranks", "two ranks, four processes"])


def batch_of(groups: Sequence[Sequence[int]], segments: int = 1) -> Batch:
    """Groups of responses of these lengths, each of so many segments, ready for an update."""
    rng, rows = np.random.default_rng(0), []
    for g, lengths in enumerate(groups):
        prompt = Prompt(f"0:{g}@0", np.arange(4 + g), messages=None)
        for index, length in enumerate(lengths):
            parts = [segment(rng, prompt.ids if s == 0 else np.arange(9 + s), length) for s in range(segments)]
            rows.append(Trajectory(prompt, index, segments=parts))
    return Batch(rows)


def segment(rng: np.random.Generator, context: np.ndarray, length: int) -> Segment:
    ids = rng.integers(0, 20, length)
    return Segment(
        context,
        ids,
        np.ones(length, bool),
        rollout_log_probs=-(ids + rng.integers(0, 3, length)).astype(np.float32) / 10,
        loss_mask=np.ones(length, bool),
        advantages=rng.standard_normal(length).astype(np.float32),
    )


LENGTHS = [(3, 1, 4), (2, 6), (5,), (1, 2, 3)]


def run(
    dp_ranks: list[int] | None, config: SimpleNamespace, batch: Batch, first: bool = False
) -> tuple[Ranks, UpdateResult]:
    ranks = Ranks(dp_ranks, config)
    if first:
        ranks.policy.forward(batch, "old_log_prob", OUTPUTS)
    return ranks, ranks.policy.update(batch, step=1)


def same(one: Batch, other: Batch) -> None:
    for mine, theirs in zip(one.segments, other.segments, strict=True):
        assert mine.columns.keys() == theirs.columns.keys()
        for name, values in mine.columns.items():
            assert np.array_equal(values, theirs.columns[name]), name


# -- columns -----------------------------------------------------------------------------------------------------


@ways
def test_columns_of_a_pass_are_on_the_drivers_rows(dp_ranks) -> None:
    batch, ranks = batch_of(LENGTHS, segments=2), Ranks(dp_ranks, settings())
    ranks.policy.forward(batch, "old_log_prob", OUTPUTS)
    ranks.reference.forward(batch, "ref", {"log_probs": "ref_log_probs"})
    for row in batch.segments:
        expected = -(row.response_ids + 1).astype(np.float32) / 10
        assert np.array_equal(row.old_log_probs, expected) and np.array_equal(row.ref_log_probs, expected)
        assert np.array_equal(row.entropy, -expected) and row.entropy.flags.writeable


@ways
def test_every_update_leaves_the_log_probs_of_its_own_rows(dp_ranks) -> None:
    """Without a pass before it: the second mini-batch is computed with weights that the first one moved."""
    batch = batch_of(LENGTHS)
    run(dp_ranks, settings(), batch)
    for row in batch.segments:
        version = 1 if row.uid in ("0:0@0", "0:1@0") else 2
        expected = -(row.response_ids + 1).astype(np.float32) / 10 / np.float32(version)
        assert np.allclose(row.old_log_probs, expected) and np.allclose(row.entropy, -expected)


def test_a_batch_travels_once_and_then_only_what_is_new() -> None:
    batch = batch_of(LENGTHS)
    ranks, _ = run([0, 1], settings(ppo_epochs=2), batch, first=True)
    sent = [method for method, _ in ranks.calls.sent if method != "restart"]
    assert sent == ["receive_rows", "forward", "update", "run"]
    news = dict(ranks.calls.sent)["update"][0][1]
    assert sorted(news) == ["advantages", "loss_mask"]
    ranks.policy.update(batch, step=2)
    assert dict(ranks.calls.sent)["update"][0][1] == {}


# -- mini-batches ------------------------------------------------------------------------------------------------


CASES = {
    "token-mean": {"loss_agg_mode": "token-mean"},
    "trajectories": {},
    "epochs": {"ppo_epochs": 2, "shuffle": True, "data_loader_seed": 7},
    "weights": {
        "rollout_correction": {
            "bypass_mode": True,
            "loss_type": "reinforce",
            "rollout_is": "sequence",
            "rollout_is_batch_normalize": True,
        }
    },
    "rejection": {
        "rollout_correction": {
            "bypass_mode": True,
            "rollout_rs": "token_k1",
            "rollout_rs_threshold": "0.9_1.1",
        }
    },
    **{
        loss: {
            "ppo_epochs": 2,
            "policy_loss": {"loss_mode": loss, "clip_cov_lb": -9.0, "clip_cov_ratio": 0.3},
        }
        for loss in ("gspo", "geo_mean", "clip_cov", "kl_cov")
    },
}


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dp_ranks", WAYS[1:], ids=str)
def test_ranks_that_are_far_do_what_one_does_here(dp_ranks, case, segments) -> None:
    """Rows, masks after rejection, T, B and T_i (they are in the loss), columns and metrics; parts on ranks add up."""
    config = settings(**CASES[case])
    here, far = batch_of(LENGTHS, segments), batch_of(LENGTHS, segments)
    (ours, result), (theirs, remote) = (
        run(way, config, b, first="ppo_epochs" in CASES[case]) for way, b in ((None, here), (dp_ranks, far))
    )
    same(here, far)
    assert (remote.updates, remote.skipped, remote.tokens) == (result.updates, result.skipped, result.tokens)
    assert remote.metrics == pytest.approx(result.metrics)
    for mine, other in zip(ours.steps(), theirs.steps(), strict=True):
        assert mine["rows"] == other["rows"] and other["loss"] == pytest.approx(mine["loss"], abs=1e-6)


@ways
@pytest.mark.parametrize("segments", [1, 2])
def test_a_mini_batch_counts_tokens_and_trajectories_of_all_ranks(dp_ranks, segments, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(
        "verl.algorithms.objective.ActorObjective.__init__",
        lambda self, actor, counts, correction, tokens_of, *more: seen.append((counts, tokens_of)),
    )
    monkeypatch.setattr(
        "verl.workers.training_worker.record_old_log_probs",
        lambda objective: lambda micro: (torch.zeros(1), {}),
    )
    batch = batch_of(LENGTHS, segments)
    batch[0].loss_mask = np.zeros(batch[0].length, bool)
    batch[1].loss_mask = np.arange(batch[1].length) == 0
    run(dp_ranks, settings(), batch)
    assert [(c.tokens, c.trajectories) for c, _ in seen[:2]] == [(1 + 12 * segments, 4), (11 * segments, 4)]
    assert all((tokens_of is None) == (segments == 1) for _, tokens_of in seen)
    assert {1, 4 * segments} <= {t for _, counts in seen for t in (counts or {1: 1, 2: 4}).values()}


@ways
def test_a_mini_batch_without_a_token_is_left_out(dp_ranks) -> None:
    batch = batch_of(LENGTHS)
    for row in batch.trajectories[:5]:
        row.loss_mask = np.zeros(row.length, bool)
    ranks, result = run(dp_ranks, settings(), batch)
    assert (result.updates, result.skipped) == (1, 1) and result.metrics["actor/lr"] == 0.1
    assert {uid for (uid, _), _ in ranks.steps()[0]["rows"]} == {"0:2@0", "0:3@0"}
    assert batch[0].old_log_probs is None and batch[5].old_log_probs is not None


@pytest.mark.parametrize("unusable", [(), (0, 3)])
@pytest.mark.parametrize("share", [False, True])
def test_shared_prompts_are_the_tokens_saved(share, unusable) -> None:
    batch = batch_of(LENGTHS)
    for place in unusable:
        batch[place].loss_mask = np.zeros(batch[place].length, bool)
    result = Ranks(None, settings(), share).policy.update(batch, step=1)
    again = 4 + 2 * 7 if unusable else 2 * 4 + 5 + 2 * 7
    assert result.tokens - result.computed == share * again and result.computed > 0


# -- weights and state -------------------------------------------------------------------------------------------


@ways
def test_a_checkpoint_is_of_the_role_that_was_named(dp_ranks, tmp_path) -> None:
    ranks = Ranks(dp_ranks, settings())
    for role in (ranks.policy, ranks.reference):
        for part in ("weights", "optimizer"):
            role.save(part, tmp_path / f"{role.name}-{part}")
    assert (tmp_path / "ref-weights").read_bytes() == b"ref"
    ranks.policy.load("weights", tmp_path / "ref-weights")
    ranks.policy.load("optimizer", tmp_path / "actor-optimizer")
    assert all(state == {"weights": b"ref", "optimizer": b"o"} for state in ranks.calls.call("state"))
    with pytest.raises(RuntimeError, match="no engine for the role 'critic'"):
        Role("critic", ranks.policy.group).save("weights", tmp_path / "critic")


def test_a_transfer_that_fails_gathers_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathering is a collective: the other ranks would wait for ever, or pair with the next one."""
    monkeypatch.setattr("verl.workers.training_worker.moving_adapter", lambda config: None)

    def no_room(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("verl.weight_sync.channel.BucketSender.send", no_room)
    worker = Ranks(None, settings()).calls.workers[0]
    with pytest.raises(OSError, match="No space"):
        worker.send_weights("channel", [processes.identity()], 1, False)
    assert [step["gathered"] for step in worker.engine().steps] == ["a", "b", "c"]
