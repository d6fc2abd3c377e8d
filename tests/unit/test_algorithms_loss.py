"""The clipped policy loss against a loop over responses and tokens, value and gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms_rows import actor
from verl.algorithms.policy_loss import compute_policy_loss_vanilla


def oracle_token(d: float, a: float, low: float, high: float, cap: float) -> dict[str, float]:
    """x, dx/dlogp and the two indicators of one token, by cases."""
    ratio = math.exp(min(max(d, -20.0), 20.0))
    slope = ratio if -20 < d < 20 else 0.0
    limited = min(max(ratio, 1 - low), 1 + high)
    plain, clipped = -a * ratio, -a * limited
    x, gradient = (clipped, 0.0) if clipped > plain else (plain, -a * slope)
    lower = a < 0 and x > -a * cap
    if lower:
        x, gradient = -a * cap, 0.0
    return {"x": x, "gradient": gradient, "clipped": float(clipped > plain), "lower": float(lower)}


Case = tuple[list[list[float]], list[list[float]], list[list[float]], list[list[int]]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """log-probs, old log-probs, advantages, masks; zero variance, huge ratios and empty rows among them."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))

    def matrix(element: st.SearchStrategy[Any]) -> list[list[Any]]:
        return [draw(st.lists(element, min_size=width, max_size=width)) for _ in range(rows)]

    old = matrix(st.floats(-8, 0))
    gap = matrix(st.one_of(st.just(0.0), st.floats(-1, 1), st.floats(-30, 30)))
    new = [[o + g for o, g in zip(os, gs, strict=True)] for os, gs in zip(old, gap, strict=True)]
    advantages = matrix(st.one_of(st.just(0.0), st.floats(-3, 3)))
    return new, old, advantages, matrix(st.integers(0, 1))


@settings(max_examples=200, deadline=None)
@given(cases(), st.sampled_from([(0.2, 0.2, 3.0), (0.2, 0.28, 10.0), (0.9, 0.1, 1.05)]), st.booleans())
def test_vanilla_equals_the_loop(case: Case, constants: tuple[float, float, float], weighted: bool) -> None:
    new, old, advantages, mask = case
    low, high, cap = constants
    log_prob = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    weights = [[0.25 * (1 + i + t) for t in range(len(row))] for i, row in enumerate(new)]
    loss, metrics = compute_policy_loss_vanilla(
        torch.tensor(old, dtype=torch.float64),
        log_prob,
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(mask, dtype=torch.float64),
        config=actor(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=cap),
        rollout_is_weights=torch.tensor(weights, dtype=torch.float64) if weighted else None,
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    tokens = max(1, sum(map(sum, mask)))
    value = clipped = lower = kl = 0.0
    for i, row in enumerate(new):
        for t, logp in enumerate(row):
            # The subtraction is done in the same precision, so that both see the same side of a bound.
            d = logp - old[i][t]
            found = oracle_token(d, advantages[i][t], low, high, cap)
            weight = weights[i][t] if weighted else 1.0
            kept = mask[i][t]
            value += kept * weight * found["x"] / tokens
            clipped += kept * found["clipped"] / tokens
            lower += kept * found["lower"] / tokens
            kl -= kept * d / tokens
            expected = kept * weight * found["gradient"] / tokens
            if abs(abs(d) - 20) > 1e-9 and not _on_a_bound(d, low, high, cap):
                assert gradient[i, t].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert loss.item() == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(clipped, abs=1e-12)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(lower, abs=1e-12)
    assert metrics["actor/ppo_kl"] == pytest.approx(kl, rel=1e-9, abs=1e-12)
    assert all(type(v) is float for v in metrics.values())


def _on_a_bound(d: float, low: float, high: float, cap: float) -> bool:
    ratio = math.exp(min(max(d, -20.0), 20.0))
    return any(abs(ratio - bound) < 1e-9 for bound in (1 - low, 1 + high, cap))


def one(d: float, a: float, **settings: Any) -> tuple[float, dict[str, float]]:
    loss, metrics = compute_policy_loss_vanilla(
        torch.zeros(1, 1, dtype=torch.float64),
        torch.full((1, 1), d, dtype=torch.float64),
        torch.full((1, 1), a, dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.float64),
        config=actor(**settings),
    )
    return loss.item(), metrics


def test_clip_higher_and_dual_clip_by_hand() -> None:
    assert one(math.log(1.25), 1.0, clip_ratio_high=0.28)[0] == pytest.approx(-1.25)
    assert one(math.log(1.25), 1.0)[0] == pytest.approx(-1.2)
    assert one(math.log(0.5), -1.0)[0] == pytest.approx(0.8)
    value, metrics = one(math.log(5.0), -1.0)
    assert value == pytest.approx(3.0)
    assert metrics["actor/pg_clipfrac_lower"] == 1.0
    value, metrics = one(math.log(5.0), -1.0, clip_ratio_c=10.0)
    assert value == pytest.approx(5.0)
    assert metrics["actor/pg_clipfrac_lower"] == 0.0


def test_without_config_the_defaults_hold() -> None:
    args = [torch.randn(2, 3, dtype=torch.float64) for _ in range(3)]
    mask = torch.ones(2, 3, dtype=torch.float64)
    bare, _ = compute_policy_loss_vanilla(*args, mask)
    configured, _ = compute_policy_loss_vanilla(*args, mask, config=actor())
    assert bare.item() == configured.item()


def test_garbage_under_the_mask_reaches_neither_value_nor_gradient() -> None:
    log_prob = torch.tensor([[-1.0, float("nan")]], requires_grad=True)
    old = torch.tensor([[-1.5, float("inf")]])
    advantages = torch.tensor([[1.0, float("nan")]])
    loss, metrics = compute_policy_loss_vanilla(old, log_prob, advantages, torch.tensor([[1.0, 0.0]]))
    loss.backward()
    assert torch.isfinite(loss)
    assert log_prob.grad[0, 1].item() == 0
    assert all(math.isfinite(v) for v in metrics.values())


@pytest.mark.parametrize(
    ("settings", "words"), [({"clip_ratio_c": 1.0}, "clip_ratio_c"), ({"clip_ratio_low": -0.1}, "negative")]
)
def test_bad_constants_are_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        one(0.0, 1.0, **settings)
