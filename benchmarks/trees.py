"""Tokens that a micro-batch computes against tokens in segments, for agents that branch and rewrite.

    python benchmarks/trees.py [--group 8] [--budget 65536] [--count_shared once] [--out benchmarks/results/trees.json]

A stand-in sampler gives tokens at random; what is counted is the work of the trainer's packs
(`verl.engine.training.packing`), with the tree and with nothing shared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion, RolloutEngine, SamplingParams
from verl.engine.training.packing import MicroBatching, pack, split_rows
from verl.rollout import loops
from verl.rollout.attempt import RolloutSettings
from verl.rollout.groups import RolloutManager
from verl.rollout.record import Outcome
from verl.trajectory import Prompt, Segment, Trajectory

SAMPLED, INSERTED, PROMPT = 100, 200, 500
DRAW = np.random.default_rng(1)


class Sampler(RolloutEngine):
    """Tokens at random."""

    version = 1

    async def generate(self, prompt_ids: Any, sampling: Any, **options: Any) -> Completion:
        return Completion(DRAW.integers(0, 50_000, SAMPLED), np.full(SAMPLED, -1.0, np.float32), "stop", versions=(1,))

    def abort(self, request_ids: Any = None) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...


async def grown(session: Any, ids: np.ndarray, turns: int) -> np.ndarray:
    """A dialogue with so many more turns, each followed by an observation."""
    for _ in range(turns):
        sampled = (await session.generate(ids)).token_ids
        ids = np.concatenate([ids, sampled, DRAW.integers(0, 50_000, INSERTED)])
    return ids


@loops.register("compaction")
class Compaction(loops.AgentLoop):
    """32 turns; after every 8 the dialogue is its first 4 turns and a summary."""

    async def run(self, row: dict[str, Any], session: Any) -> Outcome:
        opening = ids = await grown(session, row["prompt_ids"], 4)
        for _ in range(4):
            ids = await grown(session, ids, 7)
            ids = np.concatenate([opening, DRAW.integers(0, 50_000, INSERTED)])
        return Outcome()


@loops.register("best_of_4")
class BestOf4(loops.AgentLoop):
    """4 branches of 3 turns, 4 of each, and 4 of each of these."""

    async def run(self, row: dict[str, Any], session: Any) -> Outcome:
        level = [row["prompt_ids"]]
        for _ in range(3):
            level = [await grown(session, ids, 3) for ids in level for _ in range(4)]
        return Outcome()


@loops.register("dialogue")
class Dialogue(loops.AgentLoop):
    """One line of 20 turns, as mini-swe-agent's dialogues are."""

    async def run(self, row: dict[str, Any], session: Any) -> Outcome:
        await grown(session, row["prompt_ids"], 20)
        return Outcome()


async def played(name: str, group: int, count_shared: str) -> list[Segment]:
    """The segments of a group."""

    async def score(trajectory: Trajectory) -> None:
        trajectory.score = 0.0

    params = SamplingParams(max_tokens=10**6)
    settings = RolloutSettings(params, n=group, seed=1, default_loop=name, count_shared=count_shared)
    manager = RolloutManager(Sampler(), settings, decode=lambda ids: "", on_finished=score)
    return (await manager.take([Prompt("0:0@0", DRAW.integers(0, 50_000, PROMPT), "q")])).segments


def computed(rows: Sequence[Segment], how: MicroBatching) -> int:
    """Tokens of all packs."""
    return sum(pack(part, how).size for part in split_rows(rows, how))


def main() -> None:
    """Print and record a line for each agent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--budget", type=int, default=65536)
    parser.add_argument("--count_shared", choices=["once", "every_segment"], default="once")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures = {}
    for name in ("compaction", "best_of_4", "dialogue"):
        rows = asyncio.run(played(name, args.group, args.count_shared))
        tree = computed(rows, MicroBatching(args.budget))
        apart = computed(rows, MicroBatching(args.budget, share_prompt=False))
        figures[name] = {"segments": len(rows), "tokens in segments": apart, "computed": tree}
        print(f"{name}: {len(rows)} segments, {apart} tokens in them, {tree} computed ({tree / apart:.2f})", flush=True)
    if args.out:
        about = {"group": args.group, "tokens of a pack": args.budget}
        args.out.write_text(json.dumps(about | figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
