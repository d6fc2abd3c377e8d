"""What a trajectory of many turns costs the driver: processor seconds by turns, and memory of many that are open at
once.

    python benchmarks/long_trajectory.py [--turns 50,100,200] [--open 1000] [--json FILE]

A stand-in sampler gives 100 tokens at once; the loop inserts 200 tokens after each turn and hands over the whole
context, as loops on token ids do. The time is that of `RolloutManager`, sessions and records included, without that of
putting the loop's own context together. Memory is that of the process beyond 8 bytes for each token of the open
trajectories.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from verl.engine.rollout.base import Completion, RolloutEngine, SamplingParams
from verl.rollout import loops
from verl.rollout.attempt import RolloutSettings
from verl.rollout.groups import RolloutManager
from verl.rollout.record import Outcome
from verl.trajectory import Prompt, Trajectory

SAMPLED, INSERTED, PROMPT = 100, 200, 100


class Sampler(RolloutEngine):
    """Gives the same tokens to everyone."""

    version = 1
    tokens, log_probs = np.arange(SAMPLED), np.full(SAMPLED, -1.0, np.float32)

    async def generate(self, prompt_ids: Any, sampling: Any, **options: Any) -> Completion:
        return Completion(self.tokens, self.log_probs, "stop", versions=(1,))

    def abort(self, request_ids: Any = None) -> None: ...
    def load_weights(self, weights: Any, version: int) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...


class Turns(loops.AgentLoop):
    """`turns` calls, each after the tokens before it and 200 more."""

    turns, spent, ready, go = 0, 0.0, 0, asyncio.Event()

    async def run(self, row: dict[str, Any], session: Any) -> Outcome:
        total = PROMPT + self.turns * (SAMPLED + INSERTED)
        ids, end = np.zeros(total, np.int64), PROMPT
        ids[:end] = row["prompt_ids"]
        for _ in range(self.turns):
            completion = await session.generate(ids[:end])
            ids[end : end + SAMPLED] = completion.token_ids
            ids[end + SAMPLED : end + SAMPLED + INSERTED] = 7
            end += SAMPLED + INSERTED
        del ids
        Turns.ready += 1
        await Turns.go.wait()
        return Outcome()


loops.register("turns")(Turns)


async def scored(trajectory: Trajectory) -> None:
    trajectory.score = 1.0


async def run(turns: int, trajectories: int) -> tuple[float, float]:
    """(processor seconds a trajectory, GiB beyond the tokens while all are open)."""
    Turns.turns, Turns.ready, Turns.go = turns, 0, asyncio.Event()
    settings = RolloutSettings(SamplingParams(max_tokens=10**6), n=1, seed=1, default_loop="turns")
    manager = RolloutManager(Sampler(), settings, decode=lambda ids: "", on_finished=scored)
    prompts = [Prompt(f"0:{i}@0", np.arange(PROMPT), "q", row=i) for i in range(trajectories)]
    process = psutil.Process()
    before, started = process.memory_info().rss, time.process_time()
    taken = asyncio.ensure_future(manager.take(prompts))
    while Turns.ready < trajectories:
        await asyncio.sleep(0)
    memory = process.memory_info().rss - before
    Turns.go.set()
    await taken
    seconds = time.process_time() - started
    tokens = trajectories * (PROMPT + turns * (SAMPLED + INSERTED))
    return seconds / trajectories, (memory - 8 * tokens) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", default="50,100,200")
    parser.add_argument("--open", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    asyncio.run(run(5, 5))
    figures: dict[str, float] = {}
    for turns in map(int, options.turns.split(",")):
        seconds = min(asyncio.run(run(turns, 20))[0] for _ in range(3))
        figures[f"seconds of {turns} turns"] = round(seconds, 5)
        print(f"{turns:4} turns: {seconds * 1000:7.2f} ms of processor time, {seconds / turns * 1e6:6.1f} µs a turn")
    if options.open:
        memory = asyncio.run(run(200, options.open))[1]
        figures[f"GiB beyond the tokens of {options.open} open trajectories of 200 turns"] = round(memory, 3)
        print(f"{options.open} open trajectories of 200 turns: {memory:.2f} GiB beyond their tokens")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
