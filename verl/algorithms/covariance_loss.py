"""Policy losses that treat tokens of a high covariance between log-prob and advantage differently: clip_cov, kl_cov.

v = (A − mean A)·(logp − mean logp), means over the tokens in the loss of a whole mini-batch, under the weights before
its update: so which tokens are chosen is decided before, for all ranks (`mini_batch_values`, 1 where a token is).
Source: arXiv 2505.22617.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl.algorithms.policy_loss import (
    CLIP_KEYS,
    LOG_RATIO_LIMIT,
    LossInputs,
    PolicyLoss,
    clip_bounds,
)
from verl.algorithms.registry import LOSSES, MiniBatchTokens, WholeMiniBatch
from verl.config.schema.base import setting


def covariances(tokens: MiniBatchTokens) -> np.ndarray:
    """v of the tokens in the loss, [T]."""
    advantages, log_probs = tokens.advantages[tokens.loss_mask], tokens.log_probs[tokens.loss_mask]
    if not len(advantages):
        return advantages
    return (advantages - advantages.mean()) * (log_probs - log_probs.mean())


def _chosen(tokens: MiniBatchTokens, numbers: np.ndarray) -> np.ndarray:
    """1 for the tokens in the loss of these numbers, 0 for all others, [ΣL]."""
    out = np.zeros(len(tokens.loss_mask))
    out[np.flatnonzero(tokens.loss_mask)[numbers]] = 1
    return out


def _to_zero(tokens: MiniBatchTokens, config: Any) -> np.ndarray:
    settings, (low, high), mask = setting(config, "policy_loss"), clip_bounds(config), tokens.loss_mask
    v, advantages = covariances(tokens), tokens.advantages[mask]
    difference = (tokens.log_probs - tokens.old_log_probs)[mask]
    ratio = np.exp(np.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    by_ppo = -advantages * np.clip(ratio, 1 - low, 1 + high) > -advantages * ratio
    within = (v > setting(settings, "clip_cov_lb", 1.0)) & (v < setting(settings, "clip_cov_ub", 5.0))
    candidates = np.flatnonzero(within & ~by_ppo)
    count = max(1, int(setting(settings, "clip_cov_ratio", 2e-4) * len(v)))
    return _chosen(tokens, np.random.default_rng(tokens.seed).permutation(candidates)[:count])


def _to_penalise(tokens: MiniBatchTokens, config: Any) -> np.ndarray:
    v = covariances(tokens)
    count = max(1, int(setting(setting(config, "policy_loss"), "kl_cov_ratio", 2e-4) * len(v)))
    return _chosen(tokens, np.argsort(-v, kind="stable")[:count])


CLIP_COV_KEYS = ("policy_loss.clip_cov_ratio", "policy_loss.clip_cov_lb", "policy_loss.clip_cov_ub")
KL_COV_KEYS = ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef")
TO_ZERO, TO_PENALISE = WholeMiniBatch(_to_zero), WholeMiniBatch(_to_penalise)


@LOSSES.register("clip_cov", needs={"old_log_probs"}, whole=TO_ZERO, keys=[*CLIP_KEYS, *CLIP_COV_KEYS])
def clip_cov(inputs: LossInputs) -> PolicyLoss:
    """x = max(−Aρ, −A·clip(ρ, 1−ε_lo, 1+ε_hi)), and 0 for max(1, ⌊clip_cov_ratio·T⌋) tokens, drawn with the step's seed
    from those with clip_cov_lb < v < clip_cov_ub that the clip does not hold already. Metrics: pg_clipfrac, share set
    to 0.
    """
    low, high = clip_bounds(inputs.config)
    ratio, advantages = inputs.ratio(), inputs.advantages
    terms = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    zero = inputs.of_mini_batch(TO_ZERO) > 0
    loss = inputs.policy_term(torch.where(zero, torch.zeros_like(terms), terms))
    return loss, inputs.metrics(pg_clipfrac=zero)


@LOSSES.register("kl_cov", needs={"old_log_probs"}, whole=TO_PENALISE, keys=KL_COV_KEYS)
def kl_cov(inputs: LossInputs) -> PolicyLoss:
    """x = −Aρ, and −Aρ + ppo_kl_coef·|d| for the max(1, ⌊kl_cov_ratio·T⌋) tokens of the largest v. Metrics: ppo_kl,
    mean |d|."""
    coefficient = float(setting(setting(inputs.config, "policy_loss"), "ppo_kl_coef", 0.1))
    distance = inputs.log_ratio().abs()
    penalty = coefficient * distance * inputs.of_mini_batch(TO_PENALISE)
    loss = inputs.policy_term(-inputs.advantages * inputs.ratio() + penalty)
    return loss, inputs.metrics(ppo_kl=distance)
