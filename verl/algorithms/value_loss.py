"""The critic's clipped loss (PPO, docs/algorithms.md, "Recipes"), and how well its values explain the returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.algorithms.flat_tokens import (
    LossDenominators,
    Metrics,
    MicroBatchColumns,
    Rows,
    aggregate,
    masked_mean,
)
from verl.config.schema.actor import CriticConfig

if TYPE_CHECKING:
    from verl.engine.training.base import MicroBatch


def value_loss(
    predicted: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    rows: Rows,
    clip_range: float,
    mode: str,
    **counts: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(½·agg(x), share of tokens where the clipped term is the larger), x = max((V − R)², (clip(V, V_old ± c) − R)²).

    predicted [T] are the values with gradient, `values` those before the step; `counts` are those of `aggregate`.
    """
    limited = torch.clamp(predicted, values - clip_range, values + clip_range)
    plain, clipped = (predicted - returns).square(), (limited - returns).square()
    loss = aggregate(torch.maximum(plain, clipped), loss_mask, rows, mode, **counts) / 2
    return loss, masked_mean((clipped > plain).to(plain.dtype), loss_mask).detach()


def explained_variance(returns: np.ndarray, values: np.ndarray) -> float:
    """1 − Var(R − V) / (Var(R) + 1e-5) over tokens [T], in float64; nan of fewer than two."""
    if len(returns) < 2:
        return math.nan
    returns, values = np.asarray(returns, np.float64), np.asarray(values, np.float64)
    return float(1 - (returns - values).var(ddof=1) / (returns.var(ddof=1) + 1e-5))


class ValueObjective:
    """Loss of the critic as a `MicroLoss` of the training engine: of the columns `returns`, `values` (before the step)
    and `loss_mask`.

    `critic` is the group of that name (cliprange_value, loss_agg_mode); the rest as for `ActorObjective`. Metrics:
    critic/vf_loss, critic/vf_clipfrac, critic/vpred_mean.
    """

    def __init__(
        self, critic: CriticConfig, denominators: LossDenominators, tokens_of: Mapping[int, int] | None = None
    ):
        self._critic, self._denominators, self._tokens_of = critic, denominators, tokens_of

    def __call__(self, micro: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        """Scalar to differentiate, already divided by the global counts, and metrics as (sum, weight)."""
        assert micro.values is not None
        predicted = micro.values
        columns = MicroBatchColumns(micro.rows, predicted)
        mask = columns.loss_mask
        loss, clipped = value_loss(
            predicted,
            columns["returns"],
            columns["values"],
            mask,
            columns.rows,
            self._critic.cliprange_value,
            self._critic.loss_agg_mode,
            **columns.batch_info(self._denominators, self._tokens_of),
        )
        tokens = float(mask.sum())
        share = tokens / self._denominators.tokens if self._denominators.tokens else 0.0
        return loss, {
            "critic/vf_loss": (float(loss.detach()), share),
            "critic/vf_clipfrac": (float(clipped) * tokens, tokens),
            "critic/vpred_mean": (float((predicted.detach() * mask).sum()), tokens),
        }
