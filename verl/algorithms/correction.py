"""How far the sampler is from the trainer: metrics of the two log-probs of the same tokens (metrics.md §6).

e = old − mu per policy token: trainer's log-prob minus sampler's. Importance weights and rejection belong to
a later release; asking for one of their functions says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from verl.algorithms.registry import not_in_release
from verl.trajectory import Trajectory

LIMIT = 20.0
_LATER = (
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
)


def compute_offpolicy_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor | None, response_mask: torch.Tensor
) -> dict[str, float]:
    """Divergence between trainer and sampler over policy tokens; tensors [N, L], computed in float64.

    Names without prefix: kl, k3_kl, {training,rollout}_{ppl,log_ppl}, log_ppl_{diff,abs_diff,diff_max,
    diff_min}, ppl_ratio, chi2_token, chi2_seq. Without the sampler's log-probs only training_ppl and
    training_log_ppl. nan where there is no token.
    """
    mask = response_mask.bool().cpu().numpy()
    answers = np.nonzero(mask)[0]
    old = old_log_prob.detach().double().cpu().numpy()[mask]
    mu = None if rollout_log_prob is None else rollout_log_prob.detach().double().cpu().numpy()[mask]
    return _divergence(old, mu, answers)


def sampler_metrics(rows: Iterable[Trajectory]) -> dict[str, float]:
    """Every metric of metrics.md §6 that compares log-probs, over the rows that have both of them.

    training/rollout_probs_diff_{valid,max,mean,std}, training/rollout_actor_probs_pearson_corr,
    training/rollout_logprob_abs_diff/{mean,max,p99}, rollout_corr/…; policy tokens only, float64.
    """
    both = [r for r in rows if r.old_log_probs is not None and r.rollout_log_probs is not None]
    masks = [np.asarray(r.response_mask, dtype=bool) for r in both]
    old, mu = (
        np.concatenate([np.zeros(0), *(getattr(r, c)[m] for r, m in zip(both, masks, strict=True))])
        for c in ("old_log_probs", "rollout_log_probs")
    )
    answers = np.repeat(np.arange(len(both)), [int(m.sum()) for m in masks])
    corrections = _divergence(old, mu, answers)
    return _agreement(old, mu) | {f"rollout_corr/{name}": value for name, value in corrections.items()}


def _agreement(old: np.ndarray, mu: np.ndarray) -> dict[str, float]:
    """Probabilities and log-probs of the same tokens side by side; both float64 [tokens]."""
    nan, count = float("nan"), len(old)
    ours, theirs = np.exp(old), np.exp(mu)
    apart, logs = np.abs(ours - theirs), np.abs(old - mu)
    varied = count > 1 and ours.std() > 0 and theirs.std() > 0
    return {
        "training/rollout_probs_diff_valid": 1 if count else 0,
        "training/rollout_probs_diff_max": float(apart.max()) if count else nan,
        "training/rollout_probs_diff_mean": float(apart.mean()) if count else nan,
        "training/rollout_probs_diff_std": float(apart.std(ddof=1)) if count > 1 else nan,
        "training/rollout_actor_probs_pearson_corr": float(np.corrcoef(ours, theirs)[0, 1])
        if varied
        else nan,
        "training/rollout_logprob_abs_diff/mean": float(logs.mean()) if count else nan,
        "training/rollout_logprob_abs_diff/max": float(logs.max()) if count else nan,
        "training/rollout_logprob_abs_diff/p99": float(np.percentile(logs, 99)) if count else nan,
    }


def _divergence(old: np.ndarray, mu: np.ndarray | None, answers: np.ndarray) -> dict[str, float]:
    """`answers` [tokens] says which answer a token belongs to; answers without tokens do not appear."""
    _, owner = np.unique(answers, return_inverse=True)
    size = np.bincount(owner)

    def per_answer(values: np.ndarray) -> np.ndarray:
        return np.bincount(owner, weights=values, minlength=len(size))

    mean_old = per_answer(old) / size
    with np.errstate(over="ignore"):
        found = {"training_ppl": _mean(np.exp(-mean_old)), "training_log_ppl": _mean(-mean_old)}
        if mu is None:
            return found
        error, mean_mu = old - mu, per_answer(mu) / size
        difference = mean_mu - mean_old
        bounded = np.clip(error, -LIMIT, LIMIT)
        whole = np.clip(per_answer(error), -LIMIT, LIMIT)
        nan = float("nan")
        return found | {
            "kl": _mean(-error),
            "k3_kl": _mean(np.expm1(error) - error),
            "rollout_ppl": _mean(np.exp(-mean_mu)),
            "rollout_log_ppl": _mean(-mean_mu),
            "log_ppl_diff": _mean(difference),
            "log_ppl_abs_diff": _mean(np.abs(difference)),
            "log_ppl_diff_max": float(difference.max()) if len(size) else nan,
            "log_ppl_diff_min": float(difference.min()) if len(size) else nan,
            "ppl_ratio": _mean(np.exp(difference)),
            "chi2_token": _mean(np.expm1(2 * bounded)),
            "chi2_seq": _mean(np.expm1(2 * whole)),
        }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return not_in_release(name, "There is: compute_offpolicy_metrics (metrics only).")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
