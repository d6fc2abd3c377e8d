"""Metric names: their order, second spellings, values as plain numbers, and how several values of a step merge.

The order is that of the sections of the metrics page: training, scores, lengths, time, sampler against trainer,
validation, second spellings; unlisted names come last, in the order of the record.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

Number = int | float

# Section → its names in order; "*" stands for every other name that starts like this.
_SECTIONS = (
    ("training/", "global_step epoch"),
    ("actor/", "pg_loss kl_loss kl_coef entropy entropy_loss loss pg_clipfrac pg_clipfrac_lower ppo_kl"),
    ("actor/", "grad_norm lr kl_clipped_ratio reward_kl_penalty reward_kl_penalty_coeff *"),
    ("training/", "skipped_updates skipped_rows refused_steps dropped_groups rollout_failure/*"),
    ("training/", "filter_groups/* pf_ppo/*"),
    ("distillation/", "*"),
    ("critic/", "score/* rewards/* advantages/* returns/* values/* *"),
    ("", "reward/* reward_extra/* response_length/* response_length_non_aborted/* response/*"),
    ("", "prompt_length/* num_turns/* training/num_turns/* tool_call_counts/* agent/* global_seqlen/*"),
    ("timing_s/", "step gen reward old_log_prob ref teacher values adv update_critic update_actor"),
    ("timing_s/", "update_weights * agent_loop/*"),
    ("", "timing_per_token_ms/* perf/*"),
    ("training/", "rollout_probs_diff_* rollout_actor_probs_pearson_corr rollout_logprob_abs_diff/*"),
    ("", "training/weight_version"),
    ("", "training/off_policy/* rollout_corr/* variance_proxy/* val-core/* val-aux/*"),
    ("timing_s/", "reshard generate_sequences generate_sequence"),
    ("", "actor/reward_mean actor/kl_divergence critic/value_loss val/*"),
)
_ORDER = [section + name.rstrip("*") for section, names in _SECTIONS for name in names.split()]
_PLACES = {name: at for at, name in enumerate(_ORDER)}

_ALIASES = {
    "actor/reward_mean": ("critic/rewards/mean",),
    "actor/kl_divergence": ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"),
    "critic/value_loss": ("critic/vf_loss",),
}
NOT_ON_CONSOLE = frozenset((*_ALIASES, "val/accuracy", "val/multimodal_score"))
"""Second spellings that only metrics.jsonl and the trackers get."""
_WORDS = re.compile(r"[^a-z0-9]+")


def rank(name: str) -> int:
    """Place of a name in the order, by the longest entry that matches it; unlisted names share the last place."""
    starts = [name[: at + 1] for at, character in enumerate(name) if character in "/_"]
    return next((_PLACES[entry] for entry in (name, *reversed(starts)) if entry in _PLACES), len(_ORDER))


def in_order(metrics: Mapping[str, Number]) -> dict[str, Number]:
    """The same metrics in the order they are shown in; equals keep the order they came in."""
    return dict(sorted(metrics.items(), key=lambda item: rank(item[0])))


def with_aliases(metrics: Mapping[str, Number]) -> dict[str, Number]:
    """Metrics and the second spellings that depend on other metrics."""
    out = dict(metrics)
    for alias, sources in _ALIASES.items():
        values = [metrics[name] for name in sources if name in metrics]
        if values:
            out.setdefault(alias, values[0])
    return out


def plain(value: Any) -> Number | None:
    """A Python int or float from any scalar (numpy, tensor, bool); None for what is not a number."""
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    try:
        return plain(value.item())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None


def plain_metrics(metrics: Mapping[str, Any]) -> tuple[dict[str, Number], list[str]]:
    """All metrics as plain numbers, and the names of those that are no numbers."""
    numbers = {name: plain(value) for name, value in metrics.items()}
    bad = [name for name, value in numbers.items() if value is None]
    return {name: value for name, value in numbers.items() if value is not None}, bad


def finite(metrics: Mapping[str, Number]) -> dict[str, Number]:
    """Without NaN and infinities: what trackers get."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def spread(
    name: str, values: Iterable[float], which: Iterable[str] = ("mean", "max", "min")
) -> dict[str, Number]:
    """`{name}/{mean,max,min}` of values; NaN where there are none."""
    import numpy as np

    # A list of an array's tokens would be a Python object for each.
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64)
    if not len(array):
        return {f"{name}/{kind}": math.nan for kind in which}
    kinds = {"mean": array.mean(), "max": array.max(), "min": array.min()}
    return {f"{name}/{kind}": float(kinds[kind]) for kind in which}


def rule(name: str) -> str:
    """ "max", "min" or "mean": what a name asks for.

    A word of the name has to be max or min: `timing_s/…` and `termination` contain the letters of "min" and
    are means all the same.
    """
    words = _WORDS.split(name.lower())
    if "max" in words or "maximum" in words:
        return "max"
    return "min" if "min" in words or "minimum" in words else "mean"


def merge_metrics(parts: Iterable[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Merge (metrics, weight) pairs: maxima, minima, and means weighted by `weight`, in order of appearance.

    A NaN is a quantity with nothing to average over: it is left out, and the result is NaN only where every
    value was. Weights must be ≥ 0; values of weight 0 do not count in a mean.
    """
    values: dict[str, list[tuple[float, float]]] = {}
    for metrics, weight in parts:
        if weight < 0:
            raise ValueError(f"weight {weight} of a mini-batch is negative")
        for name, value in metrics.items():
            values.setdefault(name, []).append((value, weight))
    return {name: _merge(rule(name), pairs) for name, pairs in values.items()}


def _merge(kind: str, pairs: list[tuple[float, float]]) -> float:
    numbers = [(value, weight) for value, weight in pairs if not math.isnan(value)]
    if not numbers:
        return math.nan
    if kind != "mean":
        return (max if kind == "max" else min)(value for value, _ in numbers)
    total = math.fsum(weight for _, weight in numbers)
    if total == 0:
        return math.nan
    if any(math.isinf(value) for value, _ in numbers):
        return sum(value * weight for value, weight in numbers if weight) / total
    return math.fsum(value * weight for value, weight in numbers) / total
