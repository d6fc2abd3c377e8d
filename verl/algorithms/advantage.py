"""Advantage estimators: from token rewards to advantages. One small pure function each, under its name.

Rewards arrive padded on the right, [N, L]. A response without a policy token still has an outcome: its score
stands in its row all the same (the row's sum is s), and no advantage is written for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from verl.algorithms.registry import ESTIMATORS

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Per response, the statistics of its group; float64 [N] (equal: bool [N]).

    A group of one has mean 0 and std 1, so that its score is the advantage. `equal`: two members or more, all
    with the same score.
    """

    mean: torch.Tensor
    std: torch.Tensor
    equal: torch.Tensor


def group_ids(index: Iterable[Any]) -> list[int]:
    """Group keys (any hashables, or a tensor or array of them) → 0, 1, … in order of first appearance."""
    keys = index.tolist() if hasattr(index, "tolist") else list(index)
    found: dict[Any, int] = {}
    return [found.setdefault(key, len(found)) for key in keys]


def group_statistics(scores: torch.Tensor, index: Iterable[Any]) -> GroupStatistics:
    """Mean and sample standard deviation (n_g − 1) of scores [N] within each group of `index` [N]."""
    ids = torch.tensor(group_ids(index), dtype=torch.long, device=scores.device)
    if ids.numel() != scores.numel():
        raise ValueError(f"{scores.numel()} responses but {ids.numel()} group keys")
    values = scores.double()
    groups = int(ids.max()) + 1 if ids.numel() else 0
    zeros = values.new_zeros(groups)
    size = zeros.index_add(0, ids, torch.ones_like(values))
    mean = zeros.index_add(0, ids, values) / size
    variance = zeros.index_add(0, ids, (values - mean[ids]) ** 2) / (size - 1).clamp(min=1)
    top = zeros.scatter_reduce(0, ids, values, "amax", include_self=False)
    bottom = zeros.scatter_reduce(0, ids, values, "amin", include_self=False)
    alone = size == 1
    mean = torch.where(alone, torch.zeros_like(mean), mean)
    std = torch.where(alone, torch.ones_like(mean), variance.sqrt())
    return GroupStatistics(mean[ids], std[ids], ((top == bottom) & ~alone)[ids])


def on_tokens(per_response: torch.Tensor, response_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One number per response [N] written on its policy tokens: [N, L] in `dtype`, 0 elsewhere."""
    return (per_response.unsqueeze(-1) * response_mask).to(dtype)


@ESTIMATORS.register("grpo")
@ESTIMATORS.register("grpo_vectorized")
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Iterable[Any],
    epsilon: float = EPSILON,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A = (s − mean_g) / (std_g + ε); without the division: Dr. GRPO. Returns = A.

    token_level_rewards, response_mask [N, L]; index [N] group keys. Both results [N, L] in the dtype of the
    rewards. A group whose scores are all equal gets exactly 0; a group of one has mean 0 and std 1.
    Sources: GRPO, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783.
    """
    scores = token_level_rewards.double().sum(-1)
    advantage = grpo_advantage(scores, index, epsilon, norm_adv_by_std_in_grpo)
    advantages = on_tokens(advantage, response_mask, token_level_rewards.dtype)
    return advantages, advantages.clone()


@torch.no_grad()
def grpo_advantage(
    scores: torch.Tensor,
    index: Iterable[Any],
    epsilon: float = EPSILON,
    norm_adv_by_std_in_grpo: bool = True,
) -> torch.Tensor:
    """The number that `compute_grpo_outcome_advantage` writes on every token of a response, float64 [N]."""
    group = group_statistics(scores, index)
    advantage = scores - group.mean
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (group.std + epsilon)
    return torch.where(group.equal, torch.zeros_like(advantage), advantage)


PER_ANSWER = {compute_grpo_outcome_advantage: grpo_advantage}
"""Estimators that give all tokens of a response one number, and what makes it from the scores [N]: without rectangles of
tokens, which of a large step take seconds."""


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
