"""RolloutManager: groups in draw order, scoring that starts early, responses that are lost, seeds."""

import asyncio
import gc
import weakref

import numpy as np
import pytest

from tests.counting import instructions
from tests.scripted_record import ScriptedEngine
from verl.engine.rollout.base import Completion, RolloutEngine, SamplingParams
from verl.rollout import agent_loop
from verl.rollout.attempt import RolloutSettings, response_seed
from verl.rollout.groups import RolloutError, RolloutManager
from verl.trajectory import AGENT_LOOP_ARGUMENTS, Prompt, Trajectory


class Scripted(ScriptedEngine):
    """Finishes responses in reverse order of submission; `fail` names requests that raise."""

    version = 7

    def __init__(self, fail: tuple[str, ...] = ()):
        self.calls: list[tuple[str, str | None, int]] = []
        self._fail = fail

    async def generate(self, prompt_ids, sampling, *, request_id, group=None, session=None, media=None):
        self.calls.append((request_id, group, sampling.seed))
        await asyncio.sleep(0.02 / len(self.calls))
        if request_id in self._fail:
            raise RuntimeError("engine broke")
        if "all" in self._fail:
            raise SamplerGone("no sampler is left")
        tokens = np.array([len(prompt_ids), 5, 6])
        return Completion(tokens, np.full(3, -0.5, np.float32), "stop", versions=(7,))


class SamplerGone(RuntimeError):
    ends_the_run = True


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(uid=f"0:{i}@0", ids=np.arange(i + 1), messages="q", row=i) for i in range(count)]


def _rollouts(
    engine: RolloutEngine,
    scored: list[str],
    n: int = 2,
    decode=lambda ids: " ".join(map(str, ids)),
    event=None,
    **kwargs,
) -> RolloutManager:
    async def score(trajectory: Trajectory) -> None:
        await asyncio.sleep(0)
        scored.append(f"{trajectory.uid}#{trajectory.index}")
        trajectory.score = 1.0

    settings = RolloutSettings(SamplingParams(max_tokens=8), n=n, seed=3, **kwargs)
    return RolloutManager(engine, settings, decode=decode, on_finished=score, event=event)


def test_responses_come_back_in_draw_order_and_scored() -> None:
    engine, scored = Scripted(), []

    async def go():
        rollouts = _rollouts(engine, scored)
        batch = await rollouts.take(_prompts(3))
        await rollouts.scored()
        return batch

    batch = asyncio.run(go())
    assert [(t.uid, t.index) for t in batch] == [(f"0:{i}@0", j) for i in range(3) for j in range(2)]
    assert sorted(scored) == sorted(f"{t.uid}#{t.index}" for t in batch)
    assert all(t.score == 1.0 and t.versions == (7,) and t.text == f"{t.prompt.row + 1} 5 6" for t in batch)
    assert all(t.response_mask.all() and t.rollout_log_probs.tolist() == [-0.5] * 3 for t in batch)
    assert {group for _, group, _ in engine.calls} == {"0:0@0", "0:1@0", "0:2@0"}
    assert len({seed for *_, seed in engine.calls}) == 6


def test_a_lost_response_is_never_scored_and_too_many_stop_the_run() -> None:
    events, scored = [], []

    async def go(fail, max_lost):
        def event(kind, **fields):
            events.append((kind, fields))

        rollouts = _rollouts(Scripted(fail), scored, event=event, max_lost_ratio=max_lost)
        batch = await rollouts.take(_prompts(2))
        await rollouts.scored()
        return batch

    batch = asyncio.run(go(("0:1@0#1",), 0.5))
    lost = batch[3]
    assert lost.score is None and "engine broke" in lost.score_error and lost.length == 0
    assert batch.meta["lost"] == 1 and "0:1@0#1" not in scored and len(scored) == 3
    assert events[0][0] == "rollout_failure" and events[0][1]["row"] == 1
    with pytest.raises(RolloutError, match="lost 1 of 4"):
        asyncio.run(go(("0:1@0#1",), 0.1))


def test_a_sampler_that_is_gone_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SamplerGone, match="no sampler is left"):
        asyncio.run(_rollouts(Scripted(("all",)), []).take(_prompts(3)))
    gc.collect()
    assert not caplog.records, "asyncio complains of errors that nobody took"


def test_a_batch_that_is_done_goes_without_a_garbage_collection() -> None:
    gc.disable()
    try:
        batch = asyncio.run(_rollouts(Scripted(), []).take(_prompts(1)))
        rows = [weakref.ref(segment) for segment in batch.segments]
        assert all(segment.trajectory is row for segment, row in zip(batch.segments, batch, strict=True))
        del batch
        assert [row() for row in rows] == [None] * len(rows)
    finally:
        gc.enable()


def test_a_group_has_one_greedy_response_beside_its_own() -> None:
    class Noting(Scripted):
        async def generate(self, prompt_ids, sampling, **how):
            self.asked.append((how["request_id"], sampling.temperature))
            return await super().generate(prompt_ids, sampling, **how)

    engine, scored = Noting(), []
    engine.asked = []

    async def go():
        rollouts = _rollouts(engine, scored, greedy_baseline=True)
        batch = await rollouts.take(_prompts(2))
        await rollouts.scored(batch)
        aside = await rollouts.sample(_prompts(1), SamplingParams(max_tokens=8), 2)
        return batch, aside

    batch, aside = asyncio.run(go())
    assert [t.index for t in batch] == [0, 1] * 2 and len({id(t.baseline) for t in batch}) == 2
    assert all(t.baseline.uid == t.uid and t.baseline.score == 1.0 for t in batch)
    assert [t.baseline for t in aside] == [None, None], "validation compares with nothing"
    assert sorted(t for _, t in engine.asked if "aside" not in _) == [0.0] * 2 + [1.0] * 4


def test_a_loop_that_scores_itself_replaces_the_reward_function() -> None:
    @agent_loop.register("self_scoring_test")
    class SelfScoring(agent_loop.AgentLoopBase):
        async def run(self, sampling_params, **row):
            first = await self.generate(row["prompt_ids"], sampling_params)
            ids = [*first.token_ids, 99, *(await self.generate(row["prompt_ids"], sampling_params)).token_ids]
            return agent_loop.AgentLoopOutput(
                row["prompt_ids"], ids, [1, 1, 1, 0, 1, 1, 1], [-1.0] * 7, reward_score=0.25, num_turns=4
            )

    engine, scored = Scripted(), []

    async def go():
        rollouts = _rollouts(engine, scored, n=1, default_loop="self_scoring_test")
        batch = await rollouts.take(_prompts(1))
        await rollouts.scored()
        return batch

    (t,) = asyncio.run(go())
    assert t.score == 0.25 and scored == [] and t.num_turns == 4
    assert t.rollout_log_probs[3] == 0 and t.policy_tokens == 6
    assert len({request for request, *_ in engine.calls}) == 2, "every call of a response has its own request id"


def test_columns_with_the_names_of_arguments_do_not_collide() -> None:
    seen: list[dict] = []

    @agent_loop.register("looking_test")
    class Looking(agent_loop.AgentLoopBase):
        async def run(self, sampling_params, **row):
            seen.append({"sampling_params": sampling_params, **row})
            first = await self.generate(row["prompt_ids"], sampling_params)
            return agent_loop.AgentLoopOutput(row["prompt_ids"], first.token_ids, [1, 1, 1], first.log_probs)

    own = dict.fromkeys((*AGENT_LOOP_ARGUMENTS, "data_source", "extra_info", "difficulty"), "the user's")
    (prompt,) = _prompts(1)
    prompt.columns = own

    async def go():
        rollouts = _rollouts(Scripted(), [], n=1, default_loop="looking_test")
        batch = await rollouts.take([prompt])
        await rollouts.scored()
        return batch

    assert asyncio.run(go()).meta["lost"] == 0
    (row,) = seen
    assert row["sampling_params"].max_tokens == 8 and row["prompt_ids"].tolist() == [0]
    assert (row["uid"], row["sample_index"], row["raw_prompt"]) == ("0:0@0", 0, "q")
    assert row["difficulty"] == "the user's" and row["columns"] == own


class Worded(Scripted):
    """Responses of `length` tokens whose text came with them."""

    def __init__(self, length: int = 3):
        super().__init__()
        self._length = length

    async def generate(self, prompt_ids, sampling, *, request_id, group=None, session=None, media=None):
        ids = np.arange(self._length)
        return Completion(ids, np.zeros(len(ids), np.float32), "stop", versions=(7,), text="came along")


@agent_loop.register("text_test")
class Changing(agent_loop.AgentLoopBase):
    """One completion as the prompt's name wants it: whole, cut, with a token more, with another one, asked twice."""

    async def run(self, sampling_params, **row):
        first = await self.generate(row["prompt_ids"], sampling_params)
        ids = first.token_ids.tolist()
        kind = row["raw_prompt"]
        if kind == "twice":
            await self.generate(row["prompt_ids"], sampling_params)
        given = {"cut": ids[:-1], "longer": [*ids, 9], "changed": [*ids[:-1], 9], "none": []}.get(kind, ids)
        return agent_loop.AgentLoopOutput(row["prompt_ids"], given, [1] * len(given))


@agent_loop.register("images_test")
class Showing(agent_loop.AgentLoopBase):
    """An output as the prompt's name wants it: a mask that is too short, images that the model did not see, none of
    them."""

    async def run(self, sampling_params, **row):
        first = await self.generate(row["prompt_ids"], sampling_params)
        images = {"image": {"images": ["one"]}, "none": {"images": [], "videos": None}}
        mask = [1] * (len(first.token_ids) - (row["raw_prompt"] == "uneven"))
        given = images.get(row["raw_prompt"], {})
        return agent_loop.AgentLoopOutput(row["prompt_ids"], first.token_ids, mask, multi_modal_data=given)


def test_an_output_that_cannot_be_used_loses_its_response_alone() -> None:
    async def go(kinds: list[str]) -> list[Trajectory]:
        rollouts = _rollouts(Worded(), [], n=1, default_loop="images_test", max_lost_ratio=0.5)
        prompts = [Prompt(f"0:{i}@0", np.arange(3), messages=kind, row=i) for i, kind in enumerate(kinds)]
        return list(await rollouts.take(prompts))

    uneven, image, none, plain = asyncio.run(go(["uneven", "image", "none", "plain"]))
    assert "3 response_ids, 2 response_mask" in uneven.score_error and "session.chat" in image.score_error
    assert none.length == plain.length == 3 and none.score_error is None


def test_a_text_that_came_with_a_response_is_taken_if_it_is_its_own() -> None:
    decoded: list[list[int]] = []

    def decode(ids: np.ndarray) -> str:
        decoded.append(ids.tolist())
        return "decoded here"

    async def go(kinds: list[str]) -> list[str | None]:
        rollouts = _rollouts(Worded(), [], n=1, decode=decode, default_loop="text_test")
        prompts = [Prompt(f"0:{i}@0", np.arange(3), messages=kind, row=i) for i, kind in enumerate(kinds)]
        return [t.text for t in await rollouts.take(prompts)]

    assert asyncio.run(go(["whole"])) == ["came along"] and not decoded
    assert asyncio.run(go(["cut", "longer", "changed", "none", "twice"])) == ["decoded here"] * 5
    assert sorted(decoded) == [[], [0, 1], [0, 1, 2], [0, 1, 2, 9], [0, 1, 9]]


def test_a_response_costs_the_driver_the_same_however_long_it_is() -> None:
    """Nothing is decoded, and no loop of Python visits the tokens."""

    def decode(ids: np.ndarray) -> str:
        raise AssertionError("the text came with the response")

    def cost(length: int) -> int:
        async def go() -> None:
            rollouts = _rollouts(Worded(length), [], n=4, decode=decode)
            batch = await rollouts.take(_prompts(2))
            assert {(t.text, t.length) for t in batch} == {("came along", length)}

        return instructions(lambda: asyncio.run(go()))

    assert 0 < cost(4096) == cost(2)


def test_unknown_loops_are_named() -> None:
    with pytest.raises(ValueError, match="single_turn_agent"):
        agent_loop.get("no_such_loop")


def test_seeds_depend_on_each_part() -> None:
    seeds = {response_seed(s, u, i) for s in (0, 1) for u in ("0:1@0", "0:1@1") for i in (0, 1)}
    assert len(seeds) == 8 and all(0 <= s < 2**63 for s in seeds)
