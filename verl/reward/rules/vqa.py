"""Visual question answering with several people's answers: the accuracy of VQA (arXiv 1505.00468, section 5)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl.reward.rules.visual_qa import final_text

ENOUGH = 3
"""A response is right if so many people say the same."""
_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_WORDS: dict[str, str | None] = {word: str(n) for n, word in enumerate(_NUMBERS)} | {"none": "0"}
_WORDS |= dict.fromkeys(("a", "an", "the"))
_IN_NUMBER = re.compile(r"(?<=\d),(?=\d)|['’`]")
_PUNCTUATION = re.compile(r"(?!(?<=\d)[.:](?=\d))[^\w\s]|_")


def normalise(text: str) -> str:
    """Lower case, number words as digits, without articles, apostrophes and punctuation; 3.5 and 10:30 stay. Text that
    would become empty stays as it is."""
    plain = _PUNCTUATION.sub(" ", _IN_NUMBER.sub("", text.lower()))
    words = (_WORDS.get(word, word) for word in plain.split())
    return " ".join(word for word in words if word is not None) or text.strip().lower()


def accepted(ground_truth: Any) -> list[str]:
    """The people's answers: a text, a list of texts or of `{answer}`, or such a list under `answers`. ValueError if
    none."""
    value = ground_truth.get("answers") if isinstance(ground_truth, Mapping) else ground_truth
    answers = [value] if isinstance(value, str) else list(value or ())
    if not answers:
        raise ValueError("VQA: the ground truth must hold answers (a text, or a list of texts)")
    return [str(answer["answer"] if isinstance(answer, Mapping) else answer) for answer in answers]


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """The mean over people of min(1, others with the same answer / 3); with three answers or fewer 1 if any is the
    same."""
    pred, people = normalise(final_text(solution_str)), [normalise(text) for text in accepted(ground_truth)]
    same = people.count(pred) if pred else 0
    if len(people) <= ENOUGH:
        accuracy = float(same > 0)
    else:
        left_out = same * min(1.0, (same - 1) / ENOUGH) if same else 0.0
        accuracy = (left_out + (len(people) - same) * min(1.0, same / ENOUGH)) / len(people)
    return {"score": accuracy, "acc": accuracy, "pred": pred}


def unmatched(ground_truth: Any) -> str:
    """Why no response can match this ground truth; "" where one can."""
    return "" if any(text.strip() for text in accepted(ground_truth)) else "every accepted answer is empty"
