"""Does a long run stay flat? Trains for many tiny steps and watches memory, descriptors, threads, shared memory, disk
and the time of a step.

    python benchmarks/soak.py [--steps 2000] [--ranks-steps 300] [--json FILE]

One run in one process, then two of two ranks under Ray, each with saves and validations; in the second of them Ray and
torch keep fewer records of what they did. The processes of a run are looked at from outside, every second. What is
printed is by how much each number grew between the end of step 100 and the last step: of a run that is flat nothing
grows but the files of its steps (responses, metrics), which are said by step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import freeze_inputs
import psutil

WARM = 100
"""Steps after which a run has all it keeps: compiled graphs, caches, the checkpoints that are kept."""
MEMORY_OF = "memory_mb of "
Seen = list[tuple[int, dict[str, float]]]
"""What was measured, each time with the step it was measured in."""
FEW = {"RAY_task_events_max_num_task_in_gcs": "1000", "TORCH_FR_BUFFER_SIZE": "100"}
"""Ray's head keeps a record of each of the last 100,000 calls, torch on each rank of each of the last 2,000
collectives: so few are there before WARM."""


def overrides(inputs: Path, out: Path, steps: int, more: list[str]) -> list[str]:
    """The command line of a run of `steps` steps."""
    model, rollout = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={inputs / 'train.parquet'}",
        f"data.val_files={inputs / 'val.parquet'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        f"custom_reward_function.path={inputs / 'reward.py'}",
        f"{model}.path={inputs / 'models/qwen3'}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"{rollout}.name=native",
        f"{rollout}.n=2",
        "trainer.device=cpu",
        "trainer.total_epochs=100000",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=25",
        "trainer.max_actor_ckpt_to_keep=2",
        "trainer.test_freq=50",
        "trainer.logger=[tensorboard]",
        f"trainer.default_local_dir={out}",
        *more,
    ]


def processes(root: psutil.Process) -> list[psutil.Process]:
    """A run and all it started."""
    return [root, *root.children(recursive=True)]


def kind(process: psutil.Process, root: psutil.Process) -> str:
    """What a process of a run is: the driver, an actor of Ray by its class, or the program."""
    if process.pid == root.pid:
        return "driver"
    words = process.cmdline() or [process.name()]
    if words[0].startswith("ray::"):
        return words[0].split()[0].split(".")[0]
    script = next((Path(word).stem for word in words if word.endswith(".py")), None)
    module = words[words.index("-m") + 1] if "-m" in words else None
    return script or module or Path(words[0]).name


def looked_at(root: psutil.Process, out: Path) -> dict[str, float]:
    """What the run holds now; sums over its processes, memory also by kind. A process that ends meanwhile is left
    out."""
    found: dict[str, float] = {"processes": 0, "memory_mb": 0.0, "descriptors": 0, "threads": 0}
    for process in processes(root):
        try:
            memory = process.memory_info()
            own = (memory.rss - memory.shared) / 2**20  # without pages of files, which other programs may share
            descriptors, threads = process.num_fds(), process.num_threads()
            name = MEMORY_OF + kind(process, root)
        except psutil.Error:
            continue
        found["processes"] += 1
        found["memory_mb"] += own
        found[name] = found.get(name, 0.0) + own
        found["descriptors"] += descriptors
        found["threads"] += threads
    files = [path for path in out.rglob("*") if path.is_file()]
    found["shared_memory_files"] = len(list(Path("/dev/shm").iterdir()))
    found["run_folder_files"] = len(files)
    found["run_folder_mb"] = sum(path.stat().st_size for path in files if path.exists()) / 2**20
    return found


def step_of(out: Path) -> int:
    """The step that was logged last."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        lines = [line for line in file.read().splitlines() if line.endswith(b"}") and line.startswith(b"{")]
    return int(json.loads(lines[-1]).get("step", 0)) if lines else 0


def soak(inputs: Path, out: Path, steps: int, more: list[str], **environment: str) -> dict[str, Any]:
    """Run, look at it every second, and compare the medians of the tenth after WARM with those of the last tenth."""
    log = (out.parent / f"{out.name}.log").open("w")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(inputs, out, steps, more)]
    run = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment)
    seen: Seen = []
    began = time.monotonic()
    while run.poll() is None:
        time.sleep(1.0)
        try:
            seen.append((step_of(out), looked_at(run, out)))
        except (psutil.Error, FileNotFoundError):  # it ended, or a file was removed, while it was looked at
            continue
    if run.returncode:
        raise SystemExit(f"the run ended with status {run.returncode}: see {log.name}")
    figures = compared(seen, steps) | compared(times(out), steps)
    return figures | {"steps": steps, "seconds": round(time.monotonic() - began)}


def times(out: Path) -> Seen:
    """Milliseconds of each step and of its sampling, as the run logged them."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = [record for record in records if "timing_s/step" in record]
    keys = {"step_ms": "timing_s/step", "sampling_ms": "timing_s/gen"}
    return [(r["step"], {name: 1000 * r[key] for name, key in keys.items()}) for r in timed]


def compared(seen: Seen, steps: int) -> dict[str, Any]:
    """name → {"after_100", "at_the_end", "growth_a_step"}: medians of what was seen in two stretches of the run."""
    tenth = max(1, (steps - WARM) // 10)
    early = [found for step, found in seen if WARM <= step < WARM + tenth]
    late = [found for step, found in seen if steps - tenth <= step < steps]
    if not early or not late:
        raise SystemExit(f"too few steps after the first {WARM} to compare")
    out: dict[str, Any] = {}
    for name in dict.fromkeys(name for found in early + late for name in found):
        first, last = (statistics.median(found.get(name, 0.0) for found in part) for part in (early, late))
        growth = (last - first) / (steps - WARM - tenth)
        out[name] = {
            "after_100": round(first, 1),
            "at_the_end": round(last, 1),
            "growth_a_step": round(growth, 5),
        }
    parts = [[found for step, found in seen if start <= step < start + tenth] for start in range(WARM, steps, tenth)]
    for name in [name for name in out if name.startswith("memory_mb") or name.endswith("_ms")]:
        medians = [statistics.median(found.get(name, 0.0) for found in part) for part in parts if part]
        out[name]["by_tenth"] = [round(median, 1) for median in medians]
    return out


def main() -> None:
    """Print the table, and write it with --json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks-steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        freeze_inputs.make(root / "inputs")
        if args.steps:
            found["one process"] = soak(root / "inputs", root / "one", args.steps, [])
        if args.ranks_steps:
            ranks = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.agent.num_workers=1"]
            found["two ranks"] = soak(root / "inputs", root / "two", args.ranks_steps, ranks)
            few = soak(root / "inputs", root / "few", args.ranks_steps, ranks, **FEW)
            found["two ranks, few records"] = few
    for name, numbers in found.items():
        print(f"{name}: {numbers['steps']} steps in {numbers['seconds']} s")
        for key, value in numbers.items():
            if isinstance(value, dict):
                print(
                    f"  {key:<36}{value['after_100']:>10} → {value['at_the_end']:<10} {value['growth_a_step']:+} a step"
                )
                if "by_tenth" in value:
                    print("    by tenth of the steps after 100:", *value["by_tenth"])
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
