"""What papers claim of their methods, each on a task that trains in a minute on a processor; a figure and the numbers.

    python -m benchmarks.claims --claim length --out claims --figure docs/claim_length.svg

The model is a random Qwen3 of two layers and width 32 (`tests.tiny`) that supervised training has first taught what all
responses look like: one of eight letters, then x until it ends. Each run is `main_ppo` with the words of CLAIMS below;
runs that are there already are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.compare_algorithms import Curve, figure
from tests.tiny import tiny_model

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LETTERS = "abcdefgh"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, right="abcd"):
    return {"score": float(solution_str[:1] in list(right)), "acc": float(solution_str[:1] in list(right))}
"""
NOISE = """
import os
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

plain, scale = Qwen3MoeTopKRouter.forward, float(os.environ["ROUTER_NOISE"])

def forward(self, hidden_states):
    return plain(self, hidden_states + scale * hidden_states.std() * torch.randn_like(hidden_states))

Qwen3MoeTopKRouter.forward = forward
"""
Words = list[str]
Read = Callable[[Path, int], list[tuple[float, float]]]


def metric(name: str) -> Read:
    """(step, value) pairs of a metric."""

    def read(run: Path, steps: int) -> list[tuple[float, float]]:
        lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
        return [(line["step"], line[name]) for line in lines if line.get("step") and line.get(name) is not None]

    return read


def wrong_length(run: Path, steps: int) -> list[tuple[float, float]]:
    """(step, mean length of the responses that earned 0), a mean over five steps."""
    lengths = []
    for step in range(1, steps + 1):
        rows = [json.loads(line) for line in (run / "dump" / f"{step}.jsonl").read_text().splitlines()]
        wrong = [len(row["output"]) for row in rows if row["score"] == 0]
        lengths.append(statistics.mean(wrong) if wrong else lengths[-1])
    return [(step, statistics.mean(lengths[max(0, step - 5) : step])) for step in range(1, steps + 1)]


VAL = f"{ROLLOUT}.val_kwargs"


SAMPLED = [f"{VAL}.do_sample=True", f"{VAL}.temperature=1.0", f"{VAL}.n=8", "trainer.test_freq=2"]
UPDATES = ["data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.optim.lr=2e-3"]
EXPERTS = [*UPDATES, f"{ACTOR}.grad_clip=1.0", "custom_reward_function.reward_kwargs={right:a}"]
GSPO = [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4"]
RARE = ["custom_reward_function.reward_kwargs={right:a}", f"{ROLLOUT}.n=4"]
TWO = ["custom_reward_function.reward_kwargs={right:ab}"]
LOW = [f"{ROLLOUT}.dtype=bfloat16", *UPDATES]
CLAIMS: dict[str, tuple[dict[str, Words], Read, str, float, str]] = {
    "length": (
        {
            "GRPO": [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", f"{ACTOR}.optim.lr=5e-4"],
            "Dr. GRPO": [
                f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
                f"{ACTOR}.optim.lr=5e-4",
                "algorithm.norm_adv_by_std_in_grpo=False",
            ],
        },
        *(wrong_length, "step", 12.0, ".0f"),
    ),
    "clip_higher": (
        {"0.2, 0.2": [*UPDATES, *TWO], "0.2, 0.28": [*UPDATES, *TWO, f"{ACTOR}.clip_ratio_high=0.28"]},
        *(metric("actor/entropy"), "step", 0.6, ".2f"),
    ),
    "dynamic_sampling": (
        {"GRPO": [*RARE, *SAMPLED], "dynamic": [*RARE, *SAMPLED, "algorithm.filter_groups.enable=True"]},
        *(metric("val/accuracy"), "step", 1.0, ".0%"),
    ),
    "router_noise": (
        {"GRPO": [*EXPERTS, *SAMPLED], "GSPO": [*EXPERTS, *SAMPLED, *GSPO]},
        *(metric("val/accuracy"), "step", 1.0, ".0%"),
    ),
    "bf16_sampler": (
        {
            "plain": [*LOW, *SAMPLED],
            "truncated": [*LOW, *SAMPLED, "algorithm.rollout_correction.rollout_is=token"],
        },
        *(metric("val/accuracy"), "step", 1.0, ".0%"),
    ),
}
"""By name: methods and their words; what is read; the label below, the top and the form of the scale."""


def rows(count: int, seed: int, skewed: bool = False) -> list[dict]:
    """skewed: a is rare and b frequent, instead of all equal."""
    rng, shares = np.random.default_rng(seed), [0.03, 0.37, *[0.1] * 6] if skewed else [0.125] * 8
    shapes = [(rng.choice(list(LETTERS), p=shares), min(int(rng.geometric(0.12)), 40)) for _ in range(count)]
    return [
        {
            "data_source": "claims/letters",
            "prompt": [{"role": "user", "content": f"{i}"}],
            "response": letter + "x" * length,
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i, (letter, length) in enumerate(shapes)
    ]


def run(program: str, words: Words, log: Path, **more: str) -> None:
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ, **more}
    with log.open("w") as out:
        subprocess.run([sys.executable, "-m", program, *words], stdout=out, stderr=out, env=environment, check=True)


def start(out: Path, arch: str, skewed: bool) -> Path:
    """The model that all runs of a claim begin with."""
    name = f"{arch}_skewed" if skewed else arch
    folder = out / f"start_{name}"
    if not any(folder.glob("global_step_*")):
        out.mkdir(parents=True, exist_ok=True)
        data = out / ("skewed.parquet" if skewed else "train.parquet")
        pq.write_table(pa.Table.from_pylist(rows(4000, 0, skewed)), data)
        pq.write_table(pa.Table.from_pylist(rows(4000, 0)), out / "train.parquet")
        pq.write_table(pa.Table.from_pylist(rows(32, 1)), out / "val.parquet")
        (out / "reward.py").write_text(REWARD)
        (out / "router_noise.py").write_text(NOISE)
        model = tiny_model(out / f"model_{arch}", arch=arch)
        words = [f"model.path={model}", f"data.train_files={data}", "data.val_files=null"]
        words += ["data.prompt_key=prompt", "data.response_key=response", "data.train_batch_size=32", "optim.lr=1e-2"]
        words += [
            "data.max_length=96",
            "trainer.total_training_steps=100",
            "trainer.save_freq=100",
            "trainer.total_epochs=9",
            "trainer.device=cpu",
        ]
        run("verl.trainer.sft_trainer", [*words, f"trainer.default_local_dir={folder}"], out / f"start_{name}.log")
    return next(folder.glob("global_step_*")) / "actor"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--claim", choices=CLAIMS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="where runs go")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--noise", type=float, default=0.5, help="of the routers, in standard deviations of their inputs"
    )
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--results", type=Path, help="the curves as JSON")
    args = parser.parse_args()
    methods, read, label, top, form = CLAIMS[args.claim]
    out, experts = args.out.resolve(), args.claim == "router_noise"
    model = start(out, "qwen3_moe" if experts else "qwen3", args.claim == "clip_higher")
    more = {
        "PYTHONPATH": os.pathsep.join([str(out), os.environ.get("PYTHONPATH", "")]),
        "ROUTER_NOISE": str(args.noise),
    }
    curves: dict[str, list[Curve]] = {}
    for name, words in methods.items():
        for seed in args.seeds.split(","):
            folder = out / f"{args.claim}_{name.replace(' ', '').replace(',', '_')}_{seed}"
            if not (folder / "report.html").exists():
                folder.mkdir(parents=True, exist_ok=True)
                common = [
                    "algorithm.adv_estimator=grpo", f"data.train_files={out / 'train.parquet'}",
                    f"data.val_files={out / 'val.parquet'}", "data.train_batch_size=16", "data.max_prompt_length=32",
                    "data.max_response_length=48", f"actor_rollout_ref.model.path={model}", f"{ROLLOUT}.name=native",
                    f"{ROLLOUT}.n=8", f"{ACTOR}.ppo_mini_batch_size=16", f"{ACTOR}.optim.lr=1e-3",
                    f"{ACTOR}.fsdp_config.dtype=float32", f"custom_reward_function.path={out / 'reward.py'}",
                    "reward_model.num_workers=1", f"trainer.default_local_dir={folder}", "trainer.device=cpu",
                    f"trainer.total_training_steps={args.steps}", f"trainer.seed={seed}", "trainer.save_freq=-1",
                    "trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.logger=console",
                    f"trainer.rollout_data_dir={folder / 'dump'}",
                ]  # fmt: skip
                if experts:  # the noise makes sampler and trainer differ, which ends a normal run
                    common += ["actor_rollout_ref.model.external_lib=router_noise", "trainer.logprob_diff_limit=1e9"]
                    common += ["trainer.sync_proof=warn"]
                run("verl.trainer.main_ppo", [*common, *words], folder / "log", **more)
            curves.setdefault(name, []).append(read(folder, args.steps))
    for name, runs in curves.items():
        first, last = ([f"{run[at][1]:.3g}" for run in runs] for at in (0, -1))
        print(f"{args.claim}: {name:10s} {', '.join(first)} → {', '.join(last)}")
    if args.results:
        args.results.write_text(json.dumps(curves, indent=1) + "\n")
    if args.figure:
        args.figure.write_text(figure(curves, label, top, form))


if __name__ == "__main__":
    main()
