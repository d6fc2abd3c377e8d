"""The final answer of a response, for majority votes: the text that the rule of its data source compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl.data.boxed import last_boxed
from verl.reward.rules import gsm8k, math, math_dapo, numina, rule_for, search_qa

_EMPTY = ("", math_dapo.INVALID)


def has_answers(data_source: str) -> bool:
    """True if the built-in rule of this source compares one answer. UnknownSource for a source without a rule."""
    return rule_for(data_source) in _READERS


def final_answer(data_source: str, text: str, options: Mapping[str, Any]) -> str | None:
    """The answer that the built-in rule reads, under `options` of the rule; None if there is none in the text."""
    return _READERS[rule_for(data_source)](text, options) or None


def predicted(score_parts: Mapping[str, Any]) -> str | None:
    """`pred` of what a reward function returned, None if there is none or it says that there was no answer."""
    answer = score_parts.get("pred")
    return None if answer is None or str(answer) in _EMPTY else str(answer)


_READERS: dict[str, Callable[[str, Mapping[str, Any]], str | None]] = {
    "gsm8k": lambda text, options: gsm8k.extract(text, options.get("method", "strict")),
    **dict.fromkeys(("math", "geo3k"), lambda text, _: math.normalise(last_boxed(text) or "")),
    "numina": lambda text, _: math.normalise(numina.extract(text) or ""),
    "search_qa": lambda text, _: search_qa.normalise(search_qa.last_answer(text) or ""),
}
