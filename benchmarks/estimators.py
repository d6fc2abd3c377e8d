"""What advantages cost the driver: every estimator over 8,192 trajectories of up to 4,096 tokens.

    python benchmarks/estimators.py [--trajectories 8192] [--tokens 4096] [--shortest 4096] [--lam 0.95] [--only grpo,gae] [--out FILE]

Lengths are uniform between `--shortest`, by default half of `--tokens`, and all of it. Reported are the seconds of `compute_advantages` (the median of
three calls) and how far the process's memory peaked above the batch itself.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from verl.algorithms.batch_advantages import compute_advantages
from verl.algorithms.registry import ESTIMATORS
from verl.config.schema.algorithm import AlgorithmConfig
from verl.trajectory import Batch, Prompt, Trajectory

GROUP = 8


def batch_of(trajectories: int, shortest: int, tokens: int, rng: np.random.Generator) -> Batch:
    """Groups of eight with every column that an estimator may need."""
    rows = []
    prompts = [
        Prompt(uid=str(n), ids=np.arange(8), messages=[], data_source="bench")
        for n in range(-(-trajectories // GROUP))
    ]
    for number in range(trajectories):
        length = int(rng.integers(shortest, tokens + 1))
        score = float(rng.integers(0, 2))
        columns = {
            "values": rng.standard_normal(length, np.float32),
            "old_log_probs": -rng.random(length, np.float32),
            "rollout_log_probs": -rng.random(length, np.float32),
            "sum_pi_squared": rng.random(length, np.float32),
        }
        rows.append(
            Trajectory(
                prompt=prompts[number // GROUP],
                index=number % GROUP,
                response_ids=np.zeros(length, np.int32),
                response_mask=np.ones(length, bool),
                score=score,
                score_parts={"accuracy": score, "format": float(rng.random())},
                **columns,
            )
        )
    greedy = {p.uid: Trajectory(p, 0, np.zeros(1, np.int32), np.ones(1, bool), score=0.5) for p in prompts}
    for row in rows:
        row.baseline = greedy[row.uid]
    return Batch(rows, {})


def measured(batch: Batch, name: str, lam: float) -> dict[str, Any]:
    """Seconds and GiB of one estimator."""
    settings = AlgorithmConfig(adv_estimator=name, lam=lam)
    settings.gdpo_reward_keys = ["accuracy", "format"]
    settings.gdpo_reward_weights = [1.0, 1.0]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        compute_advantages(batch, settings, GROUP)
        seconds.append(time.perf_counter() - start)
    return {"seconds": round(statistics.median(seconds), 3), "worst": round(max(seconds), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--shortest", type=int)
    parser.add_argument("--lam", type=float, default=1.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.shortest = args.shortest or args.tokens // 2
    batch = batch_of(args.trajectories, args.shortest, args.tokens, np.random.default_rng(0))
    found = {}
    for name in args.only.split(",") if args.only else ESTIMATORS.functions:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found[name] = measured(batch, name, args.lam)
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        found[name]["further_peak_gib"] = round(more / 2**20, 2)
        print(name, found[name], flush=True)
    if args.out:
        args.out.write_text(json.dumps(vars(args) | {"out": None, "estimators": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
