"""A small model learns when to call a calculator: data, model, warm-up to the call format, GRPO with the tool, report.

    make quickstart-agent     (or: python examples/agents/calculator.py --out quickstart_agent)

The products are of numbers that a model this small cannot multiply. The warm-up shows it both ways: most demonstrations
guess, the others call the tool and repeat what it says. Reinforcement learning finds out which of the two is right.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "quickstart"))

from build_model import SPECIAL, build_model, build_tokenizer  # noqa: E402
from quickstart import run, say  # noqa: E402

TEMPLATE = (
    "{%- if tools %}{{ '<|system|>' + tools | map(attribute='function.name') | join(' ') }}{% endif -%}"
    "{%- for m in messages -%}"
    "{{ '<|' + m.role + '|>' + m.content }}"
    "{%- for call in m.tool_calls or [] -%}"
    "{{ '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '</tool_call>' }}"
    "{%- endfor -%}"
    "{%- if m.role == 'assistant' -%}{{ '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
TOOL = "calculate"
CALLS = 0.3
"""The share of demonstrations that call the tool."""


def problem(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randint(12, 99), draw.randint(12, 99)
    return f"{a}*{b}", a * b


def prepare_data(out: Path, seed: int) -> None:
    """train.parquet, test.parquet (prompts) and warm_up.parquet (demonstrations)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 4000), ("test", 200)):
        rows = []
        for index in range(count):
            text, answer = problem(draw)
            truth = {"style": "rule", "ground_truth": str(answer)}
            prompt = [{"role": "user", "content": text}]
            rows.append(
                {
                    "data_source": "openai/gsm8k",
                    "prompt": prompt,
                    "reward_model": truth,
                    "extra_info": {"index": index},
                }
            )
        pq.write_table(pa.Table.from_pylist(rows), out / f"{name}.parquet")
    pq.write_table(pa.Table.from_pylist([demonstration(draw) for _ in range(8000)]), out / "warm_up.parquet")


def demonstration(draw: random.Random) -> dict[str, list[dict[str, str]]]:
    """A dialogue as the template renders it with the tool, that calls it or guesses."""
    text, answer = problem(draw)
    said = [("system", TOOL), ("user", text)]
    if draw.random() < CALLS:
        call = json.dumps({"name": TOOL, "arguments": {"expression": text}})
        said += [("assistant", f"<tool_call>{call}</tool_call>"), ("tool", str(answer))]
    else:
        answer = draw.randint(144, 9801)
    said.append(("assistant", f"#### {answer}"))
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def make_model(out: Path, seed: int, demonstrate: Callable[[random.Random], dict] = demonstration) -> None:
    draw = random.Random(seed)
    texts = [m["content"] for _ in range(500) for m in demonstrate(draw)["messages"]]
    build_tokenizer(texts, out)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, "<|tool|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out)
    build_model(out, len(tokenizer), hidden=128, layers=4, seed=seed)


def warm_up(out: Path, steps: int, seed: int) -> None:
    words = [
        f"data.train_files={out / 'data/warm_up.parquet'}",
        "data.messages_key=messages",
        "data.train_batch_size=64",
        "data.max_length=128",
        f"model.path={out / 'model'}",
        "optim.lr=2e-3",
        "optim.lr_warmup_steps=20",
        "optim.lr_scheduler_type=cosine",
        "optim.min_lr_ratio=0.05",
        "trainer.device=cpu",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={steps}",
        f"trainer.seed={seed}",
        "trainer.project_name=quickstart_agent",
        "trainer.experiment_name=warm-up",
        f"trainer.default_local_dir={out / 'warm_up'}",
    ]
    run("verl.trainer.sft_trainer", words, out / "warm_up.log")


def reinforce(out: Path, warm_steps: int, steps: int, seed: int, extra: list[str]) -> None:
    rollout = "actor_rollout_ref.rollout."
    words = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={out / 'data/train.parquet'}",
        f"data.val_files={out / 'data/test.parquet'}",
        "data.train_batch_size=32",
        "data.max_prompt_length=32",
        "data.max_response_length=96",
        f"actor_rollout_ref.model.path={out / f'warm_up/global_step_{warm_steps}/actor'}",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        f"{rollout}n=8",
        f"{rollout}name=native",
        f"{rollout}multi_turn.enable=True",
        f"{rollout}multi_turn.function_tool_path={HERE / 'my_tools.py'}",
        f"{rollout}multi_turn.max_assistant_turns=3",
        f"{rollout}agent.num_workers=1",
        "trainer.device=cpu",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=5",
        f"trainer.save_freq={steps}",
        f"trainer.seed={seed}",
        "trainer.project_name=quickstart_agent",
        "trainer.experiment_name=grpo",
        f"trainer.default_local_dir={out / 'grpo'}",
        *extra,
    ]
    run("verl.trainer.main_ppo", words, out / "grpo.log")


def curve(run_dir: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) pairs of a metric of a run, in order."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r[name]) for r in records if r.get(name) is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("quickstart_agent"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=15)
    args, extra = parser.parse_known_args()
    out, started = args.out, time.monotonic()
    if not (out / "data/warm_up.parquet").exists():
        say("1/4  Products and demonstrations (seconds)")
        prepare_data(out / "data", args.seed)
    if not (out / "model/config.json").exists():
        say("2/4  A small Qwen3-architecture model and its tokenizer, from nothing (seconds)")
        make_model(out / "model", args.seed)
    if not (out / f"warm_up/global_step_{args.warm_steps}").exists():
        say(f"3/4  Supervised warm-up to the call format, {args.warm_steps} steps")
        warm_up(out, args.warm_steps, args.seed)
    say(f"4/4  Reinforcement learning with the tool, {args.steps} steps")
    reinforce(out, args.warm_steps, args.steps, args.seed, extra)
    right = curve(out / "grpo", "val/accuracy")
    calls = curve(out / "grpo", "val-aux/agent/valid_call_ratio")
    shutil.copyfile(out / "grpo/report.html", out / "report.html")
    say("Validation: right answers, and the share of dialogues with a valid call")
    for (step, accuracy), (_, share) in zip(right, calls, strict=True):
        print(f"  step {step:4d}  {accuracy:6.1%}  {share:6.1%}  {'█' * round(40 * accuracy)}")
    print(f"\n  {right[0][1]:.1%} → {right[-1][1]:.1%}, {time.monotonic() - started:.0f} s in all")
    print(f"  the report: {out / 'report.html'}")


if __name__ == "__main__":
    main()
