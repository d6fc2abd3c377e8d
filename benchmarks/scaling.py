"""How our step grows with its work, what it spends beside sampling and training, and how fast a run starts.

    python benchmarks/scaling.py [--threads 1] [--repeats 2] [--json FILE]

- responses: 16 … 256 responses of 64 tokens; tokens: 16 responses of 64 … 1024 tokens. The exponent is the slope of
  log(seconds) over log(work); 1 is linear. CPU seconds, because the machine may be shared.
- overhead: share of a step outside `gen`, log-prob passes and `update_actor`.
- start: from the command to the first sampled token of a small model, wall-clock seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import work
from grpo_step import HERE, Side
from sides import write_result

ANSWERS = (16, 32, 64, 128, 256)
TOKENS = (64, 128, 256, 512, 1024)
WORKING = ("gen", "old_log_prob", "ref", "update_actor")


def shape_of(kind: str, size: int) -> work.Shape:
    """`size` responses of 64 tokens, or 16 responses of `size` tokens; 8 responses a prompt."""
    if kind == "responses":
        return work.Shape(prompts=size // 8, responses=8, tokens=64)
    return work.Shape(prompts=2, responses=8, tokens=size)


def exponent(points: list[tuple[int, float]]) -> float:
    """Least-squares slope of log(seconds) over log(size)."""
    xs = [math.log(size) for size, _ in points]
    ys = [math.log(seconds) for _, seconds in points]
    mx, my = statistics.mean(xs), statistics.mean(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)


def measure(folder: Path, kind: str, sizes: tuple[int, ...], args: argparse.Namespace) -> dict:
    """Median CPU seconds of a step per size, after a warming step, and the share of overhead."""
    points, overheads = [], []
    for size in sizes:
        where = folder / f"{kind}_{size}"
        work.build(where, shape_of(kind, size), args.data)
        command = [sys.executable, str(HERE / "workers/verl_worker.py"), str(where)]
        side = Side("verl", [*command, "--threads", str(args.threads)], args.threads)
        records = [side.step() for _ in range(args.repeats + 1)][1:]
        side.close()
        seconds = statistics.median(r["cpu"] for r in records)
        overhead = statistics.median(
            1 - sum(r["timings"].get(name, 0.0) for name in WORKING) / r["step"] for r in records
        )
        print(f"{kind} {size:5}  {seconds:7.2f} CPU s a step, {overhead:.1%} of it overhead", flush=True)
        points.append((size, seconds))
        overheads.append(overhead)
    return {
        "cpu_s": {str(size): round(seconds, 2) for size, seconds in points},
        "exponent": round(exponent(points), 3),
        "overhead": {str(size): round(share, 4) for size, share in zip(sizes, overheads, strict=True)},
    }


def start_up(folder: Path, threads: int) -> float:
    """Seconds from the command to the last of 16 responses of 4 tokens, on a small model."""
    sys.path.insert(0, str(HERE / "workers"))
    import verl_worker

    where = folder / "start"
    shape = work.Shape(prompts=8, responses=2, tokens=4, layers=2, hidden=64, vocab=512)
    content = work.build(where, shape, None)
    keys = [k for k in verl_worker.overrides(where, content, "default") if "agent_loop" not in k]
    timeline = where / "verl_out/timeline.jsonl"
    timeline.unlink(missing_ok=True)
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *keys, "trainer.total_training_steps=1"],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the run failed:\n{done.stderr[-2000:]}")
    step = json.loads(timeline.read_text().splitlines()[0])
    return next(end for phase, _, end in step["trainer"] if phase == "gen") - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--data", type=Path, help="GSM8K's train.jsonl; synthetic prompts without it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict = {"date": time.strftime("%Y-%m-%d"), "threads": args.threads}
    with tempfile.TemporaryDirectory() as folder:
        starts = [start_up(Path(folder), args.threads) for _ in range(3)]
        result["start_s"] = round(statistics.median(starts), 2)
        print(f"start to first response: {result['start_s']} s", flush=True)
        for kind, sizes in (("responses", ANSWERS), ("tokens", TOKENS)):
            result[kind] = measure(Path(folder), kind, sizes, args)
    write_result(result, args.json)


if __name__ == "__main__":
    main()
