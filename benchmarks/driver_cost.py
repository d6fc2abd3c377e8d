"""What a step costs the driver when the model is elsewhere: rows out, columns back, at 8,192 answers of 4,096 tokens.

    python benchmarks/driver_cost.py [--answers 8192] [--tokens 4096] [--ranks 8] [--out FILE]

The driver's side is the real one (`verl.controller.ray.training`); the ranks are Ray actors that decode what they get
and answer with columns of the right length, without a model. Reported: seconds the driver computes (its processor
time: encoding, writing to and reading from the object store, filling rows), and seconds on the clock, which on a
machine with fewer cores than ranks are the ranks' too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


class Echo:
    """A rank without a model."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def _column(self) -> np.ndarray:
        return np.zeros(sum(row.length for row in self.rows), np.float32)

    def take_rows(self, payload: dict[str, np.ndarray]) -> None:
        """Decode, as a rank does."""
        from verl.controller import transport

        self.rows = transport.decode(payload)

    def old_log_probs(self, temperature: float) -> dict[str, np.ndarray]:
        """Two columns."""
        return {"old_log_probs": self._column(), "entropy": self._column()}

    def reference_log_probs(self, temperature: float) -> dict[str, np.ndarray]:
        """One column."""
        return {"ref_log_probs": self._column()}

    def update(self, columns: Any, minis: list[Any], temperature: float) -> dict[str, Any]:
        """Nothing is learnt."""
        result = {"metrics": {}, "grad_norm": 1.0, "refused": "", "tokens": 0}
        return {"results": [result] * len(minis), "columns": {}}

    def advance(self) -> float:
        """A rate."""
        return 0.0


def batch_of(answers: int, tokens: int, group: int = 8) -> Any:
    """Groups of `group` answers, lengths spread evenly from half to one and a half times `tokens`."""
    from verl.trajectory import Batch, Prompt, Trajectory

    rng = np.random.default_rng(0)
    rows = []
    for number in range(answers // group):
        prompt = Prompt(f"0:{number}@0", rng.integers(0, 150_000, 200), messages=None)
        for index in range(group):
            length = int(rng.integers(tokens // 2, tokens + tokens // 2))
            ids = rng.integers(0, 150_000, length)
            rows.append(Trajectory(prompt, index, response_ids=ids, response_mask=np.ones(length, bool)))
    return Batch(rows)


def measure(answers: int, tokens: int, ranks: int, steps: int = 3) -> dict[str, Any]:
    """Seconds by part of a step: the median of the steps after the first, which also makes the store's pages."""
    import ray

    from verl.controller.ray.training import ActorGroup, ReferenceGroup, Training
    from verl.controller.ray.workers import Group, Worker
    from verl.worker.plan import UpdatePlan

    ray.init(include_dashboard=False, object_store_memory=4 << 30, num_cpus=ranks, logging_level="ERROR")
    echo = ray.remote(Echo)
    group = Group([Worker(echo.remote(), f"rank {i}", "here") for i in range(ranks)])
    cfg = SimpleNamespace(ppo_mini_batch_size=256, ppo_epochs=1, shuffle=False)
    plan = UpdatePlan(cfg, horizon=1.0, batch_prompts=1024)
    training = Training(group, list(range(ranks)), plan=plan, temperature=1.0, balance=True)
    actor, reference = ActorGroup(training, ""), ReferenceGroup(training)
    batch = batch_of(answers, tokens)
    records = []
    for step in range(steps):
        parts: dict[str, tuple[float, float]] = {}
        training._placed = None
        for row in batch:
            row.old_log_probs = row.ref_log_probs = row.entropy = row.advantages = row.loss_mask = None
        _time(parts, "rows", lambda: training.place(batch, "rows"))
        _time(parts, "old_log_prob", lambda: actor.old_log_probs(batch))
        _time(parts, "ref", lambda: reference.log_probs(batch))
        for row in batch:
            row.advantages, row.loss_mask = np.ones(row.length, np.float32), np.ones(row.length, bool)
        _time(parts, "update", lambda number=step: actor.update(batch, step=number))
        records.append(parts)
    ray.shutdown()
    late = records[1:]
    out: dict[str, Any] = {"answers": answers, "tokens": int(batch.lengths.sum()), "ranks": ranks}
    for name in records[0]:
        out[name] = {
            "driver_s": round(float(np.median([r[name][0] for r in late])), 3),
            "clock_s": round(float(np.median([r[name][1] for r in late])), 3),
        }
    out["driver_s"] = round(sum(v["driver_s"] for v in out.values() if isinstance(v, dict)), 3)
    out["clock_s"] = round(sum(v["clock_s"] for v in out.values() if isinstance(v, dict)), 3)
    out["driver_us_per_answer"] = round(out["driver_s"] / answers * 1e6, 1)
    return out


def _time(parts: dict[str, tuple[float, float]], name: str, work: Callable[[], Any]) -> None:
    cpu, clock = time.process_time(), time.perf_counter()
    work()
    parts[name] = (time.process_time() - cpu, time.perf_counter() - clock)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = measure(given.answers, given.tokens, given.ranks)
    text = json.dumps(found, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
