"""MATH: competition problems whose solutions box their answer (data.md §14)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.data.files import DataError
from verl.data.prepare import common

REPO = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` (braces balanced) or `\boxed x`, or None."""
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    rest = text[start + len("\\boxed") :]
    if not rest.startswith("{"):
        return rest.split("$")[0].strip() or None
    depth = 0
    for position, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:position]
    return None


def row(problem: str, solution: str, split: str, index: int, where: str) -> dict[str, Any]:
    """One row of the chat format. Raises DataError, with `where`, for a solution without a box."""
    truth = last_boxed(solution)
    if truth is None:
        raise DataError(f"{where}: the solution boxes no answer: …{solution[-80:]!r}")
    return {
        "data_source": REPO,
        "prompt": [{"role": "user", "content": f"{problem} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index},
    }


def rows(local: str | None, split: str) -> list[dict[str, Any]]:
    """All rows of a split, from a directory in the hub's layout or from the hub."""
    files = common.find_split(local, split, config="default") if local else common.from_hub(REPO, split)
    raw = common.raw_texts(files, ("problem", "solution"))
    return [row(problem, solution, split, i, where) for i, (where, problem, solution) in enumerate(raw)]


def main(argv: Sequence[str] | None = None) -> int:
    """The script."""
    about = "MATH in the chat format: train.parquet, test.parquet"
    return common.two_splits("math_dataset", about, rows, argv, "math")
