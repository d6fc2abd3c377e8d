"""Make a run folder that looks like a real GRPO run: for the report's tests, screenshots and speed.

`python -m tests.fake_run DIR [--steps N]` writes one to look at.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

HOSTILE = "</script><script>document.documentElement.dataset.pwned='1'</script><img src=x onerror=alert(1)>"
CONTROLS = "left \u202eright\u202c \u200bzero \x00nul \x1b[31mred \ud800 lone"

NAMES = ["Lena", "Omar", "Priya", "Tomas", "Aiko", "Ruth", "Samir", "Nora"]
THINGS = ["pencils", "apples", "marbles", "stamps", "shells", "tickets", "cards", "beads"]
START = 1_790_000_000.0

CONFIG: dict[str, Any] = {
    "data": {
        "train_files": "data/arith/train.parquet",
        "val_files": "data/arith/test.parquet",
        "train_batch_size": 32,
        "max_prompt_length": 128,
        "max_response_length": 256,
        "seed": 1,
        "shuffle": True,
    },
    "actor_rollout_ref": {
        "model": {"path": "quickstart_run/warm/Qwen3-tiny", "trust_remote_code": False},
        "actor": {
            "optim": {"lr": 5e-05, "lr_warmup_steps": 5, "weight_decay": 0.01},
            "ppo_mini_batch_size": 16,
            "use_kl_loss": True,
            "kl_loss_coef": 0.001,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.28,
            "ppo_max_token_len_per_gpu": 8192,
        },
        "rollout": {"name": "native", "n": 8, "temperature": 1.0, "top_p": 1.0},
    },
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "custom_reward_function": {"path": None, "name": "compute_score", "api_key": "sk-do-not-show"},
    "trainer": {
        "project_name": "arithmetic",
        "experiment_name": "grpo-tiny-seed1",
        "device": "cpu",
        "n_gpus_per_node": 1,
        "nnodes": 1,
        "total_training_steps": 200,
    },
}


def metrics_of(step: int, total: int, rng: random.Random) -> dict[str, Any]:
    """One record of metrics.jsonl with the names of a GRPO run with a KL loss."""
    t = step / max(1, total)
    rise = 1 / (1 + math.exp(-7 * (t - 0.35)))
    score = min(1.0, max(0.0, 0.38 + 0.45 * rise + rng.gauss(0, 0.035)))
    length = 74 - 18 * rise + rng.gauss(0, 2.5)
    gen, update = 2.1 + rng.gauss(0, 0.12) + length / 90, 3.0 + rng.gauss(0, 0.15)
    noise = abs(rng.gauss(0, 1))
    record: dict[str, Any] = {
        "step": step,
        "time": START + 8.2 * step,
        "training/global_step": step,
        "training/epoch": step // 60,
        "critic/score/mean": score,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": score,
        "critic/advantages/mean": rng.gauss(0, 0.01),
        "actor/entropy": 0.15 + 0.75 * math.exp(-3 * t) + rng.gauss(0, 0.012),
        "actor/pg_loss": rng.gauss(0, 0.02),
        "actor/kl_loss": 0.0004 + 0.05 * t * (1 + 0.2 * rng.gauss(0, 1)),
        "actor/ppo_kl": 0.0006 + 0.0009 * noise,
        "actor/pg_clipfrac": 0.004 + 0.006 * noise * (1 - 0.5 * t),
        "actor/pg_clipfrac_lower": 0.0002 * noise,
        "actor/grad_norm": 0.9 * math.exp(-1.2 * t) + 0.12 * noise,
        "actor/lr": 5e-5 * min(1.0, step / 5),
        "response_length/mean": length,
        "response_length/max": min(256, length * (2.1 + 0.4 * noise)),
        "response_length/min": 21,
        "response_length/clip_ratio": max(0.0, 0.06 * (1 - 2 * t) + 0.01 * noise),
        "reward/error_ratio": 0.0 if step % 41 else 1 / 256,
        "reward/errors": 0 if step % 41 else 1,
        "agent/status/completed": (250 + step % 7) / 256,
        "agent/status/max_turns": (6 - step % 7) / 256,
        "reward_extra/format/mean": min(1.0, 0.86 + 0.14 * rise),
        "training/rollout_probs_diff_mean": 2e-6 * (1 + noise),
        "training/rollout_probs_diff_max": 6e-5 * (1 + noise),
        "training/rollout_logprob_abs_diff/mean": 3e-6 * (1 + noise),
        "training/rollout_logprob_abs_diff/p99": 2.2e-5 * (1 + noise),
        "training/rollout_logprob_abs_diff/max": 9e-5 * (1 + noise),
        "training/off_policy/trajectory_staleness/mean": 0,
        "perf/throughput": 3300 + 500 * rise + rng.gauss(0, 90),
        "perf/cpu_memory_used_gb": 3.1 + 0.15 * math.log1p(step),
        "perf/device_busy_ratio": min(1.0, 0.94 + rng.gauss(0, 0.01)),
        "timing_s/gen": gen,
        "timing_s/reward": 0.05 + 0.02 * noise,
        "timing_s/old_log_prob": 0.9 + rng.gauss(0, 0.04),
        "timing_s/ref": 0.85 + rng.gauss(0, 0.04),
        "timing_s/adv": 0.01,
        "timing_s/update_actor": update,
        "timing_s/update_weights": 0.03,
        "critic/values/mean": None,
    }
    extra = 0.2
    if step % 10 == 0:
        record["timing_s/testing"] = extra = 1.9
        record.update(validation_of(t, rise, rng))
    record["timing_s/step"] = gen + update + 2.0 + extra
    return record


def times_of(record: dict[str, Any]) -> dict[str, Any]:
    """The step's line of timeline.jsonl."""
    begin = at = record["time"] - record["timing_s/step"]
    spans: list[list[Any]] = []
    for name in ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights"):
        spans.append([name, at, at + record[f"timing_s/{name}"]])
        at = spans[-1][2]
    sampler = [spans[0][1:]]
    return {"step": record["step"], "begin": begin, "end": record["time"], "sampler": sampler, "trainer": spans}


def validation_of(t: float, rise: float, rng: random.Random) -> dict[str, float]:
    """Validation names of one source."""
    acc = min(0.99, max(0.0, 0.36 + 0.46 * rise + rng.gauss(0, 0.008)))
    return {
        "val/accuracy": acc,
        "val-core/arithmetic/acc/mean@4": acc,
        "val-core/arithmetic/reward/mean@4": acc,
        "val-core/arithmetic/acc/best@4/mean": min(1.0, acc + 0.12 - 0.06 * t),
        "val-core/arithmetic/acc/maj@4/mean": min(1.0, acc + 0.05),
    }


def responses_of(step: int, total: int, rng: random.Random, prompts: int = 8, n: int = 8) -> list[dict[str, Any]]:
    """Whole groups of sampled responses with their token-level columns."""
    rows: list[dict[str, Any]] = []
    for p in range(prompts):
        a, b, c = rng.randint(3, 40), rng.randint(2, 30), rng.randint(2, 9)
        who, what = rng.choice(NAMES), rng.choice(THINGS)
        question = (
            f"{who} has {a} {what}. A friend brings {b} more, and then {who} buys {c} boxes with 4 {what} each. "
            f"How many {what} does {who} have now?\nEnd with #### and the number."
        )
        group = [_response(a, b, c, who, what, step / max(1, total), rng) for _ in range(n)]
        scores = [1.0 if right else 0.0 for _, right in group]
        mean = sum(scores) / n
        spread = (sum((s - mean) ** 2 for s in scores) / max(1, n - 1)) ** 0.5
        for i, (tokens, right) in enumerate(group):
            advantage = (scores[i] - mean) / (spread + 1e-6)
            old = [-min(9.0, rng.expovariate(2.2 if rng.random() < 0.8 else 0.45)) for _ in tokens]
            cut = rng.random() < 0.05
            rows.append(
                {
                    "step": step,
                    "uid": f"0:{step * prompts + p}@0",
                    "index": i,
                    "input": f"user\n{question}\nassistant\n",
                    "output": "".join(tokens[:-1]),
                    "gts": str(a + b + 4 * c),
                    "data_source": "arithmetic" if p % 3 else "word_problems",
                    "score": scores[i],
                    "parts": {"acc": scores[i], "format": 1.0 if right or rng.random() < 0.8 else 0.0},
                    "advantage": advantage,
                    "length": len(tokens),
                    "finish_reason": "length" if cut else "stop",
                    "versions": [step - 1],
                    "tokens": tokens,
                    "mask": [1] * len(tokens),
                    "log_probs": old,
                    "rollout_log_probs": [x + rng.gauss(0, 3e-6 if rng.random() < 0.97 else 4e-5) for x in old],
                    "advantages": [advantage] * len(tokens),
                }
            )
    return rows


def _response(a: int, b: int, c: int, who: str, what: str, t: float, rng: random.Random) -> tuple[list[str], bool]:
    right = rng.random() < 0.38 + 0.5 * t
    boxes = 4 * c
    total = a + b + boxes if right else a + b + boxes + rng.choice([-10, -1, 1, 4, 10])
    text = rng.choice(
        [
            f"{who} starts with {a} {what} and gets {b}, so {a} + {b} = {a + b}.\nThe boxes hold {c} × 4 = {boxes}.\n"
            f"Together that is {a + b} + {boxes} = {total}.\n#### {total}",
            f"First the boxes: {c} boxes of 4 make {boxes} {what}.\nThen {a} + {b} = {a + b}, and {a + b} + {boxes} "
            f"= {total}.\n#### {total}",
            f"{a} + {b} + {boxes} = {total} {what}.\n\n#### {total}",
        ]
    )
    return _pieces(text), right


def _pieces(text: str) -> list[str]:
    """Cut text into token-like pieces: a word with its space, digits one by one, newlines alone."""
    out: list[str] = []
    for ch in text:
        starts = not out or ch.isspace() or ch.isdigit() or not ch.isalnum() or not out[-1][-1:].isalpha()
        if starts and not (out and out[-1] == " " and ch.isalpha()):
            out.append(ch)
        else:
            out[-1] += ch
    return [*out, "<|im_end|>"]


def hostile_response(step: int) -> dict[str, Any]:
    """A response that tries to break out of the page, with control characters and a failed score."""
    tokens = ["</script>", "<script>", "alert(1)", "</script>", "<!--", CONTROLS, "]]>", "<|im_end|>"]
    return {
        "step": step,
        "uid": "<b>uid</b>",
        "index": 0,
        "input": HOSTILE,
        "output": HOSTILE + CONTROLS,
        "gts": {"answer": "<i>5</i>"},
        "data_source": "<u>hostile</u>",
        "score": None,
        "score_error": "ValueError: " + HOSTILE,
        "parts": {"<b>part</b>": HOSTILE, "nan": float("nan")},
        "advantage": None,
        "length": len(tokens),
        "finish_reason": "stop",
        "versions": [step - 1],
        "tokens": tokens,
        "mask": [1, 1, 0, 0, 1, 1, 1, 1],
        "log_probs": [-0.1, -2.0, 0.0, 0.0, -5.5, -0.3, -0.2, -0.01],
        "rollout_log_probs": [-0.1, -2.1, 0.0, 0.0, -5.4, -0.3, float("nan"), -0.01],
        "advantages": [0.5, 0.5, 0.0, 0.0, -0.5, -0.5, 0.5, 0.5],
        "messages": [
            {"role": "user", "content": HOSTILE},
            {"role": "assistant", "content": "an earlier turn"},
            {"role": "user", "content": [{"type": "text", "text": "Again."}]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": HOSTILE, "arguments": {"x": 1}}}, 7],
            },
            {"role": "tool", "content": CONTROLS, "name": "<b>tool</b>"},
            {"role": "assistant", "content": "done"},
        ],
        "turns": [{"at": 0.0, "seconds": 0.25, "reward": -0.5}, {"at": 2.25, "seconds": 1.0}],
        "segments": [[None, 0, 300, 120], [0, 180, 260, 40], [1, 230, 320, 50], [None, 0, 90, 20]],
    }


def events_of(steps: int, finished: bool) -> list[dict[str, Any]]:
    """Events of the kinds a run writes."""
    found: list[dict[str, Any]] = [
        {
            "event": "run_start",
            "time": START,
            "step": 0,
            "total_steps": steps,
            "device": "AMD EPYC 9B45 · 2 cores",
            "message": "training starts",
        },
        {
            "event": "notice",
            "level": "info",
            "time": START,
            "text": "data.filter_overlong_prompts: 3 rows dropped",
        },
    ]
    for step in range(41, steps, 41):
        found.append(
            {
                "event": "reward_error",
                "level": "warning",
                "time": START + 8.2 * step,
                "step": step,
                "message": "compute_score raised ValueError: could not convert string to float: '1,2,3'",
                "uid": f"0:{step}@0",
                "error": HOSTILE,
            }
        )
    for step in range(50, steps + 1, 50):
        found.append(
            {
                "event": "checkpoint_saved",
                "time": START + 8.2 * step,
                "step": step,
                "path": f"run/global_step_{step}",
                "bytes": 315_604_992,
                "seconds": 1.8,
            }
        )
    if steps > 80:
        found.append(
            {
                "event": "refused_update",
                "level": "error",
                "time": START + 8.2 * 77,
                "step": 77,
                "message": "non-finite gradient; batch kept in refused/step_77",
            }
        )
    if steps > 120:
        found.append({"event": "resumed", "time": START + 8.2 * 120 + 4, "step": 120})
    found.sort(key=lambda event: event["time"])
    if finished:
        time = START + 8.2 * steps
        found.append(
            {"event": "planned", "time": time, "gen": [2.0, 2.6], "memory": [3.0, 2.9], "message": "plan of the run"}
        )
        found.append({"event": "run_end", "status": "finished", "time": time, "step": steps, "text": ""})
    return found


def make_run(
    folder: Path,
    steps: int = 200,
    *,
    every: int = 1,
    finished: bool = True,
    hostile: bool = False,
    seed: int = 7,
    prompts: int = 8,
) -> Path:
    """Write a run folder. `every`: responses are kept for each step divisible by it. Returns the folder."""
    rng = random.Random(seed)
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    config = json.loads(json.dumps(CONFIG))
    config["trainer"]["total_training_steps"] = steps
    (folder / "config.yaml").write_text(json.dumps(config, indent=1), encoding="utf-8")
    versions = {
        "time": START,
        "command": ["python3", "-m", "verl.trainer.main_ppo", "trainer.device=cpu"],
        "python": "3.11.7",
        "git_commit": "c803edf",
        "packages": {"verl": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"},
    }
    (folder / "versions.json").write_text(json.dumps(versions), encoding="utf-8")
    lines: list[dict[str, Any]] = [{"step": 0, "time": START, **validation_of(0.0, 0.08, rng)}]
    for step in range(1, steps + 1):
        lines.append(metrics_of(step, steps, rng))
        if step % every == 0 or step in (1, steps):
            rows = responses_of(step, steps, rng, prompts=prompts)
            if hostile and step == steps:
                rows.insert(0, hostile_response(step))
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "trajectories" / f"{step}.jsonl").write_text(text, encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    (folder / "timeline.jsonl").write_text("".join(json.dumps(times_of(x)) + "\n" for x in lines[1:]), encoding="utf-8")
    events = "".join(json.dumps(x) + "\n" for x in events_of(steps, finished))
    (folder / "events.jsonl").write_text(events, encoding="utf-8")
    return folder


def main() -> None:
    """Write a run folder from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--running", action="store_true")
    args = parser.parse_args()
    make_run(args.folder, args.steps, every=args.every, hostile=args.hostile, finished=not args.running)
    print(args.folder)


if __name__ == "__main__":
    main()
