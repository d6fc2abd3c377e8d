"""Where several values of one step meet (mini-batches, epochs, workers): one rule, by name (metrics.md §1)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

_WORDS = re.compile(r"[^a-z0-9]+")


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
    return {name: _merge(rule(name), found) for name, found in values.items()}


def _merge(how: str, found: list[tuple[float, float]]) -> float:
    known = [(value, weight) for value, weight in found if not math.isnan(value)]
    if not known:
        return math.nan
    if how != "mean":
        return (max if how == "max" else min)(value for value, _ in known)
    total = math.fsum(weight for _, weight in known)
    if total == 0:
        return math.nan
    if any(math.isinf(value) for value, _ in known):
        return sum(value * weight for value, weight in known if weight) / total
    return math.fsum(value * weight for value, weight in known) / total
