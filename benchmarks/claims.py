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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.compare_algorithms import Curve, figure
from tests.tiny import tiny_model

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LETTERS = "abcdefgh"
REWARD = """
def letter(data_source, solution_str, ground_truth, extra_info=None, *, right="a"):
    won = float(solution_str[:1] in list(right))
    return {"score": won, "acc": won}

def truth(data_source, solution_str, ground_truth, extra_info=None):
    won = float(solution_str[:1] == ground_truth)
    return {"score": won, "acc": won}
"""
LOOPS = """
import random
import numpy as np
from verl.rollout.agent_loop import AgentLoopBase, AgentLoopOutput, register


def coin(row):
    return random.Random(f"{row['uid']} {row['sample_index']}").random() < 0.5


@register("coin")
class Coin(AgentLoopBase):
    \"\"\"The score is a coin's, whatever the response is.\"\"\"

    async def run(self, sampling_params, **row):
        said = await self.generate(row["prompt_ids"], sampling_params)
        return AgentLoopOutput(
            row["prompt_ids"], said.token_ids, np.ones(len(said.token_ids), bool), said.log_probs,
            reward_score=float(coin(row)),
        )


@register("verdict")
class Verdict(AgentLoopBase):
    \"\"\"A letter of the policy, then the environment says + or - by a coin, the score; the policy goes on.\"\"\"

    async def run(self, sampling_params, **row):
        won, prompt = coin(row), np.asarray(row["prompt_ids"], np.int64)
        first = await self.generate(prompt, {"max_tokens": 1})
        said = self.tokenizer.encode("+" if won else "-", add_special_tokens=False)
        more = await self.generate(np.concatenate([prompt, first.token_ids, said]), {"max_tokens": 62})
        return AgentLoopOutput(
            prompt,
            np.concatenate([first.token_ids, said, more.token_ids]),
            np.concatenate([np.ones(1, bool), np.zeros(len(said), bool), np.ones(len(more.token_ids), bool)]),
            np.concatenate([first.log_probs, np.zeros(len(said), np.float32), more.log_probs]),
            reward_score=float(won),
        )
"""
ROUTER_NOISE = """
import os
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

plain, scale = Qwen3MoeTopKRouter.forward, float(os.environ["NOISE"])

def forward(self, hidden_states):
    return plain(self, hidden_states + scale * hidden_states.std() * torch.randn_like(hidden_states))

Qwen3MoeTopKRouter.forward = forward
"""
SAMPLER_NOISE = """
import os
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

plain, scale = Qwen3ForCausalLM.forward, float(os.environ["NOISE"])

def forward(self, *args, **kwargs):
    out = plain(self, *args, **kwargs)
    if out.logits.dtype == torch.bfloat16:  # the sampler's; the trainer computes in float32
        deviation = scale * out.logits.float().std(-1, keepdim=True)
        out.logits = out.logits + (deviation * torch.randn(out.logits.shape)).bfloat16()
    return out

Qwen3ForCausalLM.forward = forward
"""
Words = list[str]
Read = Callable[[Path, int], list[tuple[float, float]]]


def metric(name: str) -> Read:
    """(step, value) pairs of a metric."""

    def read(run: Path, steps: int) -> list[tuple[float, float]]:
        lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
        return [(line["step"], line[name]) for line in lines if line.get("step") and line.get(name) is not None]

    return read


def longer_when_wrong(run: Path, steps: int) -> list[tuple[float, float]]:
    """(step, by how many tokens the mean wrong response is longer than the mean right one)."""
    found = []
    for step in range(1, steps + 1):
        rows = [json.loads(line) for line in (run / "dump" / f"{step}.jsonl").read_text().splitlines()]
        wrong, right = ([len(row["output"]) for row in rows if row["score"] == score] for score in (0, 1))
        found.append((step, statistics.mean(wrong) - statistics.mean(right)))
    return found


@dataclass(frozen=True)
class Claim:
    """methods: the words of each; read: what is drawn of a run, over `label`, from 0 to `top` in the form `form`;
    start: which start model; words: those of all methods."""

    methods: dict[str, Words]
    read: Read
    top: float
    form: str
    start: str = "plain"
    words: Words = field(default_factory=list)


VAL = f"{ROLLOUT}.val_kwargs"
SAMPLED = [f"{VAL}.do_sample=True", f"{VAL}.temperature=1.0", f"{VAL}.n=8", "trainer.test_freq=2"]
UPDATES = ["data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.optim.lr=2e-3"]
GSPO = [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4"]
LOOP = f"{ROLLOUT}.agent.default_agent_loop"
PLUG_IN = "actor_rollout_ref.model.external_lib"
# Plain gradient descent: AdamW makes full steps of what is noise around 0. A response has about ten tokens, by which
# Dr. GRPO's constant is ten; without the division by the deviation (1/2) its advantages are half as large.
SGD = [f"{ACTOR}.optim.optimizer=SGD", f"{ACTOR}.optim.weight_decay=0"]
LENGTHS = ["data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=32", "data.max_response_length=64", *SGD]
LETTER = "data.max_response_length=1"
UNPROVEN = ["trainer.logprob_diff_limit=1e9", "trainer.sync_proof=warn"]  # the noise is no mistake
COINS = [f"{ACTOR}.ppo_epochs=16", f"{ACTOR}.optim.lr=1e-3", LETTER]
BF16, TRUNCATED = [f"{ROLLOUT}.dtype=bfloat16"], ["algorithm.rollout_correction.rollout_is=token"]
LARGE = ["data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64", f"{ACTOR}.optim.lr=0.3", *SGD]
CLAIMS: dict[str, Claim] = {
    "length": Claim(
        {
            "GRPO": [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", f"{ACTOR}.optim.lr=1"],
            "Dr. GRPO": [
                f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
                f"{ACTOR}.loss_scale_factor=10",
                f"{ACTOR}.optim.lr=2",
                "algorithm.norm_adv_by_std_in_grpo=False",
            ],
        },
        *(longer_when_wrong, 64.0, ".0f", "verdict"),
        [f"{LOOP}=verdict", f"{PLUG_IN}=loops", *LENGTHS],
    ),
    "clip_higher": Claim(
        {"0.2, 0.2": [], "0.2, 0.28": [f"{ACTOR}.clip_ratio_high=0.28"], "0.2, 0.5": [f"{ACTOR}.clip_ratio_high=0.5"]},
        *(metric("actor/entropy"), 2.4, ".1f", "skewed"),
        [f"{LOOP}=coin", f"{PLUG_IN}=loops", *COINS],
    ),
    "dynamic_sampling": Claim(
        {"GRPO": [], "dynamic": ["algorithm.filter_groups.enable=True"]},
        *(metric("val/accuracy"), 0.4, ".0%", "plain"),
        [*SAMPLED, "custom_reward_function.name=truth", LETTER, f"{ACTOR}.optim.lr=3e-3"],
    ),
    "router_noise": Claim(
        {"GRPO": [], "GSPO": GSPO},
        *(metric("val/accuracy"), 1.0, ".0%", "experts"),
        [*UPDATES, *SAMPLED, f"{PLUG_IN}=router_noise", *UNPROVEN],
    ),
    "router_drift": Claim(
        {"GRPO": [], "GSPO": GSPO},
        *(metric("actor/entropy"), 1.0, ".2f", "experts"),
        # GRPO as it was published has no third bound of the ratio.
        [*UPDATES, f"{LOOP}=coin", f"{PLUG_IN}=router_noise_and_loops", f"{ACTOR}.clip_ratio_c=1000000", *UNPROVEN],
    ),
    "bf16_sampler": Claim(
        {"plain": [], "truncated": TRUNCATED},
        *(metric("val/accuracy"), 1.0, ".0%", "plain"),
        [*BF16, *UPDATES, *SAMPLED, "custom_reward_function.reward_kwargs={right:abcd}"],
    ),
    "sampler_noise": Claim(
        {"plain": BF16, "truncated": [*BF16, *TRUNCATED], "without noise": []},
        *(metric("actor/entropy"), 2.4, ".1f", "plain"),
        [
            *LARGE,
            LETTER,
            "custom_reward_function.reward_kwargs={right:abcdefgh}",
            f"{PLUG_IN}=sampler_noise",
            *UNPROVEN,
        ],
    ),
}
IMPOSSIBLE = {"dynamic_sampling": 7 / 8}
"""Share of the training rows for which no letter is right."""


def rows(count: int, seed: int, impossible: float = 0.0, start: str = "") -> list[dict]:
    """A prompt is one of four digits and a number; the digit says which letter is right. `start` is the model whose
    supervised training sees the responses: with verdict + or - follows the letter, with skewed seven letters are
    rare."""
    rng, out, verdict = np.random.default_rng(seed), [], start == "verdict"
    shares = [0.79, *[0.03] * 7] if start == "skewed" else [0.125] * 8
    for i in range(count):
        letter, length = rng.choice(list(LETTERS), p=shares), min(int(rng.geometric(0.12)), 40)
        kind, said = int(rng.integers(4)), rng.choice(["+", "-"]) if verdict else ""
        truth = "none" if rng.random() < impossible else LETTERS[kind]
        out.append(
            {
                "data_source": "claims/letters",
                "prompt": [{"role": "user", "content": f"{kind} {i}"}],
                "response": letter + said + "x" * length,
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"index": i},
            }
        )
    return out


def run(program: str, words: Words, log: Path, **more: str) -> None:
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ, **more}
    with log.open("w") as out:
        subprocess.run([sys.executable, "-m", program, *words], stdout=out, stderr=out, env=environment, check=True)


def start(out: Path, name: str) -> Path:
    """The model that all runs of a claim begin with."""
    folder = out / f"start_{name}"
    if not any(folder.glob("global_step_*")):
        out.mkdir(parents=True, exist_ok=True)
        data = out / f"start_{name}.parquet"
        pq.write_table(pa.Table.from_pylist(rows(4000, 0, start=name)), data)
        arch = "qwen3_moe" if name == "experts" else "qwen3"
        model = tiny_model(out / f"model_{arch}", arch=arch)
        words = [
            f"model.path={model}", f"data.train_files={data}", "data.val_files=null", "data.prompt_key=prompt",
            "data.response_key=response", "data.train_batch_size=32", "optim.lr=1e-2", "data.max_length=96",
            "trainer.total_training_steps=100", "trainer.save_freq=100", "trainer.total_epochs=9", "trainer.device=cpu",
            f"trainer.default_local_dir={folder}",
        ]  # fmt: skip
        run("verl.trainer.sft_trainer", words, out / f"start_{name}.log")
    return next(folder.glob("global_step_*")) / "actor"


def write_inputs(out: Path, claim: str) -> None:
    """The rows, the reward and the plug-ins of a claim's runs."""
    pq.write_table(pa.Table.from_pylist(rows(4000, 0, IMPOSSIBLE.get(claim, 0.0))), out / f"{claim}.parquet")
    pq.write_table(pa.Table.from_pylist(rows(32, 1)), out / "val.parquet")
    for name, text in (
        ("reward", REWARD), ("loops", LOOPS), ("router_noise", ROUTER_NOISE), ("sampler_noise", SAMPLER_NOISE),
        ("router_noise_and_loops", LOOPS + ROUTER_NOISE),
    ):  # fmt: skip
        (out / f"{name}.py").write_text(text)


def one_run(out: Path, claim: str, name: str, seed: str, steps: int, words: Words, noise: float) -> Path:
    """The folder of a run, which is made unless it is there."""
    folder = out / f"{claim}_{name.replace(' ', '').replace(',', '_')}_{seed}"
    if (folder / "report.html").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    common = [
        "algorithm.adv_estimator=grpo", f"data.train_files={out / claim}.parquet",
        f"data.val_files={out / 'val.parquet'}", "data.train_batch_size=16", "data.max_prompt_length=32",
        "data.max_response_length=48", f"actor_rollout_ref.model.path={start(out, CLAIMS[claim].start)}",
        f"{ROLLOUT}.name=native", f"{ROLLOUT}.n=8", f"{ACTOR}.ppo_mini_batch_size=16", f"{ACTOR}.optim.lr=1e-3",
        f"{ACTOR}.fsdp_config.dtype=float32", f"custom_reward_function.path={out / 'reward.py'}",
        "custom_reward_function.name=letter", "reward_model.num_workers=1", f"trainer.default_local_dir={folder}",
        "trainer.device=cpu", f"trainer.total_training_steps={steps}", f"trainer.seed={seed}", f"data.seed={seed}",
        "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.logger=console",
        f"trainer.rollout_data_dir={folder / 'dump'}",
    ]  # fmt: skip
    path = os.pathsep.join([str(out), os.environ.get("PYTHONPATH", "")])
    run("verl.trainer.main_ppo", [*common, *words], folder / "log", PYTHONPATH=path, NOISE=str(noise))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--claim", choices=CLAIMS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="where runs go")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--noise", type=float, default=0.5, help="in deviations of the routers' inputs or the sampler's logits"
    )
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--results", type=Path, help="the curves as JSON")
    parser.add_argument("words", nargs="*", help="further words of all runs, key=value")
    args = parser.parse_args()
    claim, out = CLAIMS[args.claim], args.out.resolve()
    start(out, claim.start)
    write_inputs(out, args.claim)
    with ThreadPoolExecutor(args.parallel) as pool:
        runs = {
            name: [
                pool.submit(
                    one_run, out, args.claim, name, seed, args.steps, claim.words + words + args.words, args.noise
                )
                for seed in args.seeds.split(",")
            ]
            for name, words in claim.methods.items()
        }
        curves: dict[str, list[Curve]] = {
            name: [claim.read(run.result(), args.steps) for run in futures] for name, futures in runs.items()
        }
    for name, found in curves.items():
        first, last = ([f"{one[at][1]:.3g}" for one in found] for at in (0, -1))
        print(f"{args.claim}: {name:10s} {', '.join(first)} → {', '.join(last)}")
    if args.results:
        args.results.write_text(json.dumps(curves, indent=1) + "\n")
    if args.figure:
        args.figure.write_text(figure(curves, "step", claim.top, claim.form))


if __name__ == "__main__":
    main()
