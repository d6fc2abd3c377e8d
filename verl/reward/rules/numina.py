r"""NuminaMath: the last `\boxed{…}`, else what follows the last "answer is" or "answer:", by math-verify."""

from __future__ import annotations

import re
from typing import Any

from verl.data.boxed import last_boxed
from verl.reward.rules.math import same_answer, truth_text
from verl.reward.rules.math import unmatched as unmatched

_LEAD = re.compile(r"(?i)answer(?:\s+(?:is|are)\b|s?\s*:)\s*:?\s*")
_INLINE = re.compile(r"\$([^$]+)\$")
_SENTENCE_END = re.compile(r"\.(?:\s|$)")
_PI = re.compile(r"\\pi(?![A-Za-z])|π")


def extract(text: str) -> str | None:
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


def compute_score(solution_str: str, ground_truth: Any) -> float:
    """1.0 if equal (with π also read as 3.14), else 0. Raises VerifyFailed if undecidable."""
    truth = truth_text(ground_truth)
    answer = extract(solution_str)
    if answer is None:
        return 0.0
    if same_answer(answer, truth):
        return 1.0
    if _PI.search(truth) and not _PI.search(answer):
        return float(same_answer(answer, _PI.sub("(3.14)", truth)))
    return 0.0
