"""KL estimators (value and gradient), what they limit, the reward penalty and its coefficient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms_rows import algorithm, matrices
from verl.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    clipped_tokens,
    get_kl_controller,
    kl_penalty,
)
from verl.compat.core_algos import apply_kl_penalty

NAMES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def oracle(u: float, name: str) -> tuple[float, float, bool]:
    """Value, derivative by u, and whether anything was limited."""
    if name in ("kl", "k1"):
        return u, 1.0, False
    if name == "abs":
        return abs(u), math.copysign(1.0, u) if u else 0.0, False
    if name in ("mse", "k2"):
        return u * u / 2, u, False
    limited = min(max(u, -20.0), 20.0)
    value = math.exp(-limited) + limited - 1
    clipped = limited != u or value > 10
    return min(value, 10.0), 0.0 if clipped else 1 - math.exp(-u), clipped


@settings(max_examples=300, deadline=None)
@given(st.floats(-30, 30), st.floats(-5, 0), st.sampled_from(NAMES), st.booleans())
def test_estimators_equal_the_formulas(gap: float, ref: float, name: str, plus: bool) -> None:
    logp = torch.tensor(ref + gap, dtype=torch.float64, requires_grad=True)
    estimate = kl_penalty(logp, torch.tensor(ref, dtype=torch.float64), name + "+" * plus)
    (gradient,) = torch.autograd.grad(estimate, logp)
    u = (ref + gap) - ref
    value, slope, clipped = oracle(u, name)
    assert estimate.item() == pytest.approx(value, rel=1e-9, abs=1e-9)
    assert gradient.item() == pytest.approx(u if plus else slope, rel=1e-9, abs=1e-9)
    found = clipped_tokens(logp, torch.tensor(ref, dtype=torch.float64), name + "+" * plus)
    assert found.item() == clipped


def test_k3_keeps_its_digits_for_small_differences_in_float32() -> None:
    u = torch.tensor([1e-3, -1e-3, 1e-2], dtype=torch.float32)
    exact = [math.expm1(-float(v)) + float(v) for v in u]
    found = kl_penalty(u, torch.zeros(3), "k3").tolist()
    assert found == pytest.approx(exact, rel=2e-4)
    assert min(found) > 0


@pytest.mark.parametrize("name", ["full", "full+", "k4", "", "k3++"])
def test_other_names_are_refused_with_the_list(name: str) -> None:
    with pytest.raises(ValueError, match="low_var_kl") as error:
        kl_penalty(torch.zeros(1), torch.zeros(1), name)
    assert ("vocabulary" in str(error.value)) == name.startswith("full")


@settings(max_examples=100, deadline=None)
@given(matrices(st.floats(-1, 1), st.floats(-4, 0), st.floats(-4, 0)), st.sampled_from(NAMES), st.floats(0, 1))
def test_reward_penalty_equals_the_loop(batch: tuple[list[list[float]], ...], name: str, beta: float) -> None:
    rewards, old, ref, masks = batch
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (rewards, old, ref, masks)]
    found, metrics = apply_kl_penalty(*tensors, beta, name)
    per_response = []
    for i, mask in enumerate(masks):
        kls = []
        for t, kept in enumerate(mask):
            value = oracle(old[i][t] - ref[i][t], name)[0]
            expected = rewards[i][t] - beta * value * kept
            assert found[i, t].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
            if kept:
                kls.append(value)
        if kls:
            per_response.append(sum(kls) / len(kls))
    mean = sum(per_response) / len(per_response) if per_response else math.nan
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(mean, rel=1e-9, abs=1e-12, nan_ok=True)
    assert metrics["actor/reward_kl_penalty_coeff"] == beta


def test_adaptive_coefficient_by_hand() -> None:
    controller = AdaptiveKLController(0.2, target_kl=0.1, horizon=1000)
    controller.update(0.105, 64)
    assert controller.value == pytest.approx(0.2 * (1 + 0.05 * 64 / 1000))
    controller.update(5.0, 500)
    assert controller.value == pytest.approx(0.2 * (1 + 0.05 * 64 / 1000) * (1 + 0.2 * 0.5))
    before = controller.value
    controller.update(0.0, 100)
    assert controller.value == pytest.approx(before * (1 - 0.2 * 0.1))
    before = controller.value
    controller.update(math.nan, 100)
    assert controller.value == before


def test_coefficients_are_saved_and_restored() -> None:
    first = get_kl_controller(algorithm(type="adaptive", kl_coef=0.3, target_kl=0.1, horizon=100))
    first.update(1.0, 50)
    again = get_kl_controller({"type": "adaptive", "kl_coef": 0.3, "target_kl": 0.1, "horizon": 100})
    again.load_state_dict(first.state_dict())
    assert again.value == first.value == pytest.approx(0.33)
    fixed = get_kl_controller({"type": "fixed", "kl_coef": 0.05})
    fixed.update(9.0, 1000)
    fixed.load_state_dict(first.state_dict())
    assert isinstance(fixed, FixedKLController)
    assert fixed.value == fixed.state_dict()["value"] == 0.05
    again.load_state_dict(fixed.state_dict())
    assert again.value == first.value


def test_bad_controllers_are_refused() -> None:
    with pytest.raises(ValueError, match="there are: fixed, adaptive"):
        get_kl_controller({"type": "linear"})
    with pytest.raises(ValueError, match="horizon > 0"):
        get_kl_controller({"type": "adaptive", "horizon": 0})
