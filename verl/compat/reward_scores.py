r"""Helpers that users' rewards import from the public `math_reward` (`math`, `math_batch`), `math_verify`, `prime_math`,
`geo3k`, `prime_code` and `sandbox_fusion`.

Names, arguments and results are those of the public system; `verl.reward.rules.math_equality` decides equality in meaning.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.reward.rules import boxed, code
from verl.reward.rules.boxed import acc_reward as acc_reward
from verl.reward.rules.boxed import compute_score, last_boxed, same_answer
from verl.reward.rules.boxed import format_reward as format_reward
from verl.reward.rules.boxed import last_boxed_only_string as last_boxed_only_string
from verl.reward.rules.boxed import remove_boxed as remove_boxed
from verl.reward.rules.gsm8k import clean_number

_SHORT_ROOT = re.compile(r"\\sqrt([^{])")
_INTEGER = r"(-?(?:0|[1-9][0-9]*))"
_FRACTION = re.compile(f"{_INTEGER}/{_INTEGER}")
# What `strip_string` replaces before it looks for a unit, and after.
_SPELLINGS = {
    "\n": "",
    "\\!": "",
    "\\\\": "\\",
    "tfrac": "frac",
    "dfrac": "frac",
    "\\left": "",
    "\\right": "",
}
_SPELLINGS |= {"^{\\circ}": "", "^\\circ": "", "\\$": ""}
_NUMBERS = {"\\%": "", "%": "", " .": " 0.", "{.": "{0."}
_LEADS = ("answer:", "answer is", "answers are")
_TRAILS = ("is answer", "is the answer", "are answers", "are the answers")
_LINKS = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")


# ------------------------------------------------------------------------------------------------- math_reward


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """True if both are None, or equal after `strip_string`. `verbose` prints what is compared."""
    if str1 is None or str2 is None:
        return str1 is str2
    first, second = strip_string(str1), strip_string(str2)
    if verbose:
        print(first, second)
    return first == second


def strip_string(string: str) -> str:
    r"""An answer in one spelling: without blanks, units, degrees, `k=`; `\frac{a}{b}` for `\frac ab`, `a/b` and 0.5."""
    for spelling, plain in _SPELLINGS.items():
        string = string.replace(spelling, plain)
    string = remove_right_units(string)
    for spelling, plain in _NUMBERS.items():
        string = string.replace(spelling, plain)
    string = f"0{string}" if string.startswith(".") else string
    name, _, right = string.partition("=")
    if right and "=" not in right and len(name) <= 2:
        string = right
    string = fix_fracs(fix_sqrt(string).replace(" ", ""))
    return fix_a_slash_b("\\frac{1}{2}" if string == "0.5" else string)


def fix_fracs(string: str) -> str:
    r"""`\frac12` and `\frac1{2}` as `\frac{1}{2}`; the text as it is where a `\frac` has no two operands."""
    head, *parts = string.split("\\frac")
    if any(len(part) < 2 and part != "{" for part in parts):
        return string
    return head + "".join(f"\\frac{_operands(part)}" for part in parts)


def _operands(text: str) -> str:
    if text.startswith("{"):
        return text
    second = text[1:] if text[1] == "{" else f"{{{text[1]}}}{text[2:]}"
    return f"{{{text[0]}}}{second}"


def fix_a_slash_b(string: str) -> str:
    r"""`a/b` of two integers as `\frac{a}{b}`; anything else as it is."""
    match = _FRACTION.fullmatch(string)
    return f"\\frac{{{match[1]}}}{{{match[2]}}}" if match else string


def remove_right_units(string: str) -> str:
    r"""The text before `\text{ `, which begins a unit."""
    return string.partition("\\text{ ")[0]


def fix_sqrt(string: str) -> str:
    r"""`\sqrt3` as `\sqrt{3}`."""
    return _SHORT_ROOT.sub(r"\\sqrt{\1}", string)


def compute_score_batched(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
) -> list[float]:
    """`compute_score` of each response."""
    return [compute_score(*pair) for pair in zip(solution_strs, ground_truths, strict=True)]


# ------------------------------------------------------------------------------------------ math_verify, prime_math


def verified_score(model_output: str, ground_truth: str, timeout_score: float = 0) -> float:
    """1.0 if the final answer that math-verify reads in a whole response equals the ground truth, `timeout_score` if it
    cannot decide because of the response, else 0. VerifyFailed if it cannot because of the ground truth."""
    from verl.reward.rules.math_equality import decide

    equal = decide(model_output, ground_truth, whole=True)
    return float(timeout_score if equal is None else equal)


def match_answer(response: str) -> tuple[bool, str]:
    """(whether an answer has a digit, its text): what follows "answer is" and its kin, the last box, the last "="."""
    matched = False

    def cut(marks: Sequence[str], before: bool = False) -> None:
        nonlocal response, matched
        for mark in marks:
            at = response.lower().rfind(mark)
            if at >= 0:
                matched = True
                response = (response[:at] if before else response[at + len(mark) :]).strip()

    cut(_LEADS)
    cut(_TRAILS, before=True)
    if boxed := (last_boxed(response) or "").strip():
        matched, response = True, boxed
    if ". " in response:
        response = response.rpartition(". ")[0].strip()
    cut(_LINKS)
    return matched and any(char.isdigit() for char in response), response


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """True if the two mean the same."""
    return given_answer is not None and same_answer(given_answer, ground_truth)


def math_equal(
    prediction: Any,
    reference: Any,
    include_percentage: bool = True,
    tolerance: float = 1e-4,
    timeout: float = 10.0,
    pi: float = math.pi,
) -> bool:
    """True if two numbers are equal within a relative `tolerance` (`include_percentage`: or one is the other's
    percentage), or two texts mean the same, π being `pi`."""
    texts = [str(text).replace("\\pi", f"({pi})") if pi != math.pi else str(text) for text in (prediction, reference)]
    try:
        number, truth = (float(clean_number(text)) for text in texts)
    except ValueError:
        return same_answer(*texts)
    scales = (0.01, 1, 100) if include_percentage else (1,)
    return any(math.isclose(number, truth * scale, rel_tol=tolerance) for scale in scales)


def prime_math_score(model_output: str, ground_truth: str) -> tuple[bool, bool, str]:
    """(whether the answer is right, whether the response has the format or is right, the answer's text)."""
    output, truth = str(model_output), str(ground_truth)
    _, answer = match_answer(output)
    if grade_answer(answer, truth):
        return True, True, answer
    values = (math.pi, 3.14) if "\\pi" in answer + truth else (math.pi,)
    right = any(math_equal(answer, truth, pi=pi) for pi in values)
    return right, "Step 2:" in output and "\\box" in output, answer


# ------------------------------------------------------------------------------- geo3k, prime_code, sandbox_fusion


def geo3k_score(predict_str: str, ground_truth: Any, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """`score` of `compute_score`: the public `geo3k.compute_score`."""
    return float(boxed.geo3k_score(predict_str, ground_truth, format_score, use_boxed)["score"])


def prime_code_score(completion: str, test_cases: Any, continuous: bool = False) -> tuple[float, list[dict[str, Any]]]:
    """The public `prime_code.compute_score`: (passed cases over cases run if `continuous`, else whether all pass;
    a dict a case). A completion without a fenced block is the program."""
    passed = code.results(_fenced(completion), test_cases)
    score = sum(passed) / len(passed) if continuous else all(passed)
    return score, [{"passed": right} for right in passed]


def sandbox_score(
    sandbox_fusion_url: str,
    concurrent_semaphore: Any,
    memory_limit_mb: int,
    completion: str,
    test_cases: Any,
    continuous: bool = False,
    timeout: float = code.SECONDS,
) -> tuple[float, list[dict[str, Any]]]:
    """The public `sandbox_fusion.compute_score`: (passed cases over cases run, a dict a case), each case within
    `timeout` seconds. A completion without a fenced block is the program; `continuous` has no effect."""
    where = (sandbox_fusion_url, concurrent_semaphore, memory_limit_mb)
    passed = code.results(_fenced(completion), test_cases, *where, seconds=timeout)
    return sum(passed) / len(passed), [{"passed": right} for right in passed]


def _fenced(completion: str) -> str:
    return completion if "```" in completion else f"```python\n{completion}\n```"
