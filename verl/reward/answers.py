"""The final answer that a response gives, for majority votes: what the rule of its data source would compare with the truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl.reward.rules import gsm8k, math, math_dapo, rule_for, search_qa

_EMPTY = ("", math_dapo.INVALID)


def reader_of(data_source: str) -> Callable[[str], str | None] | None:
    """The function that reads an answer out of a text of this source; None if its rule has no single answer. UnknownSource."""
    return _READERS.get(rule_for(data_source))


def predicted(score_parts: Mapping[str, Any]) -> str | None:
    """`pred` of what a reward function returned, None if there is none or it says that there was no answer."""
    found = score_parts.get("pred")
    return None if found is None or str(found) in _EMPTY else str(found)


def _number(text: str) -> str | None:
    return gsm8k.extract(text) or gsm8k.extract(text, "flexible")


def _boxed(text: str) -> str | None:
    found = math.last_boxed(text)
    return math.normalise(found) or None if found is not None else None


def _tagged(text: str) -> str | None:
    found = search_qa.last_answer(text)
    return search_qa.normalise(found) or None if found is not None else None


_READERS: dict[str, Callable[[str], str | None]] = {
    "gsm8k": _number,
    "math": _boxed,
    "numina": _boxed,
    "geo3k": _boxed,
    "search_qa": _tagged,
}
