"""One rank against two, each with one thread, and against one process with two threads: the same command, the same
work.

    python benchmarks/ranks.py [--steps 3] [--repeats 2] [--strategy fsdp2] [--json FILE] [key=value …]

Runs `main_ppo` in turn as one process (sampler and trainer share weights) and as two ranks under Ray (FSDP2 over gloo,
a sampler beside each rank, weights through shared memory), on the step of `work.py`. The first step of a run warms
up; medians of the others. "beside" is what a run takes outside its steps: start and end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "workers"))
sys.path.insert(0, str(HERE))

import verl_worker  # noqa: E402
import work  # noqa: E402
from sides import write_result  # noqa: E402

PHASES = {
    "step": "timing_s/step",
    "sampling": "timing_s/gen",
    "training": "timing_s/update_actor",
    "sync": "timing_s/update_weights",
}
WAYS = {
    "one rank": (1, ["trainer.n_gpus_per_node=1"]),
    "one rank, two threads": (2, ["trainer.n_gpus_per_node=1"]),
    "two ranks": (1, ["trainer.n_gpus_per_node=2"]),
}


def run(way: str, folder: Path, content: dict, args: argparse.Namespace, extra: list[str]) -> list[dict]:
    """Records of the steps after the first; each with the seconds the run took beside its steps."""
    threads, words = WAYS[way]
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    keys = [
        *verl_worker.overrides(folder, content, args.precision),
        f"trainer.default_local_dir={out}",
        f"trainer.total_training_steps={args.steps + 1}",
        f"trainer.total_epochs={args.steps + 1}",
        "trainer.nnodes=1",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "actor_rollout_ref.model.external_lib=exact_length",
        *words,
        *extra,
    ]
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    env |= {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": f"{HERE / 'workers'}{os.pathsep}{HERE.parent}"}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *keys], env=env, capture_output=True, text=True
    )
    seconds = time.monotonic() - started
    if done.returncode:
        raise SystemExit(f"{way}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if PHASES["step"] in line]
    beside = seconds - sum(line[PHASES["step"]] for line in steps)
    return [{name: line[key] for name, key in PHASES.items()} | {"beside": beside} for line in steps[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=["default", "fp32"], default="default")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of a run")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each way")
    parser.add_argument("--data", type=Path, help="GSM8K's train.jsonl; synthetic prompts without it")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/verl/bench")
    parser.add_argument("--json", type=Path)
    args, extra = parser.parse_known_args()
    folder = args.folder.absolute() / "work_ranks"
    content = work.build(folder, work.Shape(), args.data)
    found: dict[str, list[dict]] = {way: [] for way in WAYS}
    for _ in range(args.repeats):
        for way in WAYS:
            found[way] += run(way, folder, content, args, extra)
            last = {name: round(value, 2) for name, value in found[way][-1].items()}
            print(f"{way:22} {last}", flush=True)
    result: dict = {"date": time.strftime("%Y-%m-%d"), "precision": args.precision, "steps": {}}
    for way, records in found.items():
        names = records[0].keys()
        result["steps"][way] = {n: round(statistics.median(r[n] for r in records), 3) for n in names}
    one = result["steps"]["one rank"]
    result["speed_up"] = {
        way: {n: round(one[n] / values[n], 2) for n in ("step", "sampling", "training")}
        for way, values in result["steps"].items()
        if way != "one rank"
    }
    write_result(result, args.json)


if __name__ == "__main__":
    main()
