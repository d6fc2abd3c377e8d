"""math-verify in a process of its own, which `verl.reward.rules.math_equality` starts, asks and kills at its limit.

Its own limits are off and its errors are raised. A self-test finds a wrong installation (no LaTeX parser), which would
otherwise score 0 for ever.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import math_verify.grader
import math_verify.parser
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from verl.reward.outcome import VerifyFailed

# It warns once that its own limits are off; ours are on.
math_verify.parser.TIMEOUT_WARNING_SHOWN = True
math_verify.grader.TIMEOUT_WARNING_SHOWN = True
logging.getLogger("math_verify").setLevel(logging.ERROR)

_BLANKS = re.compile(r"\s+")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """`compare` in the form of a reward function, `data_source` its `kind`."""
    return float(compare(data_source, solution_str, ground_truth))


def compare(kind: str, answer: str, truth: str) -> bool:
    """True if the two LaTeX texts mean the same; `kind` "response": `answer` is a response that holds a final
    answer."""
    gold, target = _parse(truth), _parse_response(answer) if kind == "response" else _parse(answer)
    return bool(gold and target) and bool(verify(gold, target, timeout_seconds=None, raise_on_error=True))


def _parse(text: str) -> list[Any]:
    inner = _BLANKS.sub(" ", text.replace("\\$", "").replace("$", "")).strip()
    return _parsed(f"${inner}$", LatexExtractionConfig())


def _parse_response(text: str) -> list[Any]:
    return _parsed(text, ExprExtractionConfig(), LatexExtractionConfig())


def _parsed(text: str, *kinds: Any) -> list[Any]:
    return parse(
        text,
        extraction_config=kinds,
        fallback_mode="no_fallback",
        parsing_timeout=None,
        raise_on_error=True,
    )


def self_test() -> None:
    """VerifyFailed if math-verify cannot parse at all."""
    if not (compare("", r"\frac{1}{2}", "0.5") and not compare("", "1", "2")):
        raise VerifyFailed(
            "math-verify does not work in this environment: it finds 1/2 and 0.5 different. Its LaTeX parser needs "
            "a matching antlr4 runtime: pip install 'math-verify[antlr4-9-3]'"
        )


self_test()
