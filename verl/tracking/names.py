"""Values of metrics as plain numbers, and how several values of a step become one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

Number = int | float

_WORDS = re.compile(r"[^a-z0-9]+")


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


def spread(name: str, values: Iterable[float], which: Iterable[str] = ("mean", "max", "min")) -> dict[str, Number]:
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
    are means all the same. `seq_max_k2` and `seq_max_k3` are rules of rejection, not maxima.
    """
    words = _WORDS.split(name.lower().replace("seq_max_k", "seq_"))
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
