"""What the critic's update costs beside the policy's: the same model, the same tokens, one optimizer step each.

    python benchmarks/critic_cost.py [--repeats 5] [--out benchmarks/results/critic_cost.json]

The two are timed by turns in one process on one thread, so that what slows the machine slows both; reported are the
medians and the quotient of each turn. The model and the lengths are those of `work.py`; dtype is that of the
configuration.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sides import write_result
from work import Shape, build

from verl.algorithms.flat_tokens import count_denominators
from verl.config import load
from verl.trajectory import Segment
from verl.workers.training_worker import Worker

LIMIT = 1.15


def rows_of(work: dict[str, Any], rng: np.random.Generator) -> list[Segment]:
    """The step's responses with every column that the two updates read."""
    rows = []
    for number, (prompt, lengths) in enumerate(zip(work["prompt_tokens"], work["lengths"], strict=True)):
        context = rng.integers(2, work["shape"]["vocab"], prompt)
        for index, length in enumerate(lengths):
            ids = rng.integers(2, work["shape"]["vocab"], length)
            row = Segment(context, ids, np.ones(length, bool), uid=f"0:{number}@0", index=index)
            row.put("loss_mask", np.ones(length, bool))
            for name in ("advantages", "returns", "values"):
                row.put(name, rng.standard_normal(length, np.float32))
            rows.append(row)
    return rows


def seconds(worker: Worker, role: str, mini: dict[str, Any]) -> float:
    """Of one optimizer step of a role."""
    started = time.perf_counter()
    worker.update(role, {}, [mini])
    return time.perf_counter() - started


def cpu_name() -> str:
    """The processor's own name, where Linux says it."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(prompts=args.prompts)
    with tempfile.TemporaryDirectory() as folder:
        work = build(Path(folder), shape, None)
        words = [
            f"actor_rollout_ref.model.path={folder}/model",
            "algorithm.adv_estimator=gae",
            "trainer.device=cpu",
        ]
        worker = Worker(load(words))
        worker.build(total_steps=100)
    rows = rows_of(work, np.random.default_rng(0))
    denominators = count_denominators(rows, float(shape.tokens))
    mini = {"rows": np.arange(len(rows)), "denominators": denominators, "trajectory_tokens": None}
    worker.take_rows(rows)
    times: dict[str, list[float]] = {"actor": [], "critic": []}
    for turn in range(args.repeats + 1):
        for role, found in times.items():
            took = seconds(worker, role, mini)
            if turn:  # the first is warm-up, and fills old_log_probs
                found.append(took)
    quotients = [c / a for a, c in zip(times["actor"], times["critic"], strict=True)]
    result = {
        "processor": cpu_name(),
        "threads": 1,
        "torch": torch.__version__,
        "shape": asdict(shape),
        "tokens": sum(row.length for row in rows),
        "seconds": {role: [round(one, 3) for one in found] for role, found in times.items()},
        "median": {role: round(statistics.median(found), 3) for role, found in times.items()},
        "critic_to_actor": round(statistics.median(quotients), 3),
        "limit": LIMIT,
    }
    write_result(result, args.out)


if __name__ == "__main__":
    main()
