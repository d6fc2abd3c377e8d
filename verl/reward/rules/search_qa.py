"""Search-R1 question answering: exact match of the last `<answer>…</answer>` with any accepted answer."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_TAGS = 10
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces; text that is nothing else stays itself."""
    plain = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return " ".join(plain.split()) or text.strip().lower()


def last_answer(solution_str: str) -> str | None:
    """What the last closed `<answer>` tag holds, or None."""
    end = solution_str.rfind("</answer>")
    start = solution_str.rfind("<answer>", 0, end) if end >= 0 else -1
    return solution_str[start + len("<answer>") : end].strip() if start >= 0 else None


def final_answer(text: str) -> str:
    """`last_answer`, normalised; "" without one."""
    return normalise(last_answer(text) or "")


normalize_answer, extract_solution = normalise, last_answer  # by the public names


def em_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
    """1 if the normalised prediction is one of the normalised answers, else 0."""
    return int(normalise(prediction) in map(normalise, targets(golden_answers)))


def subem_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
    """1 if the normalised prediction contains one of the normalised answers, else 0."""
    return int(any(normalise(answer) in normalise(prediction) for answer in targets(golden_answers)))


def count_answer_tags(text: str) -> tuple[int, int]:
    """How many opening and closing tags."""
    return text.count("<answer>"), text.count("</answer>")


def targets(ground_truth: Any) -> list[str]:
    """Accepted answers. ValueError if the row has none."""
    value = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    if value is None:
        raise ValueError("search QA: the ground truth must hold a 'target' (a text or a list of texts)")
    return [value] if isinstance(value, str) else [str(v) for v in value]


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` if right, a quarter of it with more than ten opening or closing tags; `format_score` for another answer,
    else 0. `method` has no effect."""
    accepted = targets(ground_truth)
    answer = last_answer(solution_str)
    if answer is None:
        return 0.0
    if not em_check(answer, accepted):
        return format_score
    return score / 4 if max(count_answer_tags(solution_str)) > MAX_TAGS else score


def compute_score_subem(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` if the answer contains an accepted one, else `format_score`; 0 without answer. `method` has no effect."""
    accepted, answer = targets(ground_truth), last_answer(solution_str)
    if answer is None:
        return 0.0
    return score if subem_check(answer, accepted) else format_score


def unmatched(ground_truth: Any, read: Callable[[Any], Sequence[str]] = targets) -> str:
    """Why no response can match this ground truth; "" where one can. `read`: its accepted answers."""
    return "" if any(text.strip() for text in read(ground_truth)) else "every accepted answer is empty"
