"""From nothing to a model that learns to look: drawn shapes, a tiny Qwen2.5-VL, supervised warm-up, GRPO, report.

    make quickstart-vision    (or: python examples/quickstart/quickstart_vision.py --out quickstart_vision_run)

Two thirds of the warm-up's demonstrations forget the blue shapes; reinforcement learning puts that right. Every
validation also asks the same questions in front of grey images, where the model can only guess.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

from quickstart import HERE, run, say

SOURCES = {"shapes": "with its images", "shapes_blank": "with grey images"}


def accuracy(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, source → mean score) of each validation, in order."""
    found = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        scores = {source: record.get(f"val-core/{source}/reward/mean@1") for source in SOURCES}
        if all(score is not None for score in scores.values()):
            found[record["step"]] = scores
    return sorted(found.items())


def warm_up(out: Path, seed: int, steps: int) -> None:
    words = [
        f"data.train_files={out / 'data/warm_up.parquet'}",
        "data.prompt_key=extra_info",
        "data.prompt_dict_keys=[question]",
        "data.response_key=extra_info",
        "data.response_dict_keys=[answer]",
        "data.train_batch_size=64",
        "data.max_length=96",
        f"model.path={out / 'model'}",
        "optim.lr=2e-3",
        "optim.lr_warmup_steps=20",
        "optim.lr_scheduler_type=cosine",
        "optim.min_lr_ratio=0.05",
        "trainer.device=cpu",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={steps}",
        f"trainer.seed={seed}",
        "trainer.project_name=quickstart-vision",
        "trainer.experiment_name=warm-up",
        f"trainer.default_local_dir={out / 'warm_up'}",
    ]
    run("verl.trainer.sft_trainer", words, out / "warm_up.log")


def reinforce(out: Path, seed: int, warm_steps: int, steps: int, extra: list[str]) -> None:
    words = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={out / 'data/train.parquet'}",
        f"data.val_files={out / 'data/test.parquet'}",
        "data.train_batch_size=32",
        "data.max_prompt_length=64",
        "data.max_response_length=32",
        f"custom_reward_function.path={HERE / 'shapes_reward.py'}",
        f"actor_rollout_ref.model.path={out / f'warm_up/global_step_{warm_steps}/actor'}",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.rollout.n=16",
        "actor_rollout_ref.rollout.name=native",
        "trainer.device=cpu",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=5",
        f"trainer.save_freq={steps}",
        f"trainer.seed={seed}",
        "trainer.project_name=quickstart-vision",
        "trainer.experiment_name=grpo",
        f"trainer.default_local_dir={out / 'grpo'}",
        *extra,
    ]
    run("verl.trainer.main_ppo", words, out / "grpo.log")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("quickstart_vision_run"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fresh", action="store_true", help="delete what an earlier quickstart left")
    args, extra = parser.parse_known_args()
    out, seed = args.out, ["--seed", str(args.seed)]
    if args.fresh:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    if not (out / "data/test.parquet").exists():
        say("1/4  Drawn shapes to be counted (seconds)")
        run(str(HERE / "shapes.py"), ["--out", str(out / "data"), "--train", "8000", *seed], out / "data.log")
    if not (out / "model/config.json").exists():
        say("2/4  A small Qwen2.5-VL, its tokenizer and image processor, from nothing (seconds)")
        run(str(HERE / "build_vision_model.py"), ["--out", str(out / "model"), *seed], out / "model.log")
    if not (out / f"warm_up/global_step_{args.warm_steps}").exists():
        say(f"3/4  Supervised warm-up, {args.warm_steps} steps (about 3 minutes on two cores)")
        warm_up(out, args.seed, args.warm_steps)
    say(f"4/4  Reinforcement learning with GRPO, {args.steps} steps (about 1.5 minutes on two cores)")
    reinforce(out, args.seed, args.warm_steps, args.steps, extra)
    curve = accuracy(out / "grpo")
    shutil.copyfile(out / "grpo/report.html", out / "report.html")
    say("Validation accuracy, reinforcement learning alone")
    for source, what in SOURCES.items():
        shown = "  ".join(f"{step}: {scores[source]:.1%}" for step, scores in curve)
        print(f"  {what:<18} {shown}")
    print(f"\n  {time.monotonic() - started:.0f} s in all; the report: {out / 'report.html'}")


if __name__ == "__main__":
    main()
