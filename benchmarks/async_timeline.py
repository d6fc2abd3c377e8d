"""Who works when: the timelines of runs with different staleness, measured or drawn from run folders.

    python benchmarks/async_timeline.py run [--staleness 0,1,3] [--steps 8] [--out result.json] [--svg timeline.svg]
    python benchmarks/async_timeline.py draw RUN_FOLDER… [--svg timeline.svg]

`run` trains the 26 M parameter model of work.py through `main_ppo` on Ray, one process that samples and one that
trains, a thread each, with responses of very different lengths; the runs follow each other. It needs two free cores.
Every run writes timeline.jsonl: `draw` takes it from any folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

COLOURS = {
    "sampler": "#2f7d6d",
    "gen": "#e8e4da",
    "reward": "#d9d2c3",
    "old_log_prob": "#7aa6d6",
    "ref": "#93b8de",
    "adv": "#b9cfe8",
    "update_actor": "#2b62a8",
    "update_weights": "#c8553d",
    "save_checkpoint": "#8d7bb0",
    "testing": "#c9a227",
}
OTHER = "#9a9a9a"


def load(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run's timeline, each once (the last record of a step that was done again)."""
    lines = (folder / "timeline.jsonl").read_text(encoding="utf-8").splitlines()
    steps = {record["step"]: record for record in map(json.loads, lines)}
    return [steps[step] for step in sorted(steps)]


def figures(steps: list[dict[str, Any]], metrics: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps after the first two, in which everything starts up."""
    steady = steps[2:] or steps

    def median(name: str) -> float:
        return statistics.median(metrics[s["step"]][name] for s in steady)

    whole = steady[-1]["end"] - steps[len(steps) - len(steady) - 1]["end"] if len(steps) > 2 else None
    return {
        "steps": len(steady),
        "seconds_per_step": whole / len(steady) if whole else median("timing_s/step"),
        "gen_s": median("timing_s/gen"),
        "update_actor_s": median("timing_s/update_actor"),
        "update_weights_s": median("timing_s/update_weights"),
        "sampler_idle": median("perf/sampler_idle_ratio"),
        "trainer_idle": median("perf/trainer_idle_ratio"),
        "staleness_mean": median("training/off_policy/trajectory_staleness_worst/mean"),
        "versions_per_answer_mean": median("training/off_policy/trajectory_spans/mean"),
        "tokens_per_step": median("perf/total_num_tokens"),
    }


def records(folder: Path) -> dict[int, dict[str, Any]]:
    """metrics.jsonl by step."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "step" in record and "event" not in record:
            found[record["step"]] = record
    return found


def svg(runs: dict[str, list[dict[str, Any]]], width: int = 1100) -> str:
    """Two lanes for each run, on one scale of seconds since its first step began."""
    left, lane, gap, top = 150, 22, 46, 30
    longest = max(steps[-1]["end"] - steps[0]["begin"] for steps in runs.values())
    scale = (width - left - 20) / longest
    out, y, seen = [], top, set()

    def bar(a: float, b: float, row: int, colour: str, title: str) -> None:
        x, w = left + max(0.0, a) * scale, max(0.4, (b - max(0.0, a)) * scale)
        if b > 0:
            out.append(
                f'<rect x="{x:.1f}" y="{row}" width="{w:.1f}" height="{lane - 4}" fill="{colour}">'
                f"<title>{escape(title)}</title></rect>"
            )

    for name, steps in runs.items():
        zero = steps[0]["begin"]
        out.append(f'<text x="8" y="{y - 6}" font-weight="bold">{escape(name)}</text>')
        for row, label in ((y, "sampler has work"), (y + lane, "trainer")):
            out.append(f'<text x="8" y="{row + 13}">{label}</text>')
        for record in steps:
            for a, b in record["sampler"]:
                bar(a - zero, b - zero, y, COLOURS["sampler"], f"step {record['step']}: {b - a:.2f} s")
            for phase, a, b in record["trainer"]:
                seen.add(phase)
                title = f"step {record['step']}, {phase}: {b - a:.2f} s"
                bar(a - zero, b - zero, y + lane, COLOURS.get(phase, OTHER), title)
            x = left + (record["end"] - zero) * scale
            out.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 3}" y2="{y + 2 * lane}" stroke="#444" stroke-width="0.6"/>'
            )
        y += 2 * lane + gap
    for number, phase in enumerate([p for p in COLOURS if p in seen]):
        x = left + number * 110
        out.append(f'<rect x="{x}" y="{y - 20}" width="12" height="12" fill="{COLOURS[phase]}"/>')
        words = {"gen": "waits for responses", "reward": "waits for scores"}.get(phase, phase)
        out.append(f'<text x="{x + 16}" y="{y - 10}">{words}</text>')
    out.append(f'<text x="{left}" y="{y + 10}">{longest:.1f} s; a line ends each step</text>')
    size = f'width="{width}" height="{y + 24}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *out, "</svg>", ""])


def train(work_dir: Path, work: dict[str, Any], staleness: int, steps: int, batch: int) -> Path:
    """One run of `main_ppo`; returns its folder. RuntimeError with the end of its log if it fails."""
    out = work_dir / f"staleness_{staleness}"
    longest = max(max(row) for row in work["lengths"])
    words = [
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.rollout_is=token",
        f"data.train_files={work_dir / 'prompts.parquet'}",
        "data.val_files=null",
        f"data.train_batch_size={batch}",
        f"data.max_prompt_length={max(work['prompt_tokens'])}",
        f"data.max_response_length={longest}",
        f"actor_rollout_ref.model.path={work_dir / 'model'}",
        "actor_rollout_ref.model.external_lib=exact_length",
        f"actor_rollout_ref.rollout.n={work['shape']['responses']}",
        "actor_rollout_ref.rollout.name=native",
        "actor_rollout_ref.rollout.agent.default_agent_loop=exact_length",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={batch}",
        f"custom_reward_function.path={HERE / 'workers/bench_reward.py'}",
        "reward_model.num_workers=1",
        f"trainer.default_local_dir={out}",
        f"trainer.max_staleness={staleness}",
        f"trainer.total_training_steps={steps}",
        "trainer.resume_mode=disable",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=False",
        "trainer.logger=[]",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(HERE / "workers"), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"staleness {staleness}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return out


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Train once for each staleness, write the figures, return the timelines."""
    from work import Shape, build

    runs, results = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        shape = Shape(prompts=args.batch * 8, responses=8, lengths="geometric")
        work = build(Path(folder), shape, None)
        for staleness in map(int, args.staleness.split(",")):
            out = train(Path(folder), work, staleness, args.steps, args.batch)
            steps = load(out)
            name = f"max_staleness={staleness}"
            runs[name], results[name] = steps, figures(steps, records(out))
            print(name, json.dumps(results[name]), flush=True)
    base = next(iter(results.values()))["seconds_per_step"]
    for found in results.values():
        found["gain"] = round(base / found["seconds_per_step"], 3)
    if args.out:
        about = {
            "model": "26 M parameters",
            "prompts": args.batch,
            "responses": 8,
            "lengths": "geometric, at most 256",
        }
        args.out.write_text(json.dumps({"work": about, "runs": results}, indent=1) + "\n", encoding="utf-8")
    return runs


def main() -> None:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run, draw = commands.add_parser("run"), commands.add_parser("draw")
    run.add_argument("--staleness", default="0,1,3")
    run.add_argument("--steps", type=int, default=8)
    run.add_argument("--batch", type=int, default=8, help="prompts a step")
    run.add_argument("--out", type=Path)
    draw.add_argument("folders", type=Path, nargs="+")
    for command in (run, draw):
        command.add_argument("--svg", type=Path)
    args = parser.parse_args()
    runs = measure(args) if args.command == "run" else {str(f): load(f) for f in args.folders}
    if args.svg:
        args.svg.write_text(svg(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
