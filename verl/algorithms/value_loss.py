"""The critic's loss (algorithms.md §8), and how well its values explain the returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.algorithms.objective import LossDenominators, Metrics, PaddedMicroBatch, loss_mask
from verl.algorithms.policy_loss import Count, agg_loss, masked_mean

if TYPE_CHECKING:
    from verl.engine.training.base import MicroBatch


def compute_value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float = 0.5,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: float | None = None,
    trajectory_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(½·agg(x), share of tokens where the clipped term is the larger), x = max((V − R)², (clip(V, V_old ± c) − R)²).

    vpreds [b, L] are the values with gradient, values those before the step; response_mask is m; the counts are those of
    `agg_loss`.
    """
    limited = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    plain, clipped = (vpreds - returns).square(), (limited - returns).square()
    counts = (dp_size, batch_num_tokens, global_batch_size, loss_scale_factor, trajectory_tokens)
    loss = agg_loss(torch.maximum(plain, clipped), response_mask, loss_agg_mode, *counts) / 2
    return loss, masked_mean((clipped > plain).to(plain.dtype), response_mask).detach()


def explained_variance(returns: np.ndarray, values: np.ndarray) -> float:
    """1 − Var(R − V) / (Var(R) + 1e-5) over tokens [T], in float64; nan of fewer than two."""
    if len(returns) < 2:
        return math.nan
    returns, values = np.asarray(returns, np.float64), np.asarray(values, np.float64)
    return float(1 - (returns - values).var(ddof=1) / (returns.var(ddof=1) + 1e-5))


class ValueObjective:
    """Loss of the critic as a `MicroLoss` of the training engine: of the columns `returns`, `values` (before the step) and `loss_mask`.

    `critic` is the group of that name (cliprange_value, loss_agg_mode); the rest as for `ActorObjective`. Metrics: critic/vf_loss,
    critic/vf_clipfrac, critic/vpred_mean.
    """

    def __init__(
        self, critic: Any, denominators: LossDenominators, tokens_of: Mapping[int, int] | None = None
    ):
        self._critic, self._denominators, self._tokens_of = critic, denominators, tokens_of

    def __call__(self, micro: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        """Scalar to differentiate, already divided by the global counts, and metrics as (sum, weight)."""
        assert micro.values is not None
        area = PaddedMicroBatch(micro.rows, micro.values)
        predicted = area.pad(micro.values)
        mask = area.column([loss_mask(row) for row in area.rows])
        loss, clipped = compute_value_loss(
            predicted,
            area.needed("returns"),
            area.needed("values"),
            mask,
            self._critic.cliprange_value,
            self._critic.loss_agg_mode,
            **area.batch_info(self._denominators, self._tokens_of),
        )
        tokens = float(mask.sum())
        share = tokens / self._denominators.tokens if self._denominators.tokens else 0.0
        return loss, {
            "critic/vf_loss": (float(loss.detach()), share),
            "critic/vf_clipfrac": (float(clipped) * tokens, tokens),
            "critic/vpred_mean": (float((predicted.detach() * mask).sum()), tokens),
        }
