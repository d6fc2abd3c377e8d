"""Sessions: what an agent loop's calls become, and trajectories of several segments."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
from verl.rollout.agent_loop import AgentLoopBase, AgentLoopOutput

from tests.scripted_record import ScriptedEngine
from tests.tiny import tiny_model
from verl.engine.rollout.base import Completion, SamplingParams
from verl.rollout import loops
from verl.rollout.attempt import RolloutSettings
from verl.rollout.groups import RolloutManager
from verl.rollout.record import Outcome
from verl.trajectory import Batch, Prompt, Segment, Trajectory, segments_of


class TwoTurns(AgentLoopBase):
    """Asks twice, and drops its history after the first turn: two segments, the second without the prompt."""

    async def run(self, sampling_params, **row):
        first = await self.generate(row["prompt_ids"], sampling_params)
        context = np.concatenate([[7], np.asarray(first.token_ids[-2:], np.int64)])
        second = await self.generate(context, sampling_params)
        return [
            AgentLoopOutput(
                prompt_ids=ids,
                response_ids=done.token_ids,
                response_mask=np.ones(len(done.token_ids), bool),
                response_logprobs=done.log_probs,
                num_turns=4,
                metrics={"calls": number},
                extra_fields={f"turn {number}": "seen"},
            )
            for number, (ids, done) in enumerate([(row["prompt_ids"], first), (context, second)], 1)
        ]


def sample(engine, loop: type[loops.AgentLoop], n: int = 3, **settings) -> Batch:
    """A group of `n` trajectories of a loop."""
    loops.register(loop.__name__)(loop)

    async def score(trajectory: Trajectory) -> None:
        trajectory.score = float(trajectory.index)

    params = SamplingParams(max_tokens=12, ignore_eos=True)
    chosen = RolloutSettings(params, n=n, seed=3, default_loop=loop.__name__, **settings)
    manager = RolloutManager(engine, chosen, decode=lambda ids: " ".join(map(str, ids)), on_finished=score)

    async def run() -> Batch:
        batch = await manager.take([Prompt("0:0@0", np.arange(3, 8), messages="q")])
        await manager.scored(batch)
        return batch

    try:
        return asyncio.run(run())
    finally:
        loops._LOOPS.pop(loop.__name__)


def native(tmp_path):
    from transformers import AutoModelForCausalLM

    from verl.engine.rollout.native.engine import NativeEngine

    module = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "model"))
    return NativeEngine(module, eos_token_ids=[], max_model_len=64)


class Repeat(AgentLoopBase):
    """The same request twice."""

    async def run(self, sampling_params, **row):
        done = [await self.generate(row["prompt_ids"], sampling_params) for _ in range(2)]
        ids = np.concatenate([part.token_ids for part in done])
        return AgentLoopOutput(row["prompt_ids"], ids, np.ones(len(ids), bool))


def test_segments_know_what_they_share(tmp_path) -> None:
    """A branch begins with the prompt and three sampled tokens of the first segment, another call with nothing of
    it."""

    class Branching(loops.AgentLoop):
        async def run(self, row, session):
            prompt = row["prompt_ids"]
            first = await session.generate(prompt, {"max_tokens": 5})
            await session.generate([*prompt, *first.token_ids[:3], 7], {"max_tokens": 2})
            await session.generate([prompt[0] + 1], {"max_tokens": 2})
            await session.generate([*prompt, *first.token_ids, 9], {"max_tokens": 2})
            return Outcome()

    batch = sample(native(tmp_path), Branching, n=2)
    for t in batch:
        long, branch, other = t.segments
        shared = len(t.prompt.ids) + 3
        assert [(s.parent, s.shared) for s in t.segments] == [(None, 0), (0, shared), (None, 0)]
        assert branch.context_ids[:-1].tolist() == [*t.prompt.ids, *long.response_ids[:3]]
        assert long.response_mask.tolist() == [True] * 5 + [False] + [True] * 2 and other.length == 2
        assert t.policy_tokens == 11 and (t.rollout_log_probs != 0).sum() == 11


def test_what_segments_share_may_count_in_each_of_them(tmp_path) -> None:
    """A branch of a branch has the sampled tokens that it goes on from in its response; texts have them once, and
    rewards stay on the turn that earned them."""

    class Branching(loops.AgentLoop):
        async def run(self, row, session):
            prompt = row["prompt_ids"]
            first = await session.generate(prompt, {"max_tokens": 5})
            branch = [*prompt, *first.token_ids[:3], 7]
            second = await session.generate(branch, {"max_tokens": 3})
            await session.generate([*branch, *second.token_ids[:2]], {"max_tokens": 2})
            await session.generate([*prompt[:2], 9], {"max_tokens": 2})
            await session.generate([*prompt, *first.token_ids, 9], {"max_tokens": 2})
            scores = np.arange(sum(segment.response_length for segment in session.segments()))
            return Outcome(metrics={"token_scores": scores})

    engine = native(tmp_path)
    (once,), (each,) = (sample(engine, Branching, 1, count_shared=value) for value in ("once", "every_segment"))
    assert each.text == once.text and each.extra["token_scores"].sum() == once.extra["token_scores"].sum()
    assert len(each.extra["token_scores"]) == each.length
    prompt, long = each.prompt.ids, each.segments[0]
    for segment, same in zip(each.segments, once.segments, strict=True):
        whole = np.concatenate([segment.context_ids, segment.response_ids])
        assert whole.tolist() == [*same.context_ids, *same.response_ids]
        assert (segment.parent, segment.shared) == (same.parent, same.shared)
        assert np.array_equal(segment.rollout_log_probs[-same.length :], same.rollout_log_probs)
    assert [segment.context_ids is prompt for segment in each.segments] == [True, True, True, False]
    branch, leaf, other = each.segments[1:]
    assert branch.response_mask.tolist() == [True] * 3 + [False] + [True] * 3
    assert leaf.response_mask.tolist() == [True] * 3 + [False] + [True] * 4
    for segment in (branch, leaf):
        assert np.array_equal(segment.rollout_log_probs[:3], long.rollout_log_probs[:3])
    assert np.array_equal(leaf.rollout_log_probs[:6], branch.rollout_log_probs[:6])
    assert other.length == 2 and (once.policy_tokens, each.policy_tokens) == (14, 22)


def test_equal_answers_keep_their_own_log_probs() -> None:
    """A second call gives the tokens of the first with other log-probs; the loop returns the second alone."""

    class Verified(AgentLoopBase):
        async def run(self, sampling_params, **row):
            await self.generate(row["prompt_ids"], sampling_params)
            done = await self.generate([7, 7], sampling_params)
            return AgentLoopOutput([7, 7], done.token_ids, [1, 1], done.log_probs)

    class Echoing(ScriptedEngine):
        version = 1

        async def generate(self, prompt_ids, sampling, **options):
            log_probs = np.full(2, -1.0 if len(prompt_ids) == 2 else -3.0, np.float32)
            return Completion(np.array([5, 6]), log_probs, "stop", versions=(len(prompt_ids),))

    (trajectory,) = sample(Echoing(), Verified, n=1)
    (segment,) = trajectory.segments
    assert segment.rollout_log_probs.tolist() == [-1, -1] and segment.response_mask.all()


def test_no_two_calls_of_a_trajectory_repeat_random_draws(tmp_path) -> None:
    batch = sample(native(tmp_path), Repeat, n=8)
    same = [np.mean(t.response_ids[:12] == t.response_ids[12:]) for t in batch]
    assert np.mean(same) < 0.1, "the second call draws what the first drew"


def test_a_loop_that_drops_its_history_gives_segments(tmp_path) -> None:
    batch = sample(native(tmp_path), TwoTurns)
    for t in batch:
        first, second = t.segments
        assert first.context_ids is t.prompt.ids and second.context_ids.tolist() == [
            7,
            *first.response_ids[-2:],
        ]
        assert t.length == first.length + second.length == 24 and t.policy_tokens == 24
        assert np.array_equal(t.response_ids, np.concatenate([first.response_ids, second.response_ids]))
        assert np.array_equal(t.rollout_log_probs, np.concatenate([first.rollout_log_probs, second.rollout_log_probs]))
        assert (
            t.fields == {"turn 1": "seen", "turn 2": "seen", "agent_metrics": {"calls": 2}}
            and t.extra["calls"] == 2
            and t.num_turns == 4
        )
    kinds = [segment.context_ids is batch[0].prompt.ids for segment in batch.segments]
    assert kinds == [True] * 3 + [False] * 3, "segments that share their context are neighbours"


class Recorder:
    """An engine that notes what it is asked."""

    version = 0

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, str | None, int]] = []

    async def generate(self, prompt_ids, sampling, *, request_id, group=None, session=None, media=None):
        self.asked.append((request_id, group, session, sampling.call))
        return Completion(np.arange(3), np.zeros(3, np.float32), "stop", prefilled=2)

    def end_session(self, session: str) -> None:
        self.asked.append(("end", None, session, 0))


def test_later_calls_name_their_session() -> None:
    engine, name = Recorder(), "0:0@0#0"
    (t,) = sample(engine, TwoTurns, n=1)
    assert engine.asked == [(name, "0:0@0", name, 0), (f"{name}.1", None, name, 1), ("end", None, name, 0)]
    assert t.extra["prefill"][0] == 2 < t.extra["prefill"][1]


class Prefixed(AgentLoopBase):
    """Puts tokens before the prompt: the same for two of three responses."""

    async def run(self, sampling_params, **row):
        ids = np.concatenate([[9 + row["sample_index"] // 2], row["prompt_ids"]])
        done = await self.generate(ids, sampling_params)
        return AgentLoopOutput(ids, done.token_ids, np.ones(len(done.token_ids), bool))


def test_first_calls_that_begin_with_the_same_tokens_share_their_prefill() -> None:
    engine = Recorder()
    batch = sample(engine, Prefixed)
    first, second, third = (group for name, group, *_ in engine.asked if name != "end")
    assert first == second != third and "0:0@0" not in (first, third)
    assert [t.segments[0].context_ids[0] for t in batch] == [9, 9, 10]


def test_a_segment_has_the_versions_that_wrote_its_own_tokens() -> None:
    class Moving(Recorder):
        async def generate(self, *args, **kwargs):
            done = await super().generate(*args, **kwargs)
            return replace(done, versions=(len(self.asked),))

    (t,) = sample(Moving(), TwoTurns, n=1)
    assert [segment.versions for segment in t.segments] == [(1,), (2,)] and t.versions == (1, 2)


def test_segments_of_a_group_with_the_same_context_are_neighbours() -> None:
    def response(index: int, context: list[int]) -> Trajectory:
        parts = [Segment(np.array(ids), np.arange(2), np.ones(2, bool)) for ids in ([1, 2], context)]
        return Trajectory(Prompt("0:0@0", np.array([1, 2]), messages=None), index, segments=parts)

    rows = segments_of([response(0, [3]), response(1, [4]), response(2, [3])])
    assert [(row.index, row.context_ids.tolist()) for row in rows[3:]] == [(0, [3]), (2, [3]), (1, [4])]
    assert [row.index for row in rows[:3]] == [0, 1, 2]
