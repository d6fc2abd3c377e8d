"""A small model learns to find a number by asking: a game of several turns as an environment (guess_env.py).

    python examples/agents/guess.py --out quickstart_guess [--program]

Most games of the warm-up are played at random, whatever is said; the others go by "higher" and "lower". Reinforcement
learning finds out which of the two wins. --program: the game is a program that asks the model over HTTP
(guess_program.py), one process a trajectory, and fewer of them a step.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from pathlib import Path

from calculator import HERE, curve, make_model, run, say, warm_up

MOST, TURNS = 10, 4
GUIDED = 0.3
"""The share of demonstrations that go by what was said."""
QUESTION = f"a number from 1 to {MOST}"


def demonstration(draw: random.Random) -> dict[str, list[dict[str, str]]]:
    """A game with guesses at random, among all numbers or among those that are left."""
    number, said = draw.randint(1, MOST), [("user", QUESTION)]
    low, high, guided = 1, MOST, draw.random() < GUIDED
    for _ in range(TURNS):
        guess = draw.randint(low, high)
        said.append(("assistant", str(guess)))
        if guess == number:
            break
        said.append(("user", "higher" if guess < number else "lower"))
        if guided:
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
    if said[-1][0] == "user":
        said.pop()
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def prepare_data(out: Path, seed: int) -> None:
    """train.parquet, test.parquet (numbers to find) and warm_up.parquet (games)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 2000), ("test", 200)):
        rows = [
            {
                "data_source": "guess",
                "prompt": [{"role": "user", "content": QUESTION}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index, "number": draw.randint(1, MOST)},
            }
            for index in range(count)
        ]
        pq.write_table(pa.Table.from_pylist(rows), out / f"{name}.parquet")
    pq.write_table(pa.Table.from_pylist([demonstration(draw) for _ in range(4000)]), out / "warm_up.parquet")


def reinforce(out: Path, warm_steps: int, steps: int, seed: int, extra: list[str], program: bool) -> None:
    rollout = "actor_rollout_ref.rollout."
    played = {"name": "custom", "path": HERE / "guess_env.py:Guess"}
    if program:
        played = {"name": "command", "path": f"'{sys.executable} {HERE / 'guess_program.py'}'"}
        extra = ["data.train_batch_size=8", *extra]
    words = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={out / 'data/train.parquet'}",
        f"data.val_files={out / 'data/test.parquet'}",
        "data.train_batch_size=32",
        "data.max_prompt_length=32",
        "data.max_response_length=48",
        f"actor_rollout_ref.model.path={out / f'warm_up/global_step_{warm_steps}/actor'}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        f"{rollout}n=8",
        f"{rollout}name=native",
        f"{rollout}multi_turn.max_assistant_turns={TURNS}",
        *(f"{rollout}agent.environment.{key}={value}" for key, value in played.items()),
        f"{rollout}agent.num_workers=1",
        "trainer.device=cpu",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=10",
        f"trainer.save_freq={steps}",
        f"trainer.seed={seed}",
        "trainer.project_name=quickstart_guess",
        "trainer.experiment_name=grpo",
        f"trainer.default_local_dir={out / 'grpo'}",
        *extra,
    ]
    run("verl.trainer.main_ppo", words, out / "grpo.log")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("quickstart_guess"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm-steps", type=int, default=120)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--program", action="store_true")
    args, extra = parser.parse_known_args()
    out, started = args.out, time.monotonic()
    if not (out / "data/warm_up.parquet").exists():
        say("1/4  Numbers to find, and games")
        prepare_data(out / "data", args.seed)
    if not (out / "model/config.json").exists():
        say("2/4  A small model and its tokenizer, from nothing")
        make_model(out / "model", args.seed, demonstration)
    if not (out / f"warm_up/global_step_{args.warm_steps}").exists():
        say(f"3/4  Supervised warm-up to the rules of the game, {args.warm_steps} steps")
        warm_up(out, args.warm_steps, args.seed)
    say(f"4/4  Reinforcement learning in the environment, {args.steps} steps")
    reinforce(out, args.warm_steps, args.steps, args.seed, extra, args.program)
    shutil.copyfile(out / "grpo/report.html", out / "report.html")
    found = curve(out / "grpo", "critic/score/mean")
    say(f"Share of games won in {TURNS} turns")
    for step, share in found[:: max(1, len(found) // 10)]:
        print(f"  step {step:4d}  {share:6.1%}  {'█' * round(40 * share)}")
    print(f"\n  {found[0][1]:.1%} → {found[-1][1]:.1%}, {time.monotonic() - started:.0f} s in all")
    print(f"  the report: {out / 'report.html'}")


if __name__ == "__main__":
    main()
