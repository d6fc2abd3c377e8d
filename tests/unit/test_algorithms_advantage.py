"""GRPO and Dr. GRPO against a loop over responses and tokens written from the formula."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantage import GroupStatistics, compute_grpo_outcome_advantage


def oracle(
    rewards: list[list[float]], masks: list[list[int]], keys: list[str], normalise: bool
) -> list[list[float]]:
    """A per token, in plain Python; exact means and variances through fractions."""
    scores = [sum((Fraction(r) for r in row), Fraction(0)) for row in rewards]
    out = []
    for i, mask in enumerate(masks):
        group = [scores[j] for j in range(len(keys)) if keys[j] == keys[i]]
        if len(group) == 1:
            value = float(scores[i]) / (1 + 1e-6) if normalise else float(scores[i])
        elif len(set(group)) == 1:
            value = 0.0
        else:
            mean = sum(group) / len(group)
            value = float(scores[i] - mean)
            if normalise:
                variance = sum((s - mean) ** 2 for s in group) / (len(group) - 1)
                value /= math.sqrt(variance) + 1e-6
        out.append([value if m else 0.0 for m in mask])
    return out


@st.composite
def outcome_batches(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]], list[str]]:
    """Groups of uneven size, empty responses, tool tokens, groups of one, equal scores."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    keys = [f"p{g}" for g, size in enumerate(sizes) for _ in range(size)]
    draw(st.randoms(use_true_random=False)).shuffle(keys)
    width = draw(st.integers(1, 5))
    masks = [draw(st.lists(st.integers(0, 1), min_size=width, max_size=width)) for _ in keys]
    values = st.sampled_from([0.0, 1.0, 1.0, -1.0, 0.5, 0.1, 123.25])
    rewards = []
    for mask in masks:
        row = [0.0] * width
        last = max((t for t, m in enumerate(mask) if m), default=0)
        row[last] = draw(values)
        rewards.append(row)
    return rewards, masks, keys


@settings(max_examples=150, deadline=None)
@given(outcome_batches(), st.booleans())
def test_grpo_equals_the_loop(
    batch: tuple[list[list[float]], list[list[int]], list[str]], normalise: bool
) -> None:
    rewards, masks, keys = batch
    rounded = torch.tensor(rewards, dtype=torch.float64)
    advantages, returns = compute_grpo_outcome_advantage(
        rounded, torch.tensor(masks, dtype=torch.float32), np.array(keys, dtype=object), 1e-6, normalise
    )
    expected = torch.tensor(oracle(rewards, masks, keys, normalise), dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(advantages, returns)
    assert advantages.data_ptr() != returns.data_ptr()


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("score", [0.0, 0.1, 1 / 3, -7.7])
def test_equal_scores_give_exactly_zero(normalise: bool, score: float) -> None:
    # In float64 the mean of ten equal numbers is not always that number: 0.1 is such a one.
    rewards = torch.full((10, 1), score, dtype=torch.float64)
    advantages, _ = compute_grpo_outcome_advantage(
        rewards, torch.ones(10, 1), ["a"] * 10, norm_adv_by_std_in_grpo=normalise
    )
    assert torch.equal(advantages, torch.zeros(10, 1, dtype=torch.float64))


def test_group_of_one_keeps_its_score() -> None:
    rewards = torch.tensor([[0.0, 2.0], [3.0, 0.0]], dtype=torch.float64)
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(2, 2), ["a", "b"])
    expected = torch.tensor([[2.0] * 2, [3.0] * 2], dtype=torch.float64) / (1 + 1e-6)
    torch.testing.assert_close(advantages, expected, rtol=1e-15, atol=0)
    plain, _ = compute_grpo_outcome_advantage(
        rewards, torch.ones(2, 2), ["a", "b"], norm_adv_by_std_in_grpo=False
    )
    assert plain[:, 0].tolist() == [2.0, 3.0]


def test_float32_in_float32_out_with_float64_statistics() -> None:
    # 1e8 + {0, 8, 16} are float32 numbers whose float32 variance is badly off.
    rewards = torch.tensor([[1e8], [1e8 + 8], [1e8 + 16]], dtype=torch.float32)
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(3, 1), ["g"] * 3)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages[:, 0], torch.tensor([-1.0, 0.0, 1.0]), rtol=1e-6, atol=1e-6)


def test_an_empty_answer_counts_in_its_group_and_gets_nothing() -> None:
    rewards = torch.tensor([[-1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, ["g"] * 3, norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(advantages[1:], torch.full((2, 2), 2 / 3, dtype=torch.float64))
    assert torch.equal(advantages[0], torch.zeros(2, dtype=torch.float64))


def test_order_of_answers_does_not_matter() -> None:
    rng = random.Random(3)
    scores = [rng.gauss(0, 1) for _ in range(12)]
    keys = [f"p{i % 5}" for i in range(12)]
    order = list(range(12))
    rng.shuffle(order)
    rewards = torch.tensor(scores, dtype=torch.float64).unsqueeze(-1)
    straight, _ = compute_grpo_outcome_advantage(rewards, torch.ones(12, 1), keys)
    mixed, _ = compute_grpo_outcome_advantage(rewards[order], torch.ones(12, 1), [keys[i] for i in order])
    torch.testing.assert_close(mixed, straight[order], rtol=1e-12, atol=1e-12)


def test_keys_may_be_a_tensor_and_must_match_the_responses() -> None:
    scores = np.array([1.0, 2.0, 5.0])
    from_tensor = GroupStatistics.of(scores, torch.tensor([4, 4, 9]))
    from_names = GroupStatistics.of(scores, ["x", "x", "y"])
    assert np.array_equal(from_tensor.mean, from_names.mean)
    assert from_names.mean.dtype == from_names.std.dtype == np.float64
    with pytest.raises(ValueError, match="3 responses but 2 group keys"):
        GroupStatistics.of(scores, ["x", "y"])


def test_no_responses() -> None:
    advantages, _ = compute_grpo_outcome_advantage(torch.zeros(0, 4), torch.zeros(0, 4), [])
    assert advantages.shape == (0, 4)
