"""Estimators that give credit to the steps of an agent, a run of policy tokens each, within a group of trajectories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from verl.algorithms.advantage import Arrays, EstimatorInputs, Groups, Result, group_relative
from verl.algorithms.flat_tokens import discounted_sums
from verl.algorithms.registry import ESTIMATORS
from verl.config.schema.base import setting
from verl.trajectory import Trajectory


def steps_of(trajectory: Trajectory) -> tuple[list[int], list[bytes]]:
    """Of each step, a run of policy tokens: the number of the first among the policy tokens, and the state.

    The state is what the environment said last, its token ids: the tokens between two runs; for the first run of a
    segment what its context adds to the segment that it goes on from, or all of the context.
    """
    starts, states, before = list[int](), list[bytes](), 0
    for segment in trajectory.segments:
        ids, mask = segment.columns["response_ids"], np.asarray(segment.columns["response_mask"], bool)
        first = np.flatnonzero(mask & ~np.append(False, mask[:-1]))
        ends = np.append(-1, np.flatnonzero(mask & ~np.append(mask[1:], False)))
        context = segment.context_ids[segment.shared :]
        for number, (start, end) in enumerate(zip(first, ends, strict=False)):
            between = ids[end + 1 : start]
            starts.append(before + int(np.count_nonzero(mask[:start])))
            states.append((between if number else np.concatenate([context, between])).astype(np.int64).tobytes())
        before += int(np.count_nonzero(mask))
    return starts, states


GIGPO_KEYS = ("gigpo_step_weight", "gamma", "norm_adv_by_std_in_grpo")


@ESTIMATORS.register("gigpo", compares_groups=True, keys=GIGPO_KEYS)
def gigpo(inputs: EstimatorInputs) -> Result:
    """A = A^E + ω·A^S: A^E of `grpo` on the scores, A^S of `grpo` on R_t = Σ_{j ≥ t} γ^{j−t}·r_j of the group's steps
    in the same state; ω is `gigpo_step_weight`. A step is a run of policy tokens, r_t the sum of its token rewards.

    The state is what the environment said last, token by token. A step that is alone in its state has A^S = 0.
    Source: GiGPO, arXiv 2505.10978, equations 3 and 5 to 8.
    """
    weight, episode = setting(inputs.config, "gigpo_step_weight", 1.0), group_relative(inputs.scores, inputs)

    def credit(returns: np.ndarray, states: list[tuple[bytes, ...]], row: np.ndarray) -> np.ndarray:
        return episode[row] + weight * _among_equals(returns, states, row, inputs)

    return _by_step(inputs, credit, 0)


HGPO_KEYS = ("hgpo_history", "hgpo_alpha", "gamma", "norm_adv_by_std_in_grpo")


@ESTIMATORS.register("hgpo", compares_groups=True, keys=HGPO_KEYS)
def hgpo(inputs: EstimatorInputs) -> Result:
    """A_t = Σ_k w_k A^k_t, k = 0 … `hgpo_history`: A^k of `grpo` on R_t (of `gigpo`) among the group's steps whose last
    k + 1 states are the same, w_k ∝ (k + 1)^`hgpo_alpha` over the k where A^k_t is not 0.

    A step that is alone at every depth has A = 0. Paper: 2 and 1. That depths with A^k = 0 (alone, or equal returns)
    have no weight is in the authors' code. Source: HGPO, arXiv 2602.22817.
    """
    depth, alpha = setting(inputs.config, "hgpo_history", 2), setting(inputs.config, "hgpo_alpha", 1.0)

    def credit(returns: np.ndarray, states: list[tuple[bytes, ...]], row: np.ndarray) -> np.ndarray:
        # A step without k steps before it is in no group of depth k: its history is shorter, so the key is its own.
        histories = [[h[-k - 1 :] if len(h) > k else (h, n) for n, h in enumerate(states)] for k in range(depth + 1)]
        relative = np.array([_among_equals(returns, keys, row, inputs) for keys in histories])
        weights = np.where(relative == 0, 0.0, np.arange(1, depth + 2)[:, None] ** float(alpha))
        return np.asarray((relative * weights).sum(0) / np.maximum(weights.sum(0), 1e-12))

    return _by_step(inputs, credit, depth)


Credit = Callable[[np.ndarray, list[tuple[bytes, ...]], np.ndarray], np.ndarray]
"""(discounted returns [S] of all steps, the last states up to each, the response of each) → their advantages [S]."""


def _by_step(inputs: EstimatorInputs, credit: Credit, depth: int) -> Result:
    """Advantages that each step's tokens share; `credit` gets `depth` + 1 states. ValueError outside of a trainer."""
    if inputs.batch is None:
        name = setting(inputs.config, "adv_estimator", "this estimator")
        raise ValueError(f"{name} needs the steps of the responses, which only the trainer knows")
    steps = [steps_of(t) for t in inputs.batch]
    returns = [
        discounted_sums(np.add.reduceat(rewards, starts), inputs.gamma) if starts else np.zeros(0)
        for rewards, (starts, _) in zip(inputs.column("token_rewards"), steps, strict=True)
    ]
    histories = [
        tuple(states[max(0, number - depth) : number + 1]) for _, states in steps for number in range(len(states))
    ]
    row = np.repeat(np.arange(len(steps)), [len(values) for values in returns])
    of_steps = np.split(credit(np.concatenate(returns), histories, row), np.cumsum([len(r) for r in returns])[:-1])
    advantages: Arrays = [
        np.repeat(values, np.diff([*starts, length]))
        for values, (starts, _), length in zip(of_steps, steps, inputs.lengths, strict=True)
    ]
    return advantages, advantages


def _among_equals(returns: np.ndarray, keys: list[Any], row: np.ndarray, inputs: EstimatorInputs) -> np.ndarray:
    """The advantage of `grpo` of each step among those of its group that have the same key; 0 for one alone, [S]."""
    uids = list(inputs.index)
    groups = [(uids[response], key) for response, key in zip(row, keys, strict=True)]
    return np.where(Groups.of(groups).size > 1, group_relative(returns, inputs, groups), 0.0)
