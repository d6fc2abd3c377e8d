"""GSM8K: compare the number after `####` (strict) or the last number (flexible) with the ground truth."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

TAIL = 300
"""Only the last characters of an answer are looked at: the final number is there, and time stays bounded."""

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")
_DIGIT = re.compile(r"[0-9]")


def extract(solution_str: str, method: str = "strict") -> str | None:
    """The final number as text, cleaned by `clean_number`, or None. ValueError for an unknown method."""
    tail = solution_str[-TAIL:]
    if method == "strict":
        numbers = _STRICT.findall(tail)
    elif method == "flexible":
        numbers = [m for m in _NUMBER.findall(tail) if _DIGIT.search(m)]
    else:
        raise ValueError(f"gsm8k: method must be 'strict' or 'flexible', not {method!r}")
    return clean_number(numbers[-1]) if numbers else None


extract_solution = extract  # by the public name


def clean_number(text: str) -> str:
    """Without commas, `$`, blanks around and a full stop at the end."""
    return text.replace(",", "").replace("$", "").strip().rstrip(".")


def same_number(a: str, b: str) -> bool:
    """Equal as text or as decimal numbers (`72`, `72.0`, `072`)."""
    if a == b:
        return True
    try:
        return Decimal(a) == Decimal(b)
    except InvalidOperation:
        return False


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` if the number is right, `format_score` if there is one but another, 0 if there is none.

    `ground_truth` is a number or its text. ValueError if it is missing.
    """
    truth = clean_number(str(ground_truth)) if ground_truth is not None else ""
    if not truth:
        raise ValueError("gsm8k: the row has no ground truth (reward_model.ground_truth is empty)")
    answer = extract(solution_str, method)
    if answer is None:
        return 0.0
    return float(score) if same_number(answer, truth) else float(format_score)


def unmatched(ground_truth: Any) -> str:
    """Why no response can match this ground truth; "" where one can."""
    truth = text = clean_number(str(ground_truth))
    try:
        number = Decimal(truth)
        if number.is_finite() and abs(number.adjusted()) < TAIL:
            text = format(number, "f")
    except InvalidOperation:
        pass  # no number: what `extract` makes of the text decides
    answer = extract(f"#### {text}")
    return "" if answer and same_number(answer, truth) else "a number is needed"
