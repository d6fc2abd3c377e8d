"""Ground truths that no response can match: the reward of such a row says nothing of the responses, so the row is bad."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from verl.data.rows import BadRow
from verl.reward.rules import code, gsm8k, math, math_dapo, rule_or_none, search_qa, visual_qa, vqa


def check_truth(data_source: str, ground_truth: Any, *, any_source: bool = False) -> None:
    """Raises BadRow where the built-in rule of the source can give no response its full score, or where there is no rule
    (`any_source`: that is reported elsewhere).

    Only what is certain: a formula is compared as text here, never by math-verify.
    """
    rule = rule_or_none(data_source)
    if rule is None and any_source:
        return
    if rule is None:
        detail = f"no built-in reward function for {data_source!r:.80}; set custom_reward_function.path"
        raise BadRow("data_source without a function", detail)
    try:
        reason = _REASONS[rule](ground_truth)
    except Exception as error:  # the rule would raise it of every response
        reason = str(error)
    if reason:
        detail = f"reward_model.ground_truth is {ground_truth!r:.60}: {reason}"
        raise BadRow("ground truth without a match", detail)


def _number(truth: Any) -> str:
    text = gsm8k.clean_number(str(truth))
    answer = gsm8k.extract(f"#### {_written_out(text)}")
    return "" if answer and gsm8k.same_number(answer, text) else "a number is needed"


def _written_out(number: str) -> str:
    """A decimal number in digits alone, as responses write it; other text as it is."""
    try:
        value = Decimal(number)
    except InvalidOperation:
        return number
    short = value.is_finite() and abs(value.adjusted()) < gsm8k.TAIL
    return format(value, "f") if short else number


def _formula(truth: Any) -> str:
    return _not_text(truth) or ("" if math.normalise(math.truth_text(truth)) else "nothing of it is compared")


def _last_line(truth: Any) -> str:
    text = str(truth)
    written = (text, " ".join(text.split()), math_dapo.normalise(text))
    right = any(math_dapo.compute_score(f"Answer: {answer}", text)["acc"] for answer in written)
    return _not_text(truth) or ("" if right else "no answer reads so")


def _not_text(truth: Any) -> str:
    return (
        "text or a number is needed"
        if isinstance(truth, Mapping | Sequence) and not isinstance(truth, str)
        else ""
    )


def _any_text(read: Callable[[Any], Sequence[str]]) -> Callable[[Any], str]:
    return lambda truth: "" if any(text.strip() for text in read(truth)) else "every accepted answer is empty"


def _tests(truth: Any) -> str:
    code.cases_of(truth)
    return ""


_REASONS: dict[str, Callable[[Any], str]] = {
    "gsm8k": _number,
    "math": _formula,
    "numina": _formula,
    "geo3k": _formula,
    "math_dapo": _last_line,
    "search_qa": _any_text(search_qa.targets),
    "vqa": _any_text(vqa.accepted),
    "visual_qa": _any_text(lambda truth: visual_qa.truths(truth)[0]),
    "code": _tests,
}
