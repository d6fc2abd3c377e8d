"""The five aggregation modes against loops; any split into micro-batches gives the same value and gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.policy_loss import MODES, agg_loss, masked_mean


def oracle(x: list[list[float]], m: list[list[int]], mode: str, max_response_length: float) -> float:
    tokens = sum(sum(row) for row in m)
    responses = sum(1 for row in m if sum(row))
    if tokens == 0:
        return 0.0
    total = 0.0
    for xs, ms in zip(x, m, strict=True):
        inner = 0.0
        for value, kept in zip(xs, ms, strict=True):
            if kept:
                inner += value
        if mode == "seq-mean-token-mean" and sum(ms):
            inner /= sum(ms)
        total += inner
    return {
        "token-sum": total,
        "token-mean": total / tokens,
        "seq-mean-token-sum": total / responses,
        "seq-mean-token-mean": total / responses,
        "seq-mean-token-sum-norm": total / (responses * max_response_length),
    }[mode]


@st.composite
def matrices(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]]]:
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    numbers = st.floats(-10, 10, allow_nan=False, width=32)
    x = [draw(st.lists(numbers, min_size=width, max_size=width)) for _ in range(rows)]
    kinds = st.one_of(st.just([0] * width), st.lists(st.integers(0, 1), min_size=width, max_size=width))
    return x, [draw(kinds) for _ in range(rows)]


@settings(max_examples=150, deadline=None)
@given(matrices(), st.sampled_from(MODES), st.sampled_from([None, 1.0, 7.0]))
def test_equals_the_loop(
    matrix: tuple[list[list[float]], list[list[int]]], mode: str, max_response_length: float | None
) -> None:
    x, m = matrix
    value = agg_loss(
        torch.tensor(x, dtype=torch.float64),
        torch.tensor(m).float(),
        mode,
        loss_scale_factor=max_response_length,
    )
    expected = oracle(x, m, mode, len(x[0]) if max_response_length is None else max_response_length)
    assert value.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@settings(max_examples=150, deadline=None)
@given(matrices(), st.sampled_from(MODES), st.data())
def test_any_split_adds_up(
    matrix: tuple[list[list[float]], list[list[int]]], mode: str, data: st.DataObject
) -> None:
    x, m = torch.tensor(matrix[0], dtype=torch.float64, requires_grad=True), torch.tensor(matrix[1]).float()
    whole = agg_loss(x, m, mode, loss_scale_factor=5.0)
    (gradient,) = torch.autograd.grad(whole, x)
    part_of = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(x), max_size=len(x))))
    counts = {
        "batch_num_tokens": int(m.sum()),
        "global_batch_size": int((m.sum(-1) > 0).sum()),
        "loss_scale_factor": 5.0,
    }
    pieces = [agg_loss(x[part_of == k], m[part_of == k], mode, **counts) for k in range(4)]
    (pieced,) = torch.autograd.grad(sum(pieces), x)
    torch.testing.assert_close(sum(pieces), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pieced, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_padding_may_hold_anything(mode: str) -> None:
    x = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]], requires_grad=True)
    m = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    loss = agg_loss(x, m, mode)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(x.grad).all()
    assert (x.grad[~m.bool()] == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_aggregate_is_zero(mode: str) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    loss = agg_loss(x, torch.zeros(2, 3), mode, batch_num_tokens=0, global_batch_size=0)
    loss.backward()
    assert loss.item() == 0
    assert (x.grad == 0).all()


def test_fully_masked_answers_are_not_counted() -> None:
    x, m = torch.ones(3, 2), torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    assert agg_loss(x, m, "seq-mean-token-sum").item() == 1.5
    assert agg_loss(x, m, "seq-mean-token-mean").item() == 1.0


def test_dp_size_multiplies_and_needs_the_counts() -> None:
    x, m = torch.ones(2, 2), torch.ones(2, 2)
    assert agg_loss(x, m, "token-mean", dp_size=4, batch_num_tokens=16).item() == 1.0
    assert agg_loss(x, m, "token-sum", dp_size=2).item() == 8.0
    with pytest.raises(ValueError, match="batch_num_tokens is required when dp_size is 2"):
        agg_loss(x, m, "token-mean", dp_size=2, global_batch_size=2)
    for mode in MODES[2:]:
        with pytest.raises(ValueError, match="global_batch_size is required"):
            agg_loss(x, m, mode, dp_size=2, batch_num_tokens=4)


def test_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'; there are: token-mean"):
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), "mean")
    with pytest.raises(ValueError, match="loss_scale_factor must be greater than 0"):
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), "seq-mean-token-sum-norm", loss_scale_factor=0)


def test_masked_mean_of_nothing_is_zero() -> None:
    assert masked_mean(torch.tensor([[float("nan")]]), torch.zeros(1, 1)).item() == 0
