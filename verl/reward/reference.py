r"""Answers whose score is known beforehand: the reference in the form a source expects, and wrong ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.reward.errors import UnknownSource
from verl.reward.rules import rule_for

_FORMS = {
    "gsm8k": "#### {}",
    "math": "\\boxed{{{}}}",
    "math_dapo": "Answer: {}",
    "numina": "\\boxed{{{}}}",
    "geo3k": "<think>So it is.</think> \\boxed{{{}}}",
    "search_qa": "<answer>{}</answer>",
}


def rule_or_none(data_source: str) -> str | None:
    """Name of the built-in rule of a source, None if it has none."""
    try:
        return rule_for(data_source)
    except UnknownSource:
        return None


def truth_text(ground_truth: Any) -> str:
    """A ground truth as text: the first target of search QA, else `str` of it; "" if there is none."""
    if isinstance(ground_truth, Mapping) and "target" in ground_truth:
        ground_truth = ground_truth["target"]
    if isinstance(ground_truth, list | tuple) and ground_truth:
        ground_truth = ground_truth[0]
    return "" if ground_truth is None else str(ground_truth)


def in_form(data_source: str, text: str) -> str:
    r"""A final answer written as the source's rule wants it (`#### 72`, `\boxed{72}`); as it is without a rule."""
    form = _FORMS.get(rule_or_none(data_source) or "")
    return form.format(text) if form else text


def forms(data_source: str, truth: str, built_in: bool) -> list[tuple[str, str]]:
    """(label, text) of ways to write a final answer: the rule's; for a custom function also the bare text."""
    written = in_form(data_source, truth)
    if built_in or written == truth:
        return [("", written)]
    return [("", truth), (f", as {in_form(data_source, '…')!r}", written)]


def reference_answers(
    data_source: str, ground_truth: Any, extra_info: Mapping[str, Any] | None, built_in: bool = True
) -> list[tuple[str, str]]:
    """(label, text) of right answers: the ground truth in each of its forms, and the row's own `answer`.

    `answer` (or `response`, in the plain format) of extra_info is a worked solution in many data sets.
    """
    truth = truth_text(ground_truth)
    found = [(f"ground truth{label}", text) for label, text in forms(data_source, truth, built_in)]
    for key in ("answer", "response"):
        solution = (extra_info or {}).get(key)
        if isinstance(solution, str) and solution.strip():
            found.append((f"extra_info.{key}", solution))
    return found


_BOMB = 60

HOSTILE: tuple[tuple[str, str], ...] = (
    ("very long", "the answer is 31337 and " * 20_000),
    ("very long number", "#### " + "9" * 50_000),
    ("open braces", "\\boxed{" * 500),
    ("closed braces", "\\boxed{1" + "}" * 500),
    ("nested \\frac", "\\boxed{" + "\\frac{" * _BOMB + "1" + "}{2}" * _BOMB + "}"),
    ("power tower", "\\boxed{2^{2^{2^{2}}}}"),
    ("unicode", "#### ٧٢ ７２ ½ \u202e31337 \U0001f600 \\boxed{７２}"),
    ("null bytes", "\x00#### \x00\\boxed{\x00}"),
    ("lone surrogate", "\ud800 #### \\boxed{\udfff}"),
    ("tags", "<answer>" * 50 + "</answer>" * 50 + "</think>" * 20),
    ("marks only", "#### \\boxed{} Answer: <answer></answer>"),
    ("format string", "%s%n{0}{__class__} $(id) `id` ${HOME}"),
)

GARBAGE: tuple[tuple[str, str], ...] = (
    ("one word", "banana"),
    ("prose", "I am not sure about this question, sorry."),
    ("repetition", "12 345 6789 31337 " * 20 + "..."),
    ("every number", " ".join(f"\\boxed{{{n}}}" for n in [*range(100), 31337]) + " I do not know."),
)
