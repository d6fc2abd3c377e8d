r"""Visual questions.

With one right answer: exact match of the final answer, a choice by its letter or its text, a number or formula by
math-verify. With several people's answers: the accuracy of VQA (arXiv 1505.00468, section 5).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from verl.reward.rules import search_qa
from verl.reward.rules.boxed import numina_answer, same_answer

_LETTER = re.compile(r"[(\[]?([A-Za-z])(?:[)\].:]|$)")
_CHOICE = re.compile(r"^\(?([A-Z])[).:]\s*(.*)", re.S)
_MATHEMATICAL = re.compile(r"[\d\\^=]")
ENOUGH = 3
"""A response is right if so many people say the same."""
_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_WORDS: dict[str, str | None] = {word: str(n) for n, word in enumerate(_NUMBERS)} | {"none": "0"}
_WORDS |= dict.fromkeys(("a", "an", "the"))
_IN_NUMBER = re.compile(r"(?<=\d),(?=\d)|['’`]")
_PUNCTUATION = re.compile(r"(?!(?<=\d)[.:](?=\d))[^\w\s]|_")


def final_text(response: str) -> str:
    r"""The final answer: the last `<answer>`, the last `\boxed{…}`, what follows "answer is", else all after the
    thinking."""
    text = response.rpartition("</think>")[2]
    answer = search_qa.last_answer(text) or numina_answer(text)
    return (text if answer is None else answer).strip()


def _plain(text: str) -> str:
    return " ".join(text.strip().strip("$").rstrip(".").split()).casefold()


def _same(answer: str, truth: str) -> bool:
    if _plain(answer) == _plain(truth):
        return True
    return bool(_MATHEMATICAL.search(truth)) and same_answer(answer, truth)


def _truths(ground_truth: Any) -> tuple[list[str], dict[str, str]]:
    """Accepted answers, and the choices' texts by letter. ValueError where there is none."""
    truth = ground_truth if isinstance(ground_truth, Mapping) else {"answer": ground_truth}
    answer, choices = truth.get("answer"), truth.get("choices") or ()
    answers = [answer] if isinstance(answer, str | int | float) else list(answer or ())
    if not answers:
        raise ValueError("visual question: the ground truth must hold an answer (a text, or a list of texts)")
    return [str(text) for text in answers], _lettered(choices)


def _lettered(choices: Sequence[str]) -> dict[str, str]:
    """The choices by letter: "A: text" says its own, another has that of its place."""
    out = {}
    for place, choice in enumerate(choices):
        match = _CHOICE.match(str(choice))
        letter, text = match.groups() if match else (chr(ord("A") + place), str(choice))
        out[letter] = text
    return out


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """1 if the final answer is an accepted one, else 0. VerifyFailed if equality cannot be decided.

    ground_truth: a text, a list of texts, or `{answer, choices}` with the letter of a choice as the answer.
    """
    final, (accepted, choices) = final_text(solution_str), _truths(ground_truth)
    match = _LETTER.match(final)
    letter = match[1].upper() if match else ""
    right = False
    for truth in accepted:
        by_letter = truth.isalpha() and truth.upper() == letter
        texts = [truth, *([choices[truth]] if truth in choices else [])]
        right = right or by_letter or (bool(final) and any(_same(final, text) for text in texts))
    return {"score": float(right), "acc": float(right), "pred": final}


unmatched = partial(search_qa.unmatched, read=lambda truth: _truths(truth)[0])


def normalised_words(text: str) -> str:
    """Lower case, number words as digits, without articles, apostrophes and punctuation; 3.5 and 10:30 stay. Text that
    would become empty stays as it is."""
    plain = _PUNCTUATION.sub(" ", _IN_NUMBER.sub("", text.lower()))
    words = (_WORDS.get(word, word) for word in plain.split())
    return " ".join(word for word in words if word is not None) or text.strip().lower()


def people_answers(ground_truth: Any) -> list[str]:
    """The people's answers: a text, a list of texts or of `{answer}`, or such a list under `answers`. ValueError if
    none."""
    value = ground_truth.get("answers") if isinstance(ground_truth, Mapping) else ground_truth
    answers = [value] if isinstance(value, str) else list(value or ())
    if not answers:
        raise ValueError("VQA: the ground truth must hold answers (a text, or a list of texts)")
    return [str(answer["answer"] if isinstance(answer, Mapping) else answer) for answer in answers]


def vqa_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """The mean over people of min(1, others with the same answer / 3); with three answers or fewer 1 if any is the
    same."""
    pred, people = (
        normalised_words(final_text(solution_str)),
        [normalised_words(text) for text in people_answers(ground_truth)],
    )
    same = people.count(pred) if pred else 0
    if len(people) <= ENOUGH:
        accuracy = float(same > 0)
    else:
        left_out = same * min(1.0, (same - 1) / ENOUGH) if same else 0.0
        accuracy = (left_out + (len(people) - same) * min(1.0, same / ENOUGH)) / len(people)
    return {"score": accuracy, "acc": accuracy, "pred": pred}


vqa_unmatched = partial(search_qa.unmatched, read=people_answers)
