"""Search-R1 question answering: exact match of the last `<answer>…</answer>` with any accepted answer."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

MAX_TAGS = 10
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces; text that is nothing else stays itself."""
    plain = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return " ".join(plain.split()) or text.strip().lower()


def last_answer(text: str) -> str | None:
    """What the last closed `<answer>` tag holds, or None."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def targets(ground_truth: Any) -> list[str]:
    """Accepted answers. ValueError if the row has none."""
    value = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    if value is None:
        raise ValueError("search QA: the ground truth must hold a 'target' (a text or a list of texts)")
    return [value] if isinstance(value, str) else [str(v) for v in value]


def compute_score(solution_str: str, ground_truth: Any) -> float:
    """1.0 if right, 0.25 if right among more than ten opening or closing tags, else 0."""
    accepted = targets(ground_truth)
    answer = last_answer(solution_str)
    if answer is None:
        return 0.0
    answer = normalise(answer)
    if all(answer != normalise(t) for t in accepted):
        return 0.0
    many = solution_str.count("<answer>") > MAX_TAGS or solution_str.count("</answer>") > MAX_TAGS
    return 0.25 if many else 1.0


def unmatched(ground_truth: Any) -> str:
    """Why no response can match this ground truth; "" where one can."""
    return "" if any(text.strip() for text in targets(ground_truth)) else "every accepted answer is empty"
