"""Advantage estimators whose advantages differ from token to token (docs/algorithms.md, "Advantage estimators").

Recursions run over the policy tokens of a response, over all its segments, and step over the others.
"""

from __future__ import annotations

import numpy as np

from verl.algorithms.advantage import (
    Arrays,
    EstimatorInputs,
    GroupStatistics,
    Result,
    whiten_tokens,
)
from verl.algorithms.registry import ESTIMATORS


def discounted_sums(values: np.ndarray, factor: float) -> np.ndarray:
    """y_k = Σ_{j ≥ k} factor^{j−k}·x_j, float64 [K].

    By doubling: a pass adds to every window the one after it, so that log₂ K passes do instead of K steps, or fewer
    where what is further away no longer counts.
    """
    if factor == 1:
        return np.cumsum(values[::-1])[::-1]
    sums, window = values.astype(np.float64), 1
    while window < len(sums) and factor > 1e-30:
        sums[:-window] += factor * sums[window:]
        window, factor = 2 * window, factor * factor
    return sums


@ESTIMATORS.register("gae", needs={"values"}, keys=["gamma", "lam"])
def gae(inputs: EstimatorInputs) -> Result:
    """δ_k = r_k + γV_{k+1} − V_k; a_k = δ_k + γλ·a_{k+1}; returns a + V; A = whiten(a). V after the last policy token
    is 0.

    Sources: GAE, arXiv 1506.02438; PPO, arXiv 1707.06347.
    """
    advantages, returns = [], []
    for rewards, values in zip(inputs.column("token_rewards"), inputs.column("values"), strict=True):
        following = np.append(values[1:], 0.0)[: len(values)]
        errors = rewards + inputs.gamma * following - values
        advantages.append(discounted_sums(errors, inputs.gamma * inputs.lam))
        returns.append(advantages[-1] + values)
    return whiten_tokens(advantages, inputs), returns


@ESTIMATORS.register("reinforce_plus_plus", keys=["gamma"])
def reinforce_plus_plus(inputs: EstimatorInputs) -> Result:
    """G_k = r_k + γG_{k+1}; A = whiten(G); returns G. γ is `config.gamma`, 1 without. Source: arXiv 2501.03262."""
    returns = [discounted_sums(rewards, inputs.gamma) for rewards in inputs.column("token_rewards")]
    return whiten_tokens(returns, inputs), returns


@ESTIMATORS.register("remax", needs={"reward_baselines"})
def remax(inputs: EstimatorInputs) -> Result:
    """A_k = Σ_{j ≥ k} r_j − b_g; returns Σ_{j ≥ k} r_j. b_g is the score of the prompt's greedy response.

    Source: ReMax, arXiv 2310.10505.
    """
    if inputs.baselines is None:
        raise ValueError("remax needs reward_baselines, the score of a greedy response to each prompt")
    returns = [discounted_sums(rewards, 1.0) for rewards in inputs.column("token_rewards")]
    return [
        row_returns - baseline for row_returns, baseline in zip(returns, inputs.baselines, strict=True)
    ], returns


def _gradient_norms(inputs: EstimatorInputs) -> Arrays:
    """W_k = Σ_{j ≤ k} (1 − 2π_j + Σ_v π(v)²)·c_j² of each response, c the importance weight (1 where there is none)."""
    try:
        corrections = inputs.column("is_weights")
    except ValueError:  # the step has no correction
        corrections = [np.ones(int(length)) for length in inputs.lengths]
    columns = zip(inputs.column("old_log_probs"), inputs.column("sum_pi_squared"), corrections, strict=True)
    return [np.cumsum((1 - 2 * np.exp(old) + squares) * c**2) for old, squares, c in columns]


def _group_baseline(returns: Arrays, weights: Arrays) -> np.ndarray:
    """b_k = Σ_j G·W / (Σ_j W + 1e-8) over members that have a token k, up to the second-longest length."""
    width = sorted(map(len, returns))[-2]
    above, below = np.zeros(width), np.zeros(width)
    for row_returns, weight in zip(returns, weights, strict=True):
        size = min(width, len(row_returns))
        above[:size] += row_returns[:size] * weight[:size]
        below[:size] += weight[:size]
    return above / (below + 1e-8)


_OTB_NEEDS = frozenset({"old_log_probs", "sum_pi_squared"})


@ESTIMATORS.register("optimal_token_baseline", compares_groups=True, needs=_OTB_NEEDS)
@ESTIMATORS.register("tir_optimal_token_baseline", compares_groups=True, needs=_OTB_NEEDS)
def optimal_token_baseline(inputs: EstimatorInputs) -> Result:
    """A_k = G_k − b_{g,k}; returns G_k = Σ_{j ≥ k} r_j. The baseline weighs the group's returns at token k by W_k, the
    expected squared norm of the gradient so far.

    w_k = (1 − 2π_k + Σ_v π(v)²)·c_k², W_k = Σ_{j ≤ k} w_j; b_{g,k} = Σ_j G_{j,k}W_{j,k} / (Σ_j W_{j,k} + 1e-8) over
    members that have a token k. b is 0 in a group of one and beyond the second-longest length; A is 0 where all scores
    of a group are equal. Source: Optimal Token Baseline (Li et al. 2025).
    """
    returns = [discounted_sums(rewards, 1.0) for rewards in inputs.column("token_rewards")]
    weights = _gradient_norms(inputs)
    group = GroupStatistics.of(inputs.scores, inputs.index)
    advantages = list(returns)
    for members in group.groups.members():
        if len(members) == 1:
            continue
        baseline = _group_baseline([returns[i] for i in members], [weights[i] for i in members])
        for i in members:
            width = min(len(baseline), len(returns[i]))
            advantages[i] = returns[i].copy()
            advantages[i][:width] -= baseline[:width]
            if group.equal[i]:
                advantages[i] = np.zeros_like(returns[i])
    return advantages, returns
