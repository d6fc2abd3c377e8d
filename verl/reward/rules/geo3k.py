r"""Geometry3K: 0.9 for the right `\boxed{…}`, 0.1 for thinking inside `<think>` before it."""

from __future__ import annotations

from typing import Any

from verl.data.boxed import last_boxed
from verl.reward.rules.math import same_answer
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


def format_reward(predict_str: str) -> float:
    """1.0 if `format_ok`, else 0."""
    return float(format_ok(predict_str))


def acc_reward(predict_str: str, ground_truth: Any, use_boxed: bool = True) -> float:
    """1.0 if the last box (without `use_boxed` the whole text) equals the ground truth, else 0."""
    answer = last_boxed(predict_str) if use_boxed else predict_str
    return float(answer is not None and same_answer(answer, str(ground_truth)))


def compute_score(
    solution_str: str, ground_truth: Any, format_score: float = 0.1, use_boxed: bool = True
) -> dict[str, Any]:
    """score = (1 - format_score)·acc_reward + format_score·format_reward. VerifyFailed if the truth is undecidable."""
    accuracy, well_formed = acc_reward(solution_str, ground_truth, use_boxed), format_reward(solution_str)
    score = (1.0 - format_score) * accuracy + format_score * well_formed
    return {"score": score, "acc": accuracy, "format": well_formed}


def score_alone(
    predict_str: str, ground_truth: Any, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    """`score` of `compute_score`: the public `geo3k.compute_score`."""
    return float(compute_score(predict_str, ground_truth, format_score, use_boxed)["score"])
