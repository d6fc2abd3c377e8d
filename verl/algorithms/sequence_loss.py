"""Policy losses whose ratio is that of a whole response, over all its segments.

gspo: arXiv 2507.18071; geo_mean: arXiv 2507.20673.

A row of `LossInputs.rows` is a segment. Where a trajectory has several, what is summed over all of them comes from the
pass before the mini-batch's update, as the column `mini_batch_values`; otherwise the row says all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl.algorithms.policy_loss import CLIP_KEYS, LossInputs, PolicyLoss, clip_bounds
from verl.algorithms.registry import LOSSES, MiniBatchTokens, WholeMiniBatch
from verl.algorithms.tokens import masked

GSPO_LIMIT = 10.0


def _means(tokens: MiniBatchTokens, values: np.ndarray) -> np.ndarray:
    """For each token the mean of the values [ΣL] over the tokens in the loss of its trajectory; 0 without any."""
    mask, owner = tokens.loss_mask, tokens.trajectory
    sums = np.bincount(owner[mask], weights=values[mask], minlength=owner.max(initial=0) + 1)
    counts = np.bincount(owner[mask], minlength=len(sums))
    return np.asarray((sums / np.maximum(counts, 1))[owner])


def _response_log_ratios(tokens: MiniBatchTokens, config: Any) -> np.ndarray:
    """log q_i on every token of trajectory i."""
    return _means(tokens, tokens.log_probs - tokens.old_log_probs)


@LOSSES.register("gspo", whole=WholeMiniBatch(_response_log_ratios, only_segments=True), keys=CLIP_KEYS)
def gspo(inputs: LossInputs) -> PolicyLoss:
    """q_i = exp(Σ_t m·d / T_i), q_t = sg(q_i)·exp(logp − sg(logp)) with log q ≤ 10; x = max(−Aq, −A·clip(q, 1−ε_lo,
    1+ε_hi)).

    Metrics: pg_clipfrac, share of tokens where the clipped term is the larger. The paper has ε_lo 3e-4, ε_hi 4e-4,
    aggregated by seq-mean-token-mean. Source: GSPO, arXiv 2507.18071.
    """
    low, high = clip_bounds(inputs.config)
    if "mini_batch_values" in inputs.columns:
        mean = inputs.columns["mini_batch_values"]
    else:
        mean = inputs.rows.spread(inputs.rows.means(inputs.log_ratio(), inputs.loss_mask))
    log_probs = masked(inputs.log_probs, inputs.loss_mask)
    ratio = (mean.detach() + log_probs - log_probs.detach()).clamp(max=GSPO_LIMIT).exp()
    plain = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - low, 1 + high)
    loss = inputs.policy_term(torch.maximum(plain, clipped))
    return loss, inputs.metrics(pg_clipfrac=clipped > plain)


def _response_terms(tokens: MiniBatchTokens, config: Any) -> np.ndarray:
    """Ā_i·ρ_i·w_i of `geo_mean` on every token of trajectory i."""
    low, high = clip_bounds(config)
    difference, advantages = tokens.log_probs - tokens.old_log_probs, tokens.advantages
    limited = np.where(advantages > 0, np.minimum(difference, high), np.maximum(difference, -low))
    exponent = _means(tokens, np.where(advantages == 0, 0.0, limited))
    if tokens.weights is not None:
        with np.errstate(divide="ignore"):
            exponent += _means(tokens, np.log(tokens.weights))
    return _means(tokens, advantages) * np.exp(exponent)


@LOSSES.register("geo_mean", whole=WholeMiniBatch(_response_terms, only_segments=True), keys=CLIP_KEYS)
def geo_mean(inputs: LossInputs) -> PolicyLoss:
    """GMPO: x_i = −Ā_i·ρ_i, one value per response, ρ_i = exp(Σ_t m·d̂ / T_i), Ā_i = Σ_t m·A / T_i; the loss is Σ_i x_i
    / B.

    d̂ = min(d, ε_hi) where A > 0, max(d, −ε_lo) where A < 0, 0 where A = 0. `loss_agg_mode` changes nothing. The
    importance weight of a response is exp(Σ_t m·log w / T_i). Metrics: pg_clipfrac (A > 0) and pg_clipfrac_lower (A <
    0), shares of tokens with d outside [−ε_lo, ε_hi]. The paper has ε = 0.4. Source: GMPO, arXiv 2507.20673.
    """
    low, high = clip_bounds(inputs.config)
    rows, mask, advantages, difference = inputs.rows, inputs.loss_mask, inputs.advantages, inputs.log_ratio()
    limited = torch.where(advantages > 0, difference.clamp(max=high), difference.clamp(min=-low))
    limited = torch.where(advantages == 0, torch.zeros_like(difference), limited)
    tokens = rows.sums(mask).clamp(min=1)
    share = tokens / (tokens if inputs.trajectory_tokens is None else inputs.trajectory_tokens.clamp(min=1))
    exponent = rows.means(limited, mask) * share
    if "mini_batch_values" in inputs.columns:
        whole = rows.means(inputs.columns["mini_batch_values"], mask)
    else:
        whole = rows.means(advantages, mask) * exponent.detach().exp()
        if inputs.rollout_is_weights is not None:
            whole = whole * rows.means(inputs.rollout_is_weights.log(), mask).exp()
    # The value of a response is told by its segments in proportion to their tokens; the gradient of each is whole.
    terms = -whole * (share + (exponent - exponent.detach()).exp() - 1) / tokens
    loss = inputs.aggregate(rows.spread(terms), "seq-mean-token-sum")
    outside = (difference > high) | (difference < -low)
    upper, lower = outside & (advantages > 0), outside & (advantages < 0)
    return loss, inputs.metrics(pg_clipfrac=upper, pg_clipfrac_lower=lower)
