"""PF-PPO: a step's responses drawn again in proportion to a weight of their score (algorithms.md §3)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from verl.config.schema.base import setting
from verl.trajectory import Batch, Trajectory

METHODS = ("pow", "max_min", "max_random")


def resampling_weights(scores: np.ndarray, method: str, power: float) -> np.ndarray:
    """Weight of each score, float64 [N]. ValueError for an unknown method.

    pow: |score|^power. max_min: 1 for the largest and the smallest of the batch, else 0. max_random: 0.4 for the largest, else 0.1.
    """
    if method == "pow":
        return np.abs(scores) ** power
    if method == "max_min":
        return ((scores == scores.max()) | (scores == scores.min())).astype(np.float64)
    if method == "max_random":
        return np.where(scores == scores.max(), 0.4, 0.1)
    raise ValueError(f"unknown pf_ppo.reweight_method {method!r}; there are: {', '.join(METHODS)}")


def resample(batch: Batch, algorithm: Any, seed: int | Sequence[int]) -> tuple[Batch, dict[str, float]]:
    """As many scored responses as the batch has, drawn with replacement with probability ∝ weight + 1e-8, after advantages.

    They keep the batch's order. A response that is drawn again is a trajectory of its own, over the same arrays. Metrics:
    training/pf_ppo/unique_ratio, distinct responses of those drawn; nan without a scored one. Source: arXiv 2409.06957.
    """
    rows = [t for t in batch if t.score is not None and np.isfinite(t.score)]
    if not rows:
        return batch, {"training/pf_ppo/unique_ratio": float("nan")}
    own = setting(algorithm, "pf_ppo")
    method, power = setting(own, "reweight_method", "pow"), setting(own, "weight_pow", 2.0)
    weights = resampling_weights(np.array([t.score for t in rows], np.float64), method, power) + 1e-8
    drawn = np.random.default_rng(seed).choice(len(rows), size=len(rows), p=weights / weights.sum())
    chosen = [_copy(rows[i]) for i in np.sort(drawn)]
    ratio = len(np.unique(drawn)) / len(rows)
    return Batch(chosen, batch.meta), {"training/pf_ppo/unique_ratio": ratio}


def _copy(trajectory: Trajectory) -> Trajectory:
    out = copy.copy(trajectory)
    out.segments = [copy.copy(segment) for segment in trajectory.segments]
    for segment in out.segments:
        segment.columns, segment.trajectory = dict(segment.columns), out
    return out
