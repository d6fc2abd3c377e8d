"""Synthetic arithmetic in the GSM8K format: small problems a tiny model can learn, made from a seed.

Each problem is a chain of one to three operations, asked bare or as a short story; the answer works it out
step by step, left to right, and ends in `#### n`. Levels: 1 three or four numbers up to 9, + and −; 2 two numbers up
to 99, + and −; 3 (default) two to four numbers up to 99, + and −; 4 as 3, with one small product in some. Training and
validation problems are disjoint as arithmetic: no chain of one is a chain of the other.

With a careless share there is a third file, warm_up.parquet: the training problems with worked answers of mixed
quality, of which that share forgets one operation. A model warmed up on it has the format and the skill, and is
often wrong: what reinforcement learning can put right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from verl.data.files import DataError
from verl.data.prepare import common
from verl.data.rows import GSM8K

LEVELS = {1: ((2, 3), 9, "+-"), 2: ((1,), 99, "+-"), 3: ((1, 2, 3), 99, "+-"), 4: ((1, 2, 3), 99, "+-*")}
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
    first, operations = chain[0][1], chain[1:]
    totals = [value_steps(chain[: k + 2])[0] for k in range(len(operations))]
    tellable = all(o != "*" for o, _ in operations) and min(totals) >= 0
    if not (stories and tellable and rng.random() < 0.3):
        expression = " ".join([str(first), *(f"{o} {n}" for o, n in operations)])
        return rng.choice(BARE).format(e=expression)
    sentences = [rng.choice(GAINS if o == "+" else LOSSES).format(b=n) for o, n in operations]
    return " ".join([rng.choice(STARTS).format(a=first), *sentences, ASKS])


def worked_answer(chain: Chain) -> str:
    """The steps, then `#### value`."""
    value, steps = value_steps(chain)
    return "\n".join([*steps, f"#### {value}"])


def forget_one(chain: Chain, rng: random.Random) -> Chain:
    """The chain without one of its operations: a careless solution."""
    left_out = rng.randrange(1, len(chain))
    return chain[:left_out] + chain[left_out + 1 :]


def row(chain: Chain, rng: random.Random, split: str, index: int, *, stories: bool) -> dict[str, Any]:
    """One row of the chat format."""
    text, truth = question(chain, rng, stories=stories), str(value_steps(chain)[0])
    return common.chat_row(GSM8K, text, truth, split, index, answer=worked_answer(chain), question=text)


def make(
    *, train: int, test: int, level: int = 3, seed: int = 0, stories: bool = True, careless: float = 0.0
) -> dict[str, list[dict[str, Any]]]:
    """{"train": rows, "test": rows}, a function of the arguments alone. Raises DataError if the level is too small.

    careless > 0 adds "warm_up": the training rows, that share of the answers with an operation forgotten.
    """
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
            problem = f"level {level} has only about {len(chains)} different problems"
            raise DataError(f"{problem}; ask for fewer, or raise --level")
    drawn = list(chains)
    splits = {}
    for name, part in (("train", drawn[test:]), ("test", drawn[:test])):
        splits[name] = [row(chain, rng, name, i, stories=stories) for i, chain in enumerate(part)]
    if careless > 0:
        pairs = zip(splits["train"], drawn[test:], strict=True)
        splits["warm_up"] = [mixed_quality(line, chain, careless, rng) for line, chain in pairs]
    return splits


def mixed_quality(line: dict[str, Any], chain: Chain, careless: float, rng: random.Random) -> dict[str, Any]:
    """A row for the warm-up: with probability `careless` its worked answer forgets an operation."""
    forgets = len(chain) > 1 and rng.random() < careless
    answer = worked_answer(forget_one(chain, rng)) if forgets else line["extra_info"]["answer"]
    about = {**line["extra_info"], "split": "warm_up", "answer": answer, "careless": forgets}
    return {**line, "extra_info": about}


def main(argv: Sequence[str] | None = None) -> int:
    """The script."""
    parser = common.parser("arithmetic", "synthetic arithmetic in the GSM8K format", local_raw=False)
    add = parser.add_argument
    add("--train", type=int, default=8000, help="training rows")
    add("--test", type=int, default=400, help="held-out rows")
    add("--level", type=int, default=3, help="1 (easy) to 4")
    add("--seed", type=int, default=0)
    add("--careless", type=float, default=0.0, help="share of careless answers in warm_up.parquet")
    add("--no_stories", action="store_true", help="bare expressions only")
    args = common.parsed(parser, argv)
    if args.train < 1 or args.test < 1:
        raise DataError(f"--train {args.train} --test {args.test}: at least one row each is needed")
    if not 0 <= args.careless <= 1:
        raise DataError(f"--careless {args.careless}: a share between 0 and 1")
    sizes = {"train": args.train, "test": args.test, "level": args.level, "seed": args.seed}
    splits = make(**sizes, stories=not args.no_stories, careless=args.careless)
    return common.finish(splits, args)
