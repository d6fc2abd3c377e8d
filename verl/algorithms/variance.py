"""How much of the policy gradient is signal: proxies of its variance, from Σπ² per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl.trajectory import Trajectory


def variance_proxies(rows: Sequence[Trajectory], gradient_norm: float) -> dict[str, float]:
    """variance_proxy/…, over the responses with a policy token whose log-probs and Σπ² are known; {} where that is
    none.

    A is the mean advantage of a response over its policy tokens, W = Σ_k (1 − 2π_k + Σ_v π(v)²)·c_k² with c the
    importance weight. proxy1_signal_strength: squared gradient norm; proxy2_total_power: mean A²W; proxy3_pure_noise:
    (proxy2 − proxy1) / (N − 1), not below 0; expected_a_squared, expected_w: means of A² and W.
    """
    terms = [
        _power(t)
        for t in rows
        if t.policy_tokens and t.old_log_probs is not None and t.sum_pi_squared is not None
    ]
    if not terms:
        return {}
    squares, weights = np.array(terms).T
    signal, power = gradient_norm**2, float(np.mean(squares * weights))
    return {
        "variance_proxy/proxy1_signal_strength": signal,
        "variance_proxy/proxy2_total_power": power,
        "variance_proxy/proxy3_pure_noise": max(0.0, power - signal) / (len(terms) - 1)
        if len(terms) > 1
        else np.nan,
        "variance_proxy/expected_a_squared": float(squares.mean()),
        "variance_proxy/expected_w": float(weights.mean()),
    }


def _power(t: Trajectory) -> tuple[float, float]:
    """(A², W) of a response."""
    mask = np.asarray(t.response_mask, bool)

    def column(values: Any) -> np.ndarray:
        return np.asarray(values, np.float64)[mask]

    weights = 1 - 2 * np.exp(column(t.old_log_probs)) + column(t.sum_pi_squared)
    if t.is_weights is not None:
        weights = weights * column(t.is_weights) ** 2
    return float(column(t.advantages).mean() ** 2), float(weights.sum())
