"""User-written agent loops in processes of their own: the same trajectories, and nobody waits for a loop that
blocks."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scripted_record import ScriptedEngine
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.rollout import loops_of_a_user  # noqa: F401 - registers them here as model.external_lib does in a run
from verl.config import Map
from verl.engine.rollout.base import Completion, SamplingParams
from verl.rollout.attempt import RolloutSettings
from verl.rollout.groups import RolloutManager
from verl.rollout.loop_processes import LoopProcesses, LoopUnusable
from verl.trajectory import Batch, Prompt, Trajectory


class Quick(ScriptedEngine):
    """Answers in 10 ms with what it was asked."""

    version = 0

    async def generate(self, prompt_ids, sampling, *, request_id, group=None, session=None, media=None):
        await asyncio.sleep(0.01)
        draws = np.random.default_rng([sampling.seed % 2**32, sampling.call])
        return Completion(draws.integers(3, 200, 6), draws.random(6).astype(np.float32), "stop", text=None)


class Config(Map):
    def to_dict(self) -> dict[str, Any]:
        return dict(self)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("model")
    tiny_model(path)
    tiny_tokenizer(path)
    model = {
        "path": str(path), "tokenizer_path": None, "trust_remote_code": False, "custom_chat_template": None,
        "external_lib": "tests.unit.rollout.loops_of_a_user",
    }  # fmt: skip
    return Config(Map.of({"actor_rollout_ref": {"model": model}, "data": {"tokenizer": None}}))


def rows(*loops: tuple[str, dict[str, Any]]) -> list[Prompt]:
    return [
        Prompt(f"0:{i}@0", np.arange(3, 8) + i, messages="q", agent_name=loop, columns=columns)
        for i, (loop, columns) in enumerate(loops)
    ]


def manager(config: Any, processes: LoopProcesses | None, events: list[dict] | None = None) -> RolloutManager:
    from verl.data.tokenizer import load_tokenizer

    async def score(trajectory: Trajectory) -> None:
        trajectory.score = 0.0

    return RolloutManager(
        Quick(),
        RolloutSettings(SamplingParams(max_tokens=12), n=2, seed=3, max_lost_ratio=1.0),
        decode=lambda ids: " ".join(map(str, ids)),
        on_finished=score,
        tokenizer=load_tokenizer(config.actor_rollout_ref.model.path),
        config=config,
        event=lambda kind, **fields: (events if events is not None else []).append({"kind": kind, **fields}),
        processes=None if processes is None else lambda: processes,
    )


def sample(config: Any, prompts: list[Prompt], limit: int, events: list[dict] | None = None) -> Batch:
    async def go() -> Batch:
        rollouts = manager(config, LoopProcesses(limit, config) if limit else None, events)
        try:
            return await rollouts.take(prompts)
        finally:
            await rollouts.stop()

    return asyncio.run(go())


def test_a_trajectory_is_the_same_in_the_driver_and_in_a_process(config: Config) -> None:
    columns = {"level": 3, "tags": ("a", b"\0"), "uid": "the row's own"}
    prompts = rows(("forgets", columns), ("single_turn_agent", {}), ("forgets", columns))
    here, there = sample(config, prompts, 0), sample(config, prompts, 2)
    for ours, theirs in zip(here, there, strict=True):
        for one, other in zip(ours.segments, theirs.segments, strict=True):
            assert np.array_equal(one.context_ids, other.context_ids)
            assert one.columns.keys() == other.columns.keys()
            for name, values in one.columns.items():
                assert values.dtype == other.columns[name].dtype
                assert np.array_equal(values, other.columns[name]), name
        pids = ours.fields.pop("pid", None), theirs.fields.pop("pid", None)
        assert pids[0] in (None, os.getpid()) and pids[1] != os.getpid()
        assert ours.fields == theirs.fields
        assert (ours.text, ours.score, ours.num_turns, ours.extra) == (
            theirs.text,
            theirs.score,
            theirs.num_turns,
            theirs.extra,
        )
    first = there.trajectories[0]
    assert len(first.segments) == 2 and first.score == 0.5 and first.fields["columns"] == sorted(columns)


def test_a_loop_that_blocks_for_a_second_delays_nobody(config: Config) -> None:
    async def go() -> int:
        processes = LoopProcesses(1, config)
        rollouts = manager(config, processes)
        try:
            await rollouts.take(rows(("forgets", {"level": 0})))  # starts the process
            blocked = asyncio.ensure_future(rollouts.sample(rows(("blocks", {})), SamplingParams(12), 1))
            quick = 0
            while not blocked.done():
                await rollouts.sample(rows(("single_turn_agent", {})), SamplingParams(12), 1)
                quick += 1
            return quick
        finally:
            await rollouts.stop()

    assert asyncio.run(go()) >= 10


def test_failures_are_lost_trajectories_with_their_reason_and_a_process_that_ended_is_replaced(
    config: Config,
) -> None:
    events: list[dict] = []
    ways = ("raises", "returns text", "ends its process", "nothing", object(), "cancels itself")

    async def go() -> list[Trajectory]:
        rollouts = manager(config, LoopProcesses(1, config), events)
        try:
            return [(await rollouts.take(rows(("fails", {"how": way})))).trajectories[0] for way in ways]
        finally:
            await rollouts.stop()

    found = asyncio.run(go())
    assert [t.finish_reason for t in found] == ["lost", "lost", "lost", "stop", "lost", "lost"]
    assert "KeyError: 'no such tool'" in found[0].score_error and "LoopFailed" not in found[0].score_error
    assert "AgentLoopOutput, not str" in found[1].score_error
    assert "exit code 3" in found[2].score_error
    assert "loops_of_a_user.py" in events[0]["traceback"], "the traceback is the one of the user's code"
    assert "how" in found[4].score_error and "cannot be sent" in found[4].score_error
    assert "CancelledError" in found[5].score_error


def test_no_process_outlives_the_manager(config: Config) -> None:
    async def go() -> list[int]:
        processes = LoopProcesses(1, config)
        rollouts = manager(config, processes)
        task = asyncio.ensure_future(rollouts.take(rows(("fails", {"how": "waits for ever"}))))
        await asyncio.sleep(0.1)
        pids = [process.process.pid for process in processes._processes if process.process]
        await rollouts.stop()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pids

    pids = asyncio.run(go())
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_module_that_cannot_be_imported_ends_the_run(config: Config) -> None:
    other = Config(Map.of(dict(config)))
    other.actor_rollout_ref.model.external_lib = "no_such_module_of_loops"
    with pytest.raises(LoopUnusable, match="no_such_module_of_loops"):
        sample(other, rows(("forgets", {"level": 0})), 1)
