"""Synthetic arithmetic in the GSM8K format: small problems a tiny model can learn, made from a seed.

Each problem is a chain of one to three operations, asked bare or as a short story; the answer works it out
step by step, left to right, and ends in `#### n`. Levels: 1 two numbers up to 20, + only; 2 two numbers up to
99, + and −; 3 (default) two to four numbers up to 99, + and −; 4 as 3, with one small product in some. Training
and validation problems are disjoint as arithmetic: no chain of one is a chain of the other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from verl.data.files import DataError
from verl.data.prepare import common
from verl.data.rows import GSM8K

LEVELS = {1: ((1,), 20, "+"), 2: ((1,), 99, "+-"), 3: ((1, 2, 3), 99, "+-"), 4: ((1, 2, 3), 99, "+-*")}
"""level → (numbers of operations, largest operand, operations)."""
BARE = ("What is {e}?", "Calculate {e}.", "Work out {e}.")
STARTS = ("Tom has {a} apples.", "A box holds {a} pens.", "Mia has {a} coins.", "A shop has {a} cups.")
GAINS = ("It gets {b} more.", "Then {b} are added.")
LOSSES = ("Then {b} are taken away.", "It loses {b}.")
ASKS = "How many are there now?"

Chain = tuple[tuple[str, int], ...]


def draw_chain(rng: random.Random, level: int) -> Chain:
    """(("+", first), (operation, number), …). A product, if any, is the first operation, by 2 to 9."""
    counts, largest, operations = LEVELS[level]
    chain = [("+", rng.randint(0, largest))]
    for position in range(rng.choice(counts)):
        operation = rng.choice(operations)
        if operation == "*" and position:
            operation = "+"
        number = rng.randint(2, 9) if operation == "*" else rng.randint(0, largest)
        chain.append((operation, number))
    return tuple(chain)


def value_steps(chain: Chain) -> tuple[int, list[str]]:
    """The value, and one line `a + b = c` per operation."""
    total, steps = chain[0][1], []
    for operation, number in chain[1:]:
        before = total
        total = {"+": before + number, "-": before - number, "*": before * number}[operation]
        steps.append(f"{before} {operation} {number} = {total}")
    return total, steps


def question(chain: Chain, rng: random.Random, *, stories: bool) -> str:
    """The problem in words: bare, or a story where the running total never falls below zero."""
    first, rest = chain[0][1], chain[1:]
    totals = [value_steps(chain[: k + 2])[0] for k in range(len(rest))]
    tellable = all(o != "*" for o, _ in rest) and min(totals) >= 0
    if not (stories and tellable and rng.random() < 0.3):
        expression = " ".join([str(first), *(f"{o} {n}" for o, n in rest)])
        return rng.choice(BARE).format(e=expression)
    told = [rng.choice(GAINS if o == "+" else LOSSES).format(b=n) for o, n in rest]
    return " ".join([rng.choice(STARTS).format(a=first), *told, ASKS])


def row(chain: Chain, rng: random.Random, split: str, index: int, *, stories: bool) -> dict[str, Any]:
    """One row of the chat format."""
    value, steps = value_steps(chain)
    text = question(chain, rng, stories=stories)
    answer = "\n".join([*steps, f"#### {value}"])
    return {
        "data_source": GSM8K,
        "prompt": [{"role": "user", "content": text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(value)},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": text},
    }


def make(
    *, train: int, test: int, level: int = 3, seed: int = 0, stories: bool = True
) -> dict[str, list[dict[str, Any]]]:
    """{"train": rows, "test": rows}, a function of the arguments alone. Raises DataError if the level is too small."""
    if level not in LEVELS:
        raise DataError(f"--level {level}: the levels are {', '.join(map(str, LEVELS))}")
    rng = random.Random(f"arithmetic/{seed}/{level}")
    chains: dict[Chain, None] = {}
    misses = 0
    while len(chains) < train + test:
        before = len(chains)
        chains.setdefault(draw_chain(rng, level))
        misses = 0 if len(chains) > before else misses + 1
        if misses > 2000:
            raise DataError(
                f"level {level} has only about {len(chains)} different problems; ask for fewer, or raise --level"
            )
    drawn = list(chains)
    splits = {"test": drawn[:test], "train": drawn[test:]}
    return {
        name: [row(chain, rng, name, i, stories=stories) for i, chain in enumerate(splits[name])]
        for name in ("train", "test")
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The script."""
    parser = common.parser("arithmetic", "synthetic arithmetic in the GSM8K format", local_raw=False)
    parser.add_argument("--train", type=int, default=8000, help="training rows")
    parser.add_argument("--test", type=int, default=400, help="held-out rows")
    parser.add_argument("--level", type=int, default=3, help="1 (easy) to 4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no_stories", action="store_true", help="bare expressions only")
    args = parser.parse_args(argv)
    where = common.target(args)
    if args.train < 1 or args.test < 1:
        raise DataError(f"--train {args.train} --test {args.test}: at least one row each is needed")
    made = make(
        train=args.train, test=args.test, level=args.level, seed=args.seed, stories=not args.no_stories
    )
    return common.finish(made, where)
