r"""Geometry3K: 0.9 for the right `\boxed{…}`, 0.1 for thinking inside `<think>` before it."""

from __future__ import annotations

from typing import Any

from verl.reward.rules.math import last_boxed, same_answer
from verl.reward.rules.math import unmatched as unmatched


def format_ok(answer: str) -> bool:
    r"""True if the whole answer reads `<think>…</think>…\boxed{…}…`.

    Searching forward for the earliest place of each mark is equal to the pattern with `.*` between them, and
    linear where the pattern backtracks.
    """
    if not answer.startswith("<think>"):
        return False
    at = len("<think>")
    for mark in ("</think>", "\\boxed{", "}"):
        at = answer.find(mark, at)
        if at < 0:
            return False
        at += len(mark)
    return True


def compute_score(solution_str: str, ground_truth: Any, format_score: float = 0.1) -> dict[str, Any]:
    """score = (1 - format_score)·acc + format_score·format. Raises VerifyFailed if equality cannot be decided."""
    boxed = last_boxed(solution_str)
    right = boxed is not None and same_answer(boxed, str(ground_truth))
    well_formed = format_ok(solution_str)
    return {
        "score": (1.0 - format_score) * right + format_score * well_formed,
        "acc": float(right),
        "format": float(well_formed),
    }
