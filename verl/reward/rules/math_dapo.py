r"""DAPO's math rule: the last `Answer: …` line (else a `\boxed{…}` at the very end), compared as normalised text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.reward.outcome import INVALID
from verl.reward.rules.boxed import last_boxed
from verl.reward.rules.boxed import last_boxed_only_string as last_boxed_only_string
from verl.reward.rules.boxed import normalise as normalise_math
from verl.reward.rules.boxed import remove_boxed as remove_boxed

TAIL = 300
BOX_TAIL = 100

ANSWER = r"(?i)Answer\s*:\s*([^\n]+)"
_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox|overline)\{([^{}]*)\}")
_ARTICLE = re.compile(r"(?i)\b(?:an?|the)\s+")
_UNITS = re.compile(
    r"(?i)(?<![a-z\\])(?:square|cubic|degrees?|dollars?|cents?|percent|units?|points?|digits?|integers?|"
    r"inch(?:es)?|feet|foot|ft|miles?|mph|met(?:er|re)s?|km|cm|mm|kg|grams?|gm|pounds?|hours?|minutes?|seconds?|"
    r"days?|weeks?|months?|years?|students?|people|ways|edges|meals|multiples)(?![a-z])"
)
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,|\{,\}|,\\!)(?=[0-9]{3}(?![0-9]))")
_INLINE = re.compile(r"\$([^$]*)\$")


def normalise(answer: str) -> str:
    r"""Text after the last `=`, inside `$…$` if there is such, without articles, units, `\text{}` and commas."""
    text = answer.rsplit("=", 1)[-1].strip()
    inline = _INLINE.search(text)
    if inline and inline.group(1).strip():
        text = inline.group(1)
    text = _TEXT.sub(r"\1", text)
    text = _UNITS.sub("", _ARTICLE.sub("", text))
    text = _THOUSANDS.sub("", text)
    return normalise_math(text.strip(" .*")) or answer.strip()


normalize_final_answer = normalise  # by the public name


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = ANSWER
) -> tuple[bool, str]:
    """(whether the last match of the pattern equals `gt`, its normalised text); `gt_need_extract`: `gt` holds a box."""
    answers = re.findall(answer_pattern, solution_str)
    pred = normalise(answers[-1]) if answers else INVALID
    return pred == normalise((last_boxed(gt) or "") if gt_need_extract else gt), pred


def is_correct_strict_box(pred: str, gt: str, pause_tokens_index: Sequence[int] | None = None) -> tuple[int, str]:
    """(1 or -1: whether the box in the last 100 characters holds exactly `gt`, its content). The last of four positions
    of pause tokens stands for the end."""
    end = 0 if pause_tokens_index is None else pause_tokens_index[-1]
    content = last_boxed(pred[end - BOX_TAIL :])
    return (1 if content == gt else -1), INVALID if content is None else content


def verify(
    solution_str: str,
    answer: str,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> tuple[bool, str]:
    """(whether it is right, what was compared), by `is_correct_strict_box` or `is_correct_minerva`."""
    if strict_box_verify:
        correct, pred = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return correct == 1, pred
    return is_correct_minerva(solution_str, answer)


def compute_score(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> dict[str, Any]:
    """`{score: 1.0 or -1.0, acc, pred}`; pred is `[INVALID]` where no answer is found. ValueError without truth.

    `strict_box_verify`: by `is_correct_strict_box`.
    """
    truth = "" if ground_truth is None else str(ground_truth)
    if not truth.strip():
        raise ValueError("math_dapo: the row has no ground truth (reward_model.ground_truth is empty)")
    tail = solution_str[-TAIL:]
    if strict_box_verify:
        right, pred = verify(tail, truth, strict_box_verify, pause_tokens_index)
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}
    answers = re.findall(ANSWER, tail)
    answer = last_boxed(answers[-1] if answers else tail[-BOX_TAIL:])
    if answer is None and answers:
        answer = answers[-1]
    pred = "" if answer is None else normalise(answer)
    right = pred not in ("", INVALID) and pred == normalise(truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred or INVALID}


def unmatched(ground_truth: Any) -> str:
    """Why no response can match this ground truth; "" where one can."""
    if isinstance(ground_truth, Mapping | Sequence) and not isinstance(ground_truth, str):
        return "text or a number is needed"
    text = str(ground_truth)
    spellings = (text, " ".join(text.split()), normalise(text))
    right = any(compute_score(f"Answer: {answer}", text)["acc"] for answer in spellings)
    return "" if right else "no answer reads so"
