"""Built-in rules by data_source, as one table and as the function `default_compute_score`."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from verl.reward.outcome import INVALID, RewardLoadError, UnknownSource

_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
_SEARCH = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
_VQA = ("vqa*", "lmms-lab/VQAv2", "lmms-lab/textvqa", "lmms-lab/OK-VQA", "lmms-lab/VizWiz-VQA")
_VISUAL = ("visual_qa*", "AI4Math/MathVerse", "AI4Math/MathVista", "mathverse*", "lmms-lab/GQA")

_TABLE: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "math_dapo",
    "math": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    **{f"numina_{name}": "numina" for name in _NUMINA},
    "hiyouga/geometry3k": "geo3k",
    **{f"searchR1_{name}": "search_qa" for name in _SEARCH},
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code"),
    "aime*": "math_dapo",
    **dict.fromkeys(_VQA, "vqa"),
    **dict.fromkeys(_VISUAL, "visual_qa"),
}


class _Rule(NamedTuple):
    """Where a rule is: the module here, its functions for the score and for `check_truth`, and the one that reads the
    answer that the rule compares, for majority votes."""

    module: str
    score: str = "compute_score"
    unmatched: str = "unmatched"
    answer: str = ""


_RULES = {
    "gsm8k": _Rule("gsm8k", answer="extract"),
    "math": _Rule("boxed", answer="math_answer"),
    "numina": _Rule("boxed", "numina_score", answer="numina_normalised"),
    "geo3k": _Rule("boxed", "geo3k_score", answer="math_answer"),
    "math_dapo": _Rule("math_dapo"),
    "search_qa": _Rule("search_qa", answer="final_answer"),
    "code": _Rule("code"),
    "vqa": _Rule("visual_qa", "vqa_score", "vqa_unmatched"),
    "visual_qa": _Rule("visual_qa"),
}
_SANDBOX = ("sandbox_fusion_url", "concurrent_semaphore", "memory_limit_mb", "max_concurrent")


def known_sources() -> list[str]:
    """Every data_source with a built-in rule; a name that ends in `*` is a prefix."""
    return list(_TABLE)


def rule_or_none(data_source: str) -> str | None:
    """Name of the rule (`gsm8k`, `math`, …), None if the source has no rule."""
    source = str(data_source)
    if source in _TABLE:
        return _TABLE[source]
    prefixed = (rule for name, rule in _TABLE.items() if name.endswith("*") and source.startswith(name[:-1]))
    return next(prefixed, None)


def rule_for(data_source: str) -> str:
    """As `rule_or_none`. UnknownSource lists what is known."""
    if rule := rule_or_none(data_source):
        return rule
    raise UnknownSource(_no_rule(data_source))


def unsupported(sources: Iterable[str]) -> dict[str, str]:
    """The sources no built-in rule serves, each with the message to show."""
    return {source: _no_rule(source) for source in sources if rule_or_none(source) is None}


def _no_rule(data_source: str) -> str:
    return (
        f"data_source {str(data_source)!r:.80} has no built-in reward. Set custom_reward_function.path=your_file.py, "
        f"or use one of: {', '.join(known_sources())}"
    )


def check_truth(data_source: str, ground_truth: Any, *, any_source: bool = False) -> None:
    """Raises BadRow where the built-in rule of the source can certainly give no response its full score, or where there
    is no rule (not with `any_source`: that is reported elsewhere)."""
    from verl.data.rows import BadRow

    rule = rule_or_none(data_source)
    if rule is None:
        if any_source:
            return
        detail = f"no built-in reward function for {data_source!r:.80}; set custom_reward_function.path"
        raise BadRow("data_source without a function", detail)
    try:
        reason = _function(rule, "unmatched")(ground_truth)
    except Exception as error:  # the rule would raise it of every response
        reason = str(error)
    if reason:
        detail = f"reward_model.ground_truth is {ground_truth!r:.60}: {reason}"
        raise BadRow("ground truth without a match", detail)


def has_answers(data_source: str) -> bool:
    """True if the built-in rule of this source compares one answer. UnknownSource for a source without a rule."""
    return bool(_RULES[rule_for(data_source)].answer)


def final_answer(data_source: str, text: str, options: Mapping[str, Any]) -> str | None:
    """The answer that the built-in rule reads, under `options` of the rule; None if there is none in the text."""
    rule = rule_for(data_source)
    chosen = {name: options[name] for name in _options(rule, "answer") if name in options}
    return _function(rule, "answer")(text, **chosen) or None


def predicted(score_parts: Mapping[str, Any]) -> str | None:
    """`pred` of what a reward function returned, None if there is none or it says that there was no answer."""
    answer = score_parts.get("pred")
    return None if answer is None or str(answer) in ("", INVALID) else str(answer)


def _function(rule: str, role: str = "score") -> Callable[..., Any]:
    """The function of a rule for a role: a field of `_Rule`."""
    module = importlib.import_module(f"verl.reward.rules.{_RULES[rule].module}")
    function: Callable[..., Any] = getattr(module, getattr(_RULES[rule], role))
    return function


@functools.cache
def _options(rule: str, role: str = "score") -> list[str]:
    """Keywords that the function of a role takes besides the response and the truth."""
    names = inspect.signature(_function(rule, role)).parameters
    return [name for name in names if name not in ("solution_str", "ground_truth", "text")]


def check_kwargs(kwargs: Iterable[str]) -> None:
    """RewardLoadError if no built-in rule takes one of these `custom_reward_function.reward_kwargs`."""
    options = [name for name in kwargs if name not in _SANDBOX]
    if not options:
        return
    valid = dict.fromkeys(option for rule in _RULES for option in _options(rule))
    for name in options:
        if name not in valid:
            raise RewardLoadError(
                f"custom_reward_function.reward_kwargs.{name}: no built-in reward takes it (they take: "
                f"{', '.join(valid)}); for a function of your own set custom_reward_function.path"
            )


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """Score a response by the rule of its data_source: a number, or a dict with `score`.

    `kwargs` reach the rule if it names them (`method`, `format_score`, `score`). The sandbox arguments are for code
    sources (see `verl.reward.rules.code`). Raises UnknownSource, ValueError where the row has no ground truth,
    VerifyFailed where equality could not be decided, SandboxFailed or ServiceFailed where code could not be run. Safe
    to call from several threads.
    """
    rule = rule_for(data_source)
    sandbox = (sandbox_fusion_url, concurrent_semaphore, memory_limit_mb)
    options = {**kwargs, **dict(zip(_SANDBOX, sandbox, strict=False))}
    chosen = {name: options[name] for name in _options(rule) if name in options}
    return _function(rule)(solution_str=solution_str, ground_truth=ground_truth, **chosen)
