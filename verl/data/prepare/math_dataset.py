"""MATH: competition problems whose solutions box their answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.data.boxed import last_boxed
from verl.data.files import DataError
from verl.data.prepare import common

REPO = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def boxed_answer(solution: str) -> str | None:
    r"""The content of the last box: `\boxed{…}`, `\fbox{…}`, or what follows `\boxed` without braces; or None."""
    _, box, tail = solution.rpartition("\\boxed")
    if not box or tail.lstrip().startswith("{"):
        return last_boxed(solution)
    return tail.split("$")[0].strip() or None


def row(problem: str, solution: str, split: str, index: int, where: str) -> dict[str, Any]:
    """One row of the chat format. Raises DataError, with `where`, for a solution without a box."""
    truth = boxed_answer(solution)
    if truth is None:
        raise DataError(f"{where}: the solution boxes no answer: …{solution[-80:]!r}")
    return common.chat_row(REPO, f"{problem} {INSTRUCTION}", truth, split, index)


def rows(local: str | None, split: str) -> list[dict[str, Any]]:
    """All rows of a split, from a directory in the hub's layout or from the hub."""
    files = common.find_split(local, split, config="default") if local else common.from_hub(REPO, split)
    raw = common.raw_texts(files, ("problem", "solution"))
    return [row(problem, solution, split, i, where) for i, (where, problem, solution) in enumerate(raw)]


def main(argv: Sequence[str] | None = None) -> int:
    """The script."""
    about = "MATH in the chat format: train.parquet, test.parquet"
    return common.two_splits("math_dataset", about, rows, argv, "math")
