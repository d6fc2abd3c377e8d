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
    out = []
    for index, (where, line) in enumerate(common.raw_rows(files)):
        problem, solution = line.get("problem"), line.get("solution")
        if not isinstance(problem, str) or not isinstance(solution, str):
            raise DataError(f"{where}: problem and solution are needed, as text; it has {', '.join(line)}")
        out.append(row(problem, solution, split, index, where))
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """The script."""
    parser = common.parser(
        "math_dataset", "MATH in the chat format: train.parquet, test.parquet", folder="math"
    )
    args = parser.parse_args(argv)
    where = common.target(args)
    return common.finish({split: rows(args.local_dataset_path, split) for split in ("train", "test")}, where)
