r"""Mathematical answers in a box: the rules of MATH, NuminaMath and Geometry3K.

An answer is compared with the ground truth as normalised text, then by math-verify.

MATH: the last `\boxed{…}`. NuminaMath: that, else what follows the last "answer is" or "answer:". Geometry3K: 0.9 for
the right box, 0.1 for thinking inside `<think>` before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl.data.boxed import last_box, last_boxed

_BARE_BOX = "\\boxed "
_SPACES = re.compile(r"(?<!\\)\\[,;:!> ]|\s+|~")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?")
_DEGREES = re.compile(r"\^\{?\\circ\}?|\\degree(?![A-Za-z])|°")
_NOON = r"(?!\s*[aApP]\.?\s*[mM]\b)"
_UNIT = re.compile(
    r"(?<=[^\\{(\[,])\\(?:(?:text|mbox|textrm)\{" + _NOON + r"(?!and\b|or\b)[^{}]*\}|mathrm\{" + _NOON + r"[^{}]{2,}\})"
    r"(?:\^\{?-?[0-9]+\}?)?$"
)
_LEFT_SIDE = re.compile(r"^[A-Za-z](?:\([A-Za-z]\))?=(?=[^=])")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac(?:([0-9a-zA-Z])|\{([^{}]*)\})(?:([0-9a-zA-Z])|\{([^{}]*)\})")
_SHORT_ROOT = re.compile(r"\\sqrt([0-9a-zA-Z])")
_SLASH = re.compile(r"^(-?)([0-9]+)/([0-9]+)$")
_BARE_POINT = re.compile(r"(?<![0-9])\.(?=[0-9])")
_THOUSANDS = re.compile(r"^-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?$")
_LEAD = re.compile(r"(?i)answer(?:\s+(?:is|are)\b|s?\s*:)\s*:?\s*")
_INLINE = re.compile(r"\$([^$]+)\$")
_SENTENCE_END = re.compile(r"\.(?:\s|$)")
_PI = re.compile(r"\\pi(?![A-Za-z])|π")


def last_boxed_only_string(string: str) -> str | None:
    r"""The last `\boxed{…}` or `\fbox{…}` with its command, or `\boxed …` up to a dollar sign; None without one."""
    box = last_box(string)
    if box is not None:
        return string[box[0] : box[2] + 1]
    return _BARE_BOX + string.rsplit(_BARE_BOX, 1)[1].split("$")[0] if _BARE_BOX in string else None


def remove_boxed(s: str) -> str:
    """The content of what `last_boxed_only_string` returns. AssertionError for anything else."""
    box = last_box(s)
    if box is not None and box[0] == 0 and box[2] == len(s) - 1:
        return s[box[1] + 1 : box[2]]
    if s.startswith(_BARE_BOX):
        return s.removeprefix(_BARE_BOX)
    raise AssertionError(f"{s[:80]!r} is no \\boxed{{…}}")


def _braced(match: re.Match[str]) -> str:
    a, b, c, d = match.groups()
    return f"\\frac{{{b if a is None else a}}}{{{d if c is None else c}}}"


def normalise(answer: str) -> str:
    r"""One spelling for what means the same: blanks, `\left`, degrees, `\$`, `%`, units, `x=`, short fractions.

    Works on the text alone; two answers that normalise to the same text are equal. `5\text{ cm}` loses its
    unit, `\text{Evelyn}` keeps its text.
    """
    text = answer.replace("\\$", "").replace("$", "").replace("\\%", "").replace("%", "")
    text = _DEGREES.sub("", _SIZES.sub("", text)).strip().rstrip(".")
    text = _UNIT.sub("", text.strip())
    text = _SPACES.sub("", text)
    text = _LEFT_SIDE.sub("", text)
    text = _FRACTION.sub(r"\\frac", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _SHORT_FRACTION.sub(_braced, text)
    text = _SLASH.sub(r"\1\\frac{\2}{\3}", text)
    text = _BARE_POINT.sub("0.", text)
    return text.replace(",", "") if _THOUSANDS.match(text) else text


def same_answer(answer: str, truth: str) -> bool:
    """Equal as normalised text, or by math-verify. Raises VerifyFailed if that cannot decide."""
    a, b = normalise(answer), normalise(truth)
    if a == b:
        return bool(a)
    if not a or not b:
        return False
    from verl.reward.rules.math_equality import equal

    return equal(answer, truth)


def truth_text(ground_truth: Any) -> str:
    r"""The ground truth as text; the content of its `\boxed{…}` if it has one. ValueError if it is missing."""
    text = "" if ground_truth is None else str(ground_truth).strip()
    if not text:
        raise ValueError("math: the row has no ground truth (reward_model.ground_truth is empty)")
    boxed = last_boxed(text)
    return text if boxed is None else boxed


def compute_score(solution_str: str, ground_truth: Any) -> float:
    r"""1.0 if the last `\boxed{…}` equals the ground truth, else 0. Raises VerifyFailed if undecidable."""
    truth = truth_text(ground_truth)
    boxed = last_boxed(solution_str)
    return float(boxed is not None and same_answer(boxed, truth))


def math_answer(text: str) -> str:
    """The normalised content of the last box; "" without one."""
    return normalise(last_boxed(text) or "")


def numina_answer(text: str) -> str | None:
    """The final answer as text, or None."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    ends = [match.end() for match in _LEAD.finditer(text)]
    if not ends:
        return None
    line = text[ends[-1] :].split("\n", 1)[0]
    inline = _INLINE.search(line)
    answer = inline.group(1) if inline else _SENTENCE_END.split(line, maxsplit=1)[0]
    return answer.strip("* ") or None


def numina_normalised(text: str) -> str:
    """`numina_answer`, normalised; "" without one."""
    return normalise(numina_answer(text) or "")


def numina_score(solution_str: str, ground_truth: Any) -> float:
    """1.0 if equal (with π also read as 3.14), else 0. Raises VerifyFailed if undecidable."""
    truth = truth_text(ground_truth)
    answer = numina_answer(solution_str)
    if answer is None:
        return 0.0
    if same_answer(answer, truth):
        return 1.0
    if _PI.search(truth) and not _PI.search(answer):
        return float(same_answer(answer, _PI.sub("(3.14)", truth)))
    return 0.0


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


def geo3k_score(
    solution_str: str, ground_truth: Any, format_score: float = 0.1, use_boxed: bool = True
) -> dict[str, Any]:
    """score = (1 - format_score)·acc_reward + format_score·format_reward. VerifyFailed if the truth is undecidable."""
    accuracy, well_formed = acc_reward(solution_str, ground_truth, use_boxed), format_reward(solution_str)
    score = (1.0 - format_score) * accuracy + format_score * well_formed
    return {"score": score, "acc": accuracy, "format": well_formed}


def unmatched(ground_truth: Any) -> str:
    """Why no response can match this ground truth; "" where one may, which math-verify is not asked for."""
    if isinstance(ground_truth, Mapping):
        return "text, a number or a list is needed"
    empty = not normalise(truth_text(ground_truth))
    return "nothing of it is compared" if empty else ""
