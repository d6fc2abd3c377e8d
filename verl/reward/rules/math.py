r"""MATH: the last `\boxed{…}` against the ground truth, as normalised text, then by math-verify."""

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
    r"(?<=[^\\{(\[,])\\(?:(?:text|mbox|textrm)\{"
    + _NOON
    + r"(?!and\b|or\b)[^{}]*\}|mathrm\{"
    + _NOON
    + r"[^{}]{2,}\})"
    r"(?:\^\{?-?[0-9]+\}?)?$"
)
_LEFT_SIDE = re.compile(r"^[A-Za-z](?:\([A-Za-z]\))?=(?=[^=])")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac(?:([0-9a-zA-Z])|\{([^{}]*)\})(?:([0-9a-zA-Z])|\{([^{}]*)\})")
_SHORT_ROOT = re.compile(r"\\sqrt([0-9a-zA-Z])")
_SLASH = re.compile(r"^(-?)([0-9]+)/([0-9]+)$")
_BARE_POINT = re.compile(r"(?<![0-9])\.(?=[0-9])")
_THOUSANDS = re.compile(r"^-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?$")


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
    from verl.reward.rules.verify import equal

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


def unmatched(ground_truth: Any) -> str:
    """Why no response can match this ground truth; "" where one may, which math-verify is not asked for."""
    if isinstance(ground_truth, Mapping):
        return "text, a number or a list is needed"
    empty = not normalise(truth_text(ground_truth))
    return "nothing of it is compared" if empty else ""
