"""Metric names: the order they are shown in, second spellings, and values made plain.

The order is that of the sections of the metrics page: training, scores, lengths, time, sampler against trainer,
validation, second spellings; names nobody listed come last, in the order they were given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

Number = int | float

# A trailing "/" or "_" makes an entry stand for every name that starts with it.
_ORDER = (
    "training/global_step",
    "training/epoch",
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/kl_coef",
    "actor/entropy",
    "actor/entropy_loss",
    "actor/loss",
    "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower",
    "actor/ppo_kl",
    "actor/grad_norm",
    "actor/lr",
    "actor/kl_clipped_ratio",
    "actor/reward_kl_penalty",
    "actor/reward_kl_penalty_coeff",
    "actor/",
    "training/skipped_updates",
    "training/refused_steps",
    "training/dropped_groups",
    "training/rollout_failure/",
    "training/filter_groups/",
    "training/pf_ppo/",
    "critic/score/",
    "critic/rewards/",
    "critic/advantages/",
    "critic/returns/",
    "critic/values/",
    "critic/",
    "reward/",
    "reward_extra/",
    "response_length/",
    "response_length_non_aborted/",
    "response/",
    "prompt_length/",
    "num_turns/",
    "training/num_turns/",
    "tool_call_counts/",
    "global_seqlen/",
    "timing_s/step",
    "timing_s/gen",
    "timing_s/reward",
    "timing_s/old_log_prob",
    "timing_s/ref",
    "timing_s/values",
    "timing_s/adv",
    "timing_s/update_critic",
    "timing_s/update_actor",
    "timing_s/update_weights",
    "timing_s/",
    "timing_s/agent_loop/",
    "timing_per_token_ms/",
    "perf/",
    "training/rollout_probs_diff_",
    "training/rollout_actor_probs_pearson_corr",
    "training/rollout_logprob_abs_diff/",
    "training/weight_version",
    "training/off_policy/",
    "rollout_corr/",
    "variance_proxy/",
    "val-core/",
    "val-aux/",
    "timing_s/reshard",
    "timing_s/generate_sequences",
    "timing_s/generate_sequence",
    "actor/reward_mean",
    "actor/kl_divergence",
    "critic/value_loss",
    "val/",
)
_EXACT = {name: at for at, name in enumerate(_ORDER) if name[-1] not in "/_"}
_PREFIXES = sorted(
    ((name, at) for at, name in enumerate(_ORDER) if name[-1] in "/_"), key=lambda item: -len(item[0])
)

_ALIASES = {
    "actor/reward_mean": ("critic/rewards/mean",),
    "actor/kl_divergence": ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"),
    "critic/value_loss": ("critic/vf_loss",),
}
NOT_ON_CONSOLE = frozenset((*_ALIASES, "val/accuracy", "val/multimodal_score"))
"""Second spellings that only metrics.jsonl and the trackers get."""


def rank(name: str) -> int:
    """Place of a name in the order; names nobody listed share the last place."""
    exact = _EXACT.get(name)
    if exact is not None:
        return exact
    return next((at for prefix, at in _PREFIXES if name.startswith(prefix)), len(_ORDER))


def in_order(metrics: Mapping[str, Number]) -> dict[str, Number]:
    """The same metrics in the order they are shown in; equals keep the order they came in."""
    return dict(sorted(metrics.items(), key=lambda item: rank(item[0])))


def with_aliases(metrics: Mapping[str, Number]) -> dict[str, Number]:
    """Metrics and the second spellings that depend on other metrics (metrics.md §8, "jsonl, trackers")."""
    out = dict(metrics)
    for alias, sources in _ALIASES.items():
        found = [metrics[name] for name in sources if name in metrics]
        if found:
            out.setdefault(alias, found[0])
    return out


def plain(value: Any) -> Number | None:
    """A Python int or float from any scalar (numpy, tensor, bool); None for what is not a number."""
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if (hasattr(value, "item") and getattr(value, "size", 1) == 1) or hasattr(value, "numel"):
        try:
            return plain(value.item())
        except (TypeError, ValueError, RuntimeError):
            return None
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
    found = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64)
    if not len(found):
        return {f"{name}/{kind}": math.nan for kind in which}
    kinds = {"mean": found.mean(), "max": found.max(), "min": found.min()}
    return {f"{name}/{kind}": float(kinds[kind]) for kind in which}
