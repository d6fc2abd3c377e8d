"""DPPO: a policy gradient without the tokens that would move the policy further than a bound on its divergence from the old one.

Meant for `rollout_correction.bypass_mode`, so that the old policy is the sampler's. Source: DPPO, arXiv 2602.04879.
"""

from __future__ import annotations

import torch

from verl.algorithms.policy_loss import CLIP_KEYS, LossInputs, PolicyLoss, clip_bounds, public_form
from verl.algorithms.registry import LOSSES
from verl.config.schema.base import setting

CLIP_RATIO_C = 20.0


def _without_blocked(inputs: LossInputs, allowed: torch.Tensor) -> PolicyLoss:
    """x = −A·sg(min(ρ, c))·logp·v, v [b, W] True where a token may move. Blocked tokens stay in T."""
    cap = float(setting(inputs.config, "clip_ratio_c", CLIP_RATIO_C))
    ratio = inputs.ratio().detach()
    terms = -inputs.advantages * ratio.clamp(max=cap) * inputs.log_probs
    loss = inputs.policy_term(torch.where(allowed, terms, torch.zeros_like(terms)))
    return loss, inputs.metrics(pg_clipfrac=~allowed, pg_clipfrac_lower=ratio > cap)


@LOSSES.register("dppo_tv", keys=[*CLIP_KEYS, "clip_ratio_c"])
@public_form
def compute_policy_loss_dppo_tv(inputs: LossInputs) -> PolicyLoss:
    """x = −A·sg(min(ρ, c))·logp·v, c = clip_ratio_c (20); v = [π − π_old ≤ ε_hi] where A > 0, else [π − π_old ≥ −ε_lo].

    clip_ratio_low and clip_ratio_high bound the total variation. Metrics: pg_clipfrac, share blocked; pg_clipfrac_lower, share
    with ρ > c.
    """
    low, high = clip_bounds(inputs.config)
    with torch.no_grad():
        moved = inputs.log_probs.exp() - inputs.old_log_probs.exp()
        allowed = torch.where(inputs.advantages > 0, moved <= high, moved >= -low)
    return _without_blocked(inputs, allowed)


@LOSSES.register("dppo_kl", keys=[*CLIP_KEYS, "clip_ratio_c"])
@public_form
def compute_policy_loss_dppo_kl(inputs: LossInputs) -> PolicyLoss:
    """As dppo_tv with v = [D ≤ ε_hi or π ≤ π_old] where A > 0, else [D ≤ ε_lo or π ≥ π_old].

    D = π_old·(old − logp) + (1−π_old)·log((1−π_old+1e-8) / (1−π+1e-8)), the divergence of whether the token is drawn. The paper
    has bounds of 0.05.
    """
    low, high = clip_bounds(inputs.config)
    with torch.no_grad():
        new, old = inputs.log_probs.exp(), inputs.old_log_probs.exp()
        others = (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
        divergence = old * (inputs.old_log_probs - inputs.log_probs) + others
        up = (divergence <= high) | (new <= old)
        down = (divergence <= low) | (new >= old)
        allowed = torch.where(inputs.advantages > 0, up, down)
    return _without_blocked(inputs, allowed)
