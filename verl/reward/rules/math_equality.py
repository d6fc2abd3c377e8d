r"""Mathematical equality by math-verify, used so that it cannot silently say "no".

math-verify's own limits are alarms, which work only in a main thread, and by default it turns time-outs and errors into
"not equal". Here it runs in one helper process of this process (`verl.reward.rules.math_verify_process`), which is killed at
the limit. What it cannot decide because of the answer is a wrong answer, counted by
`verl.reward.scoring_process.count_undecided`; what it cannot decide because of the ground truth is VerifyFailed.
"""

from __future__ import annotations

import functools
import math
import os
import re
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from verl.reward import scoring_process
from verl.reward.outcome import VerifyFailed

if TYPE_CHECKING:
    from verl.reward.pool import ScoringPool

LIMIT = 10.0
"""Seconds for one comparison."""
MAX_DEPTH = 40
ROOM = 400
"""An answer longer than ROOM characters plus four times the ground truth is a different answer: it is not
parsed (loops inside a box are common, and parsing them takes minutes)."""
MAX_EXPONENT, MAX_FACTORIAL = 1e6, 1e5
"""Powers and factorials of larger numbers take more than a second to compute."""

_NUMBER = r"[-+]?\s*[0-9]+(?:[\s|]*!)*"
_POWERS = re.compile(rf"{_NUMBER}(?:\s*\^\s*{_NUMBER})*")
_BRACKETS = str.maketrans("{([})]", "   |||")
_helper: tuple[int, ScoringPool] | None = None
_helper_lock = threading.Lock()


def equal(answer: str, truth: str, limit: float = LIMIT) -> bool:
    """True if the two LaTeX texts mean the same. VerifyFailed if that cannot be decided because of the truth."""
    return bool(decide(answer, truth, limit))


def decide(answer: str, truth: str, limit: float = LIMIT, *, whole: bool = False) -> bool | None:
    """`equal`, None where that was not decided within `limit` seconds because of the answer, which is counted.

    `whole`: `answer` is a response, in which math-verify looks for the final answer.
    """
    if not whole and (len(answer) > ROOM + 4 * len(truth) or _depth(answer) > max(MAX_DEPTH, _depth(truth))):
        return False
    if whole or not is_huge(answer) or is_huge(truth):
        try:
            return _ask(answer, truth, limit, whole)
        except VerifyFailed:
            if not _is_comparable(truth, limit):
                raise
    scoring_process.count_undecided()
    return None


def is_huge(text: str) -> bool:
    """True if the text holds a power or factorial of numbers too large to compute: a tower of powers, `999999!`."""
    flat = text.replace("\\left", "").replace("\\right", "").translate(_BRACKETS)
    return any(_overflows(match[0].split("^")) for match in _POWERS.finditer(flat))


def _overflows(operands: list[str]) -> bool:
    """a^b^c is computed from its right end; factorials come before powers."""
    value = 1.0
    for operand in reversed(operands):
        number = float(operand.strip("-+ |!\t\n"))
        for _ in range(operand.count("!")):
            if number > MAX_FACTORIAL:
                return True
            number = math.exp(min(700.0, math.lgamma(number + 1)))
        if value > MAX_EXPONENT and number > 1:
            return True
        value = number**value if value * math.log10(max(1.0, number)) < 300 else math.inf
    return False


@functools.lru_cache(maxsize=1024)
def _is_comparable(truth: str, limit: float) -> bool:
    """True if the ground truth can be compared with a plain number."""
    with suppress(VerifyFailed):
        _ask("31337", truth, limit, False)
        return True
    return False


def _depth(text: str) -> int:
    """Deepest nesting of brackets of any kind."""
    deepest = depth = 0
    for char in text:
        if char in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "})]":
            depth = max(0, depth - 1)
    return deepest


def _ask(answer: str, truth: str, limit: float, whole: bool) -> bool:
    """Compare in this process's helper, started at the first need. A fork gets a helper of its own."""
    global _helper
    from verl.reward.pool import Call, FunctionSpec, ScoringPool

    row: dict[str, Any] = {
        "data_source": "response" if whole else "",
        "solution_str": answer,
        "ground_truth": truth,
        "extra_info": {},
    }
    with _helper_lock, scoring_process.apart():
        if _helper is None or _helper[0] != os.getpid():
            spec = FunctionSpec(path="pkg://verl.reward.rules.math_verify_process")
            _helper = (os.getpid(), ScoringPool(spec, workers=1))
            _helper[1].submit(Call(dict.fromkeys(row, "1")), timeout=60).result()
    for _ in range(2):  # something else may have killed the helper
        (outcome,) = _helper[1].submit(Call(row), timeout=limit).result()
        if outcome.kind != "crash":
            break
    if outcome.error is not None:
        texts = f"answer {answer[-80:]!r} and ground truth {truth[:80]!r}"
        raise VerifyFailed(f"math-verify failed on {texts}: {outcome.error}")
    return outcome.score == 1.0
