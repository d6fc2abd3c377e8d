"""Several algorithms on the quickstart's task: the same warmed-up model, data and number of sampled tokens; a table and
a figure.

    make quickstart
    python benchmarks/compare_algorithms.py --start quickstart_run --methods grpo,ppo --seeds 1 --figure docs/ppo.svg
    python benchmarks/compare_algorithms.py --start quickstart_run --methods grpo,distill_alone --figure distill.svg

The teacher of `distill` and `distill_alone` is the policy that the quickstart trained by GRPO, its student the model
that all start from. Each run is `main_ppo` with the words of METHODS below; runs that are there already are read,
not repeated. The horizontal axis is response tokens sampled for training. Accuracy is that of one greedy response to
each of the 200 held-out problems.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ACTOR, COLORS = "actor_rollout_ref.actor", ("#2563eb", "#dc2626", "#059669", "#7c3aed")
METHODS = {
    "grpo": [],
    "ppo": ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "trainer.critic_warmup=3"],
    "drgrpo": ["algorithm.norm_adv_by_std_in_grpo=False", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"],
    "dapo": [
        "algorithm.filter_groups.enable=True",
        f"{ACTOR}.clip_ratio_high=0.28",
        "data.train_batch_size=16",
        f"{ACTOR}.ppo_mini_batch_size=16",
    ],
}
RESPONSES = "actor_rollout_ref.rollout.n="
TEACHER = "distillation.teacher_models.teacher_model.model_path"
LOSS = "distillation.distillation_loss"
METHODS["distill"] = ["distillation.enabled=True", f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=16"]
# The teacher judges every token, so that no group is needed: a quarter of the responses for each prompt.
METHODS["distill_alone"] = [*METHODS["distill"], f"{LOSS}.use_task_rewards=False", f"{RESPONSES}4"]
METHODS["grpo_n4"] = [f"{RESPONSES}4"]
Curve = list[tuple[float, ...]]


def words(start: Path, out: Path, seed: int, steps: int) -> list[str]:
    """The quickstart's reinforcement learning."""
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={start / 'data/train.parquet'}",
        f"data.val_files={start / 'data/test.parquet'}",
        *("data.train_batch_size=32", "data.max_prompt_length=64", "data.max_response_length=48"),
        f"actor_rollout_ref.model.path={next((start / 'warm_up').glob('global_step_*')) / 'actor'}",
        *(f"{ACTOR}.optim.lr=1e-4", f"{ACTOR}.ppo_mini_batch_size=32", "actor_rollout_ref.rollout.n=16"),
        *("actor_rollout_ref.rollout.name=native", "trainer.device=cpu", "trainer.test_freq=5"),
        *(
            f"trainer.total_training_steps={steps}",
            f"trainer.seed={seed}",
            f"trainer.default_local_dir={out}",
        ),
    ]


def curve(run: Path, method: str) -> Curve:
    """(tokens sampled so far, accuracy, mean response length) at each validation."""
    group = int(next((w.removeprefix(RESPONSES) for w in METHODS[method] if w.startswith(RESPONSES)), 16))
    tokens, length, found = 0.0, 0.0, []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "response_length/mean" in record:
            groups = record.get("training/filter_groups/gen_prompts")
            responses = group * (groups if groups is not None else 32)
            length = record["response_length/mean"]
            tokens += responses * length
        if record.get("val/accuracy") is not None:
            found.append((tokens, record["val/accuracy"], length))
    return found


def figure(
    curves: dict[str, list[Curve]], label: str = "response tokens sampled", top: float = 1.0, form: str = ".0%"
) -> str:
    """An SVG of the second number of each point over the first, 0 to `top`; thin lines are runs of other seeds."""
    width, height, left, bottom = 640, 360, 50, 40
    most = max(point[0] for runs in curves.values() for run in runs for point in run)

    def place(tokens: float, accuracy: float) -> str:
        x = left + (width - left - 90) * tokens / most
        return f"{x:.1f},{height - bottom - (height - bottom - 10) * accuracy / top:.1f}"

    parts = [f'<rect width="{width}" height="{height}" fill="white"/>']
    for level in (share * top for share in (0, 0.25, 0.5, 0.75, 1.0)):
        x, y = place(0, level).split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{width - 90}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{float(y) + 4}" text-anchor="end">{level:{form}}</text>')
    middle = left + (width - left - 90) / 2
    parts.append(f'<text x="{middle}" y="{height - 8}" text-anchor="middle">{label}, 0 to {most:,.0f}</text>')
    labels: list[float] = []
    for color, (name, runs) in zip(COLORS, curves.items(), strict=False):
        for number, run in enumerate(runs):
            points = " ".join(place(*point[:2]) for point in run)
            stroke = 2.5 if number == 0 else 1
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{stroke}"/>')
        x, end = place(*runs[0][-1][:2]).split(",")
        y = float(end) + 4
        while any(abs(y - other) < 12 for other in labels):  # names side by side would be unreadable
            y += 1
        labels.append(y)
        parts.append(f'<text x="{float(x) + 6}" y="{y:.1f}" fill="{color}">{name}</text>')
    box = f'viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">'
    return "\n".join([head, *parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=Path, required=True, help="the folder of a quickstart")
    parser.add_argument("--out", type=Path, help="where runs go (default: compare/ in --start)")
    parser.add_argument("--methods", default="grpo,ppo")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--results", type=Path, help="the curves as JSON")
    args = parser.parse_args()
    start = args.start.resolve()
    curves: dict[str, list[Curve]] = {}
    for seed in map(int, args.seeds.split(",")):
        for name in args.methods.split(","):
            out = (args.out or start / "compare").resolve() / f"{name}_{seed}"
            if not (out / "report.html").exists():
                program = [sys.executable, "-m", "verl.trainer.main_ppo"]
                command = [*program, *words(start, out, seed, args.steps), *METHODS[name]]
                if name.startswith("distill"):
                    command.append(f"{TEACHER}={next((start / 'grpo').glob('global_step_*')) / 'actor'}")
                print(" ".join(command), flush=True)
                out.mkdir(parents=True, exist_ok=True)
                with (out / "log").open("w") as log:
                    environment = {"OMP_NUM_THREADS": "1", **os.environ}
                    subprocess.run(command, stdout=log, stderr=log, env=environment, check=True)
            curves.setdefault(name, []).append(curve(out, name))
    for name, runs in curves.items():
        ends = [run[-1] for run in runs]
        median = [statistics.median(values) for values in zip(*ends, strict=True)]
        first = statistics.median(run[0][1] for run in runs)
        print(
            f"{name:8s} {first:6.1%} → {median[1]:6.1%}  {median[0]:9,.0f} tokens  {median[2]:5.1f} tokens a response"
        )
    if args.results:
        args.results.write_text(json.dumps(curves, indent=1) + "\n")
    if args.figure:
        args.figure.write_text(figure(curves))


if __name__ == "__main__":
    main()
