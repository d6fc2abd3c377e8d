"""Policy losses that keep the policy's entropy up by what they do with a few tokens of a mini-batch.

Which tokens is decided for the whole mini-batch, on all ranks, before its update and with the weights of that moment:
the column `mini_batch_values` says what becomes of each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from verl.algorithms.policy_loss import CLIP_KEYS, LOG_RATIO_LIMIT, LossInputs, PolicyLoss, clip_bounds, vanilla
from verl.algorithms.registry import LOSSES, MiniBatchTokens, WholeMiniBatch
from verl.config.schema.base import setting

# -- tokens whose log-prob and advantage have a high covariance ------------------------------------------------------
#
# v = (A − mean A)·(logp − mean logp), means over the tokens in the loss of the mini-batch.


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


def _to_zero(tokens: MiniBatchTokens, config: Mapping[str, Any]) -> np.ndarray:
    settings, (low, high), mask = setting(config, "policy_loss"), clip_bounds(config), tokens.loss_mask
    v, advantages = covariances(tokens), tokens.advantages[mask]
    difference = (tokens.log_probs - tokens.old_log_probs)[mask]
    ratio = np.exp(np.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    by_ppo = -advantages * np.clip(ratio, 1 - low, 1 + high) > -advantages * ratio
    within = (v > setting(settings, "clip_cov_lb", 1.0)) & (v < setting(settings, "clip_cov_ub", 5.0))
    candidates = np.flatnonzero(within & ~by_ppo)
    count = max(1, int(setting(settings, "clip_cov_ratio", 2e-4) * len(v)))
    return _chosen(tokens, np.random.default_rng(tokens.seed).permutation(candidates)[:count])


def _to_penalise(tokens: MiniBatchTokens, config: Mapping[str, Any]) -> np.ndarray:
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

    Source: arXiv 2505.22617.
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
    mean |d|.

    Source: arXiv 2505.22617.
    """
    coefficient = float(setting(setting(inputs.config, "policy_loss"), "ppo_kl_coef", 0.1))
    distance = inputs.log_ratio().abs()
    penalty = coefficient * distance * inputs.of_mini_batch(TO_PENALISE)
    loss = inputs.policy_term(-inputs.advantages * inputs.ratio() + penalty)
    return loss, inputs.metrics(ppo_kl=distance)


# -- tokens of a high surprisal --------------------------------------------------------------------------------------


def _surprisal_weights(tokens: MiniBatchTokens, config: Mapping[str, Any]) -> np.ndarray:
    """ω of `stare`, [ΣL]. ValueError without entropies."""
    if tokens.entropy is None:
        raise ValueError("loss_mode=stare needs the entropy of every token, which only the trainer knows")
    settings, mask, out = setting(config, "policy_loss"), tokens.loss_mask, np.ones(len(tokens.loss_mask))
    if not mask.any() or tokens.entropy[mask].mean() >= float(setting(settings, "stare_target_entropy", 0.3)):
        return out
    share = float(setting(settings, "stare_top_p_ratio", 0.1))
    for sign, key, default in ((1, "stare_reweight_w", 1.1), (-1, "stare_reweight_m", 1.0)):
        numbers = np.flatnonzero(mask & (np.sign(tokens.advantages) == sign))
        unlikely = numbers[np.argsort(tokens.log_probs[numbers], kind="stable")]
        out[unlikely[: max(1, int(share * len(numbers)))]] = float(setting(settings, key, default))
    return out


SURPRISAL_WEIGHTS = WholeMiniBatch(_surprisal_weights)
STARE_KEYS = ("stare_top_p_ratio", "stare_reweight_w", "stare_reweight_m", "stare_target_entropy")


@LOSSES.register(
    "stare",
    needs={"old_log_probs", "entropy"},
    whole=SURPRISAL_WEIGHTS,
    keys=[*CLIP_KEYS, "clip_ratio_c", *(f"policy_loss.{name}" for name in STARE_KEYS)],
)
def stare(inputs: LossInputs) -> PolicyLoss:
    """`vanilla` with A·ω for A: while the mini-batch's mean entropy before the step's updates is below
    stare_target_entropy, ω = stare_reweight_w for the max(1, ⌊stare_top_p_ratio·n⌋) of the n tokens with A > 0 that
    have the lowest log-prob, stare_reweight_m for those of the tokens with A < 0, else 1.

    stare_reweight_m = 1 is the authors' variant O1, 0.9 their C2; for models of 14 B and more they take 1.05 and 0.95.
    Source: STARE, arXiv 2606.19236, and the README of the authors' code.
    """
    return vanilla(replace(inputs, advantages=inputs.advantages * inputs.of_mini_batch(SURPRISAL_WEIGHTS)))
