r"""Mathematical equality by math-verify, used so that it cannot silently say "no".

math-verify's own limits are alarms, which work only in a main thread, and by default it turns time-outs and
errors into "not equal". Here its limits are off and its errors are raised; time is limited from outside (see
`verl.reward.worker`), in the scoring process itself or, when called anywhere else, in one helper process that serves
this process. A wrong installation (no LaTeX parser) is found by a self-test instead of scoring 0 for ever.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
from typing import TYPE_CHECKING, Any

from verl.reward import worker
from verl.reward.outcome import VerifyFailed

if TYPE_CHECKING:
    from verl.reward.pool import ScoringPool

LIMIT = 10.0
"""Seconds for one comparison; over it the answer is failed."""
MAX_DEPTH = 40
ROOM = 400
"""An answer longer than ROOM characters plus four times the ground truth is a different answer: it is not
parsed (loops inside a box are common, and parsing them takes minutes)."""

_BLANKS = re.compile(r"\s+")
_helper: tuple[int, ScoringPool] | None = None
_helper_lock = threading.Lock()


def equal(answer: str, truth: str, limit: float = LIMIT) -> bool:
    """True if the two LaTeX texts mean the same. VerifyFailed if that was not decided within `limit` seconds."""
    if len(answer) > ROOM + 4 * len(truth) or _depth(answer) > max(MAX_DEPTH, _depth(truth)):
        return False
    if not worker.in_worker():
        return _in_helper(answer, truth, limit)
    with worker.apart():
        _prepare()
    with worker.section(limit, "math-verify"):
        return _compare(answer, truth)


def compare_task(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """`equal` in the form of a reward function: what the helper process runs."""
    limit = (extra_info or {}).get("limit", LIMIT)
    return float(equal(solution_str, ground_truth, limit))


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


@functools.cache
def _prepare() -> None:
    """Import math-verify and check that it can parse at all, outside of any limit."""
    import math_verify.grader
    import math_verify.parser

    # It warns once that its own limits are off; ours are on.
    math_verify.parser.TIMEOUT_WARNING_SHOWN = True
    math_verify.grader.TIMEOUT_WARNING_SHOWN = True
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if not (_compare(r"\frac{1}{2}", "0.5") and not _compare("1", "2")):
        raise VerifyFailed(
            "math-verify does not work in this environment: it finds 1/2 and 0.5 different. Its LaTeX parser needs "
            "a matching antlr4 runtime: pip install 'math-verify[antlr4-9-3]'"
        )


def _parse(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    inner = _BLANKS.sub(" ", text.replace("\\$", "").replace("$", "")).strip()
    return parse(
        f"${inner}$",
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
        raise_on_error=True,
    )


def _compare(answer: str, truth: str) -> bool:
    from math_verify import verify

    try:
        gold, target = _parse(truth), _parse(answer)
        return bool(gold and target) and bool(verify(gold, target, timeout_seconds=None, raise_on_error=True))
    except Exception as error:
        raise VerifyFailed(
            f"math-verify failed on answer {answer[:80]!r} and ground truth {truth[:80]!r}: {type(error).__name__}: {error}"
        ) from error


def _in_helper(answer: str, truth: str, limit: float) -> bool:
    """Compare in this process's helper, started at the first need. A fork gets a helper of its own."""
    global _helper
    from verl.reward.pool import Call, FunctionSpec, ScoringPool

    with _helper_lock:
        if _helper is None or _helper[0] != os.getpid():
            spec = FunctionSpec(path="pkg://verl.reward.rules.verify", name="compare_task")
            _helper = (os.getpid(), ScoringPool(spec, workers=1))
        pool = _helper[1]
    row = {"data_source": "", "solution_str": answer, "ground_truth": truth, "extra_info": {"limit": limit}}
    (outcome,) = pool.submit(Call(row), timeout=limit + 60).result()
    if outcome.error is not None:
        raise VerifyFailed(outcome.error)
    return outcome.score == 1.0
