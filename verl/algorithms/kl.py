"""KL between two policies from the log-probs of sampled tokens: estimators, the reward penalty, its coefficient.

Estimators: J. Schulman, "Approximating KL divergence" (2020). Adaptive coefficient: arXiv 1909.08593.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from verl.algorithms.flat_tokens import Rows, masked
from verl.config.schema.base import setting

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0

_CANONICAL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def canonical(kl_penalty: str) -> tuple[str, bool]:
    """(k1 | abs | k2 | k3, whether the gradient is k2's) of an estimator's name.

    ValueError for `full`, which needs all logits, and for an unknown name.
    """
    name, straight_through = kl_penalty.removesuffix("+"), kl_penalty.endswith("+")
    if name in _CANONICAL:
        return _CANONICAL[name], straight_through
    reason = "needs the logits of the whole vocabulary" if name == "full" else "is not known"
    names = ", ".join(_CANONICAL)
    raise ValueError(f"KL estimator {kl_penalty!r} {reason}; there are: {names}, each also with a final '+'")


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    """Per-token estimate of KL(π‖ref) with u = logprob − ref_logprob, shape and dtype as given.

    k1 (kl): u. abs: |u|. k2 (mse): u²/2. k3 (low_var_kl): exp(−u) + u − 1 with u limited to ±20 and the value
    to ±10. With a final "+": that value, and the gradient of k2.
    """
    name, straight_through = canonical(kl_penalty)
    difference = logprob - ref_logprob
    value = _estimate(difference, name)
    if not straight_through:
        return value
    surrogate = _estimate(difference, "k2")
    return surrogate - surrogate.detach() + value.detach()


def _estimate(difference: torch.Tensor, name: str) -> torch.Tensor:
    if name == "k1":
        return difference
    if name == "abs":
        return difference.abs()
    if name == "k2":
        return difference.square() / 2
    limited = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return _k3(limited).clamp(-K3_LIMIT, K3_LIMIT)


def _k3(limited: torch.Tensor) -> torch.Tensor:
    # expm1 keeps the digits that exp(−u) − 1 loses where u is small, which is nearly everywhere.
    return torch.expm1(-limited) + limited


@torch.no_grad()
def clipped_tokens(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    """Bool, shape as given: tokens whose estimate was limited (k3 only; nothing else is)."""
    difference = logprob - ref_logprob
    if canonical(kl_penalty)[0] != "k3":
        return torch.zeros_like(difference, dtype=torch.bool)
    limited = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (difference != limited) | (_k3(limited).abs() > K3_LIMIT)


@torch.no_grad()
def charge_kl(
    token_rewards: torch.Tensor,
    old_log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    rows: Rows,
    beta: float,
    name: str = "kl",
) -> tuple[torch.Tensor, dict[str, float]]:
    """Token rewards minus β·KL(old‖ref) on policy tokens. All tensors [T], float64; a row is a response.

    Returns new rewards and `actor/reward_kl_penalty` (mean over responses that have policy tokens of the mean over
    those tokens; nan if there is none) with `actor/reward_kl_penalty_coeff` (β).
    """
    estimate = masked(kl_penalty(old_log_probs, ref_log_probs, name), response_mask)
    tokens = rows.sums(response_mask.double())
    present = tokens > 0
    mean = (rows.sums(estimate)[present] / tokens[present]).mean()
    metrics = {"actor/reward_kl_penalty": float(mean), "actor/reward_kl_penalty_coeff": float(beta)}
    return token_rewards - beta * estimate, metrics


class FixedKLController:
    """β that stays as it is."""

    type = "fixed"

    def __init__(self, kl_coef: float):
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to do: the coefficient is fixed."""

    def state_dict(self) -> dict[str, Any]:
        """{"type": fixed or adaptive, "value": β}."""
        return {"type": self.type, "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is taken over: the coefficient is the configured one, also after a resume."""


class AdaptiveKLController(FixedKLController):
    """β that moves so that the KL stays near a target (arXiv 1909.08593)."""

    type = "adaptive"

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float):
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(
                "an adaptive KL coefficient needs target_kl > 0 and horizon > 0, "
                f"not target_kl={target_kl}, horizon={horizon}"
            )
        super().__init__(init_kl_coef)
        self.target = float(target_kl)
        self.horizon = float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """After a step with `n_steps` responses: β ← β·(1 + clip(KL/target − 1, ±0.2)·N/horizon).

        A KL that is nan (no response had a token) leaves β alone.
        """
        if current_kl != current_kl:
            return
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take β over, if it was an adaptive controller that saved it."""
        if state["type"] == "adaptive":
            self.value = float(state["value"])


KLController = FixedKLController


def get_kl_controller(kl_ctrl: Mapping[str, Any]) -> KLController:
    """The controller that `algorithm.kl_ctrl` (type, kl_coef, horizon, target_kl) describes."""
    kind = setting(kl_ctrl, "type", "fixed")
    coefficient = setting(kl_ctrl, "kl_coef", 0.001)
    if kind == "fixed":
        return FixedKLController(coefficient)
    if kind == "adaptive":
        target, horizon = setting(kl_ctrl, "target_kl", 0.1), setting(kl_ctrl, "horizon", 10000)
        return AdaptiveKLController(coefficient, target, horizon)
    raise ValueError(f"unknown kl_ctrl.type {kind!r}; there are: fixed, adaptive")
