"""Policy losses: per-token terms from ratios and advantages, aggregated over the mini-batch. One function each.

Signature of every loss: (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
rollout_is_weights) → (loss, metrics); tensors [b, L], `response_mask` is the loss mask. Metrics are floats
of this micro-batch, averaged by token count.
"""

from __future__ import annotations

from typing import Any

import torch

from verl.algorithms.aggregate import agg_loss, masked, masked_mean
from verl.algorithms.importance import Tokens, Weighting, importance_weights, parse_correction
from verl.algorithms.registry import LOSSES
from verl.algorithms.settings import setting

LOG_RATIO_LIMIT = 20.0
CLIP_RATIO = 0.2
CLIP_RATIO_C = 3.0

PolicyLoss = tuple[torch.Tensor, dict[str, float]]


def clip_bounds(config: Any) -> tuple[float, float]:
    """(ε_lo, ε_hi) of an actor config; each is clip_ratio where it is not set."""
    both = float(setting(config, "clip_ratio", CLIP_RATIO))
    low, high = (float(setting(config, f"clip_ratio_{side}", both)) for side in ("low", "high"))
    if low < 0 or high < 0:
        raise ValueError(f"clip ratios must not be negative: clip_ratio_low={low}, clip_ratio_high={high}")
    return low, high


def denominators_of(config: Any) -> dict[str, Any]:
    """The global counts the trainer hands to a loss as `config.global_batch_info`; {} outside of a trainer."""
    return dict(setting(config, "global_batch_info", {}))


def log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """d = logp − old, 0 where the mask is not set."""
    return masked(log_prob - old_log_prob, mask)


@LOSSES.register("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """Clipped surrogate with separate bounds and dual clip.

    x = max(−Aρ, −A·clip(ρ, 1−ε_lo, 1+ε_hi)); where A < 0 also x = min(x, −A·c). Metrics: share of tokens where
    the clipped term is the larger (pg_clipfrac), share cut by c (pg_clipfrac_lower), mean of old − logp.
    ValueError unless clip_ratio_c > 1.
    Sources: PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729; clip-higher, arXiv 2503.14476.
    """
    low, high = clip_bounds(config)
    cap = float(setting(config, "clip_ratio_c", CLIP_RATIO_C))
    if cap <= 1:
        raise ValueError(f"clip_ratio_c must be greater than 1, not {cap}")
    difference = log_ratio(log_prob, old_log_prob, response_mask)
    ratio = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    larger = torch.maximum(plain, clipped)
    ceiling = -advantages * cap
    cut = (advantages < 0) & (larger > ceiling)
    terms = torch.where(cut, ceiling, larger)
    if rollout_is_weights is not None:
        terms = terms * rollout_is_weights
    loss = agg_loss(terms, response_mask, loss_agg_mode, **denominators_of(config))
    shares = (clipped > plain, cut, -difference)
    clipfrac, lower, kl = _means(shares, response_mask)
    return loss, {"actor/pg_clipfrac": clipfrac, "actor/pg_clipfrac_lower": lower, "actor/ppo_kl": kl}


def compute_policy_loss_reinforce(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """Policy gradient with importance weights instead of a clipped ratio: x = −w·A·logp (w = 1 without weights).

    `old_log_prob` is the sampler's, for actor/ppo_kl = mean of old − logp only.
    Source: Liu, Li et al. 2025, "When Speed Kills Stability".
    """
    terms = -advantages * log_prob
    if rollout_is_weights is not None:
        terms = terms * rollout_is_weights
    loss = agg_loss(terms, response_mask, loss_agg_mode, **denominators_of(config))
    (kl,) = _means((-log_ratio(log_prob, old_log_prob, response_mask),), response_mask)
    return loss, {"actor/pg_clipfrac": 0.0, "actor/pg_clipfrac_lower": 0.0, "actor/ppo_kl": kl}


@LOSSES.register("bypass_mode")
def compute_policy_loss_bypass_mode(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """Two policies: `old_log_prob` is the sampler's. The loss is that of `config.rollout_correction.loss_type`.

    ppo_clip: the configured loss_mode with the ratio to the sampler; weights would count twice and are left out.
    reinforce: `compute_policy_loss_reinforce` with the weights given, else those of `rollout_is` from current over
    sampler, over the tokens given. Rejection is the caller's: it changes the counts of the mini-batch.
    """
    correction = parse_correction(setting(config, "rollout_correction"))
    given = (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config)
    if not correction.reinforce:
        name = setting(setting(config, "policy_loss"), "loss_mode", "vanilla")
        loss = LOSSES.get("vanilla" if name == "bypass_mode" else name)
        return loss(*given, rollout_is_weights=None)  # type: ignore[no-any-return]
    if rollout_is_weights is None and correction.weighting is not None:
        rollout_is_weights = weights_now(log_prob, old_log_prob, response_mask, correction.weighting)
    return compute_policy_loss_reinforce(*given, rollout_is_weights=rollout_is_weights)


@torch.no_grad()
def weights_now(
    log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, policy_mask: torch.Tensor, how: Weighting
) -> torch.Tensor:
    """Importance weights [b, L] of the current policy over the sampler, in the dtype of log_prob, 0 off the mask."""
    mask = policy_mask.bool()
    error = (log_prob.double() - rollout_log_prob.double())[mask].cpu().numpy()
    weights, _ = importance_weights(Tokens.of(error, mask.nonzero()[:, 0].cpu().numpy()), how)
    out = torch.zeros_like(log_prob)
    out[mask] = torch.from_numpy(weights).to(out.device, out.dtype)
    return out


@torch.no_grad()
def _means(values: tuple[torch.Tensor, ...], mask: torch.Tensor) -> list[float]:
    """Mean of each over the masked tokens, read from the device in one go."""
    return torch.stack([masked_mean(v.to(mask.dtype), mask) for v in values]).tolist()  # type: ignore[no-any-return]
