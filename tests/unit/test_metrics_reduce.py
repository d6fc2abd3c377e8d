"""Merging values of several mini-batches."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.tracking.names import merge_metrics, rule

NUMBERS = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("actor/loss", "mean"),
        ("critic/score/max", "max"),
        ("critic/score/min", "min"),
        ("rollout_corr/rollout_is_max", "max"),
        ("rollout_corr/rollout_is_seq_max_deviation", "max"),
        ("timing_s/gen", "mean"),
        ("actor/determination", "mean"),
        ("actor/grad_norm", "mean"),
        ("perf/max_memory_allocated_gb", "max"),
    ],
)
def test_rule_by_name(name, how):
    assert rule(name) == how


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, st.floats(0.001, 1e3)), min_size=1, max_size=8))
def test_merge_against_plain_loops(rows):
    merged = merge_metrics([({"a": a, "b/max": b, "b/min": c}, w) for a, b, c, w in rows])
    above = below = 0.0
    high, low = -math.inf, math.inf
    for a, b, c, w in rows:
        above += a * w
        below += w
        high = b if b > high else high
        low = c if c < low else low
    assert merged["a"] == pytest.approx(above / below, rel=1e-9, abs=1e-6)
    assert (merged["b/max"], merged["b/min"]) == (high, low)


def test_nan_has_nothing_to_say():
    nan = math.nan
    merged = merge_metrics(
        [({"a": nan, "m/max": nan, "z": nan}, 1), ({"a": 2.0, "m/max": -3.0}, 5), ({"q": 1.0}, 0)]
    )
    assert merged["a"] == 2.0 and merged["m/max"] == -3.0
    assert math.isnan(merged["z"]) and math.isnan(merged["q"])
    assert merge_metrics([]) == {}


def test_infinite_is_kept_and_negative_weights_are_refused():
    assert merge_metrics([({"actor/grad_norm": math.inf}, 1.0), ({"actor/grad_norm": 1.0}, 1.0)]) == {
        "actor/grad_norm": math.inf
    }
    with pytest.raises(ValueError, match="negative"):
        merge_metrics([({"a": 1.0}, -1.0)])
