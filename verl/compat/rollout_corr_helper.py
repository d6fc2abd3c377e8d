"""Correction and divergence on tensors, as users call them: `verl.trainer.ppo.rollout_corr_helper`.

The loop does the same on its trajectories with `verl.algorithms.correction` and `verl.algorithms.agreement`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl.algorithms.agreement import Agreement
from verl.algorithms.correction import (
    Tokens,
    correction_metrics,
    importance_weights,
    on_tokens,
    parse_rules,
    parse_weighting,
    rejection,
)

SUPPORTED_ROLLOUT_IS_OPTIONS = {"token", "sequence"}
TOKEN_LEVEL_ROLLOUT_RS_OPTIONS = {"token_k1", "token_k2", "token_k3"}
SUPPORTED_ROLLOUT_RS_OPTIONS = TOKEN_LEVEL_ROLLOUT_RS_OPTIONS | {
    f"seq_{over}_k{k}" for over in ("sum", "mean", "max") for k in (1, 2, 3) if (over, k) != ("max", 1)
}


def compute_offpolicy_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor | None, response_mask: torch.Tensor
) -> dict[str, float]:
    """Divergence between trainer and sampler over policy tokens; tensors [N, L], computed in float64.

    Names without prefix: kl, k3_kl, {training,rollout}_{ppl,log_ppl}, log_ppl_{diff,abs_diff,diff_max,
    diff_min}, ppl_ratio, chi2_token, chi2_seq. Without the sampler's log-probs only training_ppl and
    training_log_ppl. nan where there is no token.
    """
    mask = response_mask.bool().cpu().numpy()
    old = old_log_prob.detach().double().cpu().numpy()
    mu = None if rollout_log_prob is None else rollout_log_prob.detach().double().cpu().numpy()
    chosen = [i for i in range(len(mask)) if mask[i].any()]
    pairs = ((old[i][mask[i]], None if mu is None else mu[i][mask[i]]) for i in chosen)
    return Agreement.over(pairs).divergence()


def compute_rollout_correction_weights(
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Importance weights [N, L] in the dtype of log_ratio = old − mu, 0 where the mask is; metrics without prefix.

    ValueError for a kind or a threshold that cannot be.
    """
    if isinstance(rollout_is_threshold, bool):
        raise TypeError(f"rollout_is_threshold={rollout_is_threshold}: a number or bounds, not a boolean")
    weighting = parse_weighting(rollout_is, rollout_is_threshold, rollout_is_batch_normalize)
    tokens, mask = _flat(log_ratio, response_mask)
    weights, metrics = importance_weights(tokens, weighting)
    return _rectangle(weights, mask, log_ratio), metrics


def compute_rollout_rejection_mask(
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: float | str | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """response_mask [N, L] without what `rollout_rs` drops, in its dtype; metrics without prefix.

    ValueError for a name or a threshold that cannot be.
    """
    tokens, mask = _flat(log_ratio, response_mask)
    accepted, metrics = rejection(tokens, parse_rules(rollout_rs, rollout_rs_threshold))
    return _rectangle(accepted, mask, response_mask), metrics


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> tuple[Any, torch.Tensor, dict[str, float]]:
    """Both, and the divergence: (DataProto with `rollout_is_weights` or None, mask [N, L], `rollout_corr/…`)."""
    from verl.compat.data_proto import DataProto

    log_ratio = old_log_prob.detach() - rollout_log_prob.detach()
    metrics = compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    weights, mask = None, response_mask
    if rollout_is:
        values, new_metrics = compute_rollout_correction_weights(
            log_ratio, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        weights, metrics = DataProto.from_dict({"rollout_is_weights": values}), metrics | new_metrics
    if rollout_rs:
        arguments = log_ratio, response_mask, rollout_rs, rollout_rs_threshold
        mask, new_metrics = compute_rollout_rejection_mask(*arguments)
        metrics |= new_metrics
    return weights, mask, correction_metrics(metrics)


def compute_is_metrics(
    rollout_is_weights: torch.Tensor,
    log_ratio_for_metrics: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: str,
    rollout_is_threshold: float | str,
    raw_rollout_is_weights: torch.Tensor | None = None,
) -> dict[str, float]:
    """Metrics without prefix of the weights that the log-ratios [N, L] give; `rollout_is_weights` follow from them.

    `raw_rollout_is_weights` [N, L]: the weights before they were truncated (of kind sequence one value a row), which
    then stand for the log-ratios; rollout_is_{max,min} are theirs.
    """
    settings, raw = (response_mask, rollout_is, rollout_is_threshold), raw_rollout_is_weights
    if raw is None:
        return compute_rollout_correction_weights(log_ratio_for_metrics, *settings)[1]
    tokens = response_mask.sum(-1, keepdim=True).clamp(min=1) if rollout_is == "sequence" else 1
    metrics = compute_rollout_correction_weights(raw.double().log() / tokens, *settings)[1]
    values = raw[response_mask.bool()]
    extremes = {"rollout_is_max": float(values.max()), "rollout_is_min": float(values.min())} if len(values) else {}
    return metrics | extremes


def _flat(log_ratio: torch.Tensor, response_mask: torch.Tensor) -> tuple[Tokens, np.ndarray]:
    mask = response_mask.bool().cpu().numpy()
    return Tokens.of(log_ratio.detach().double().cpu().numpy()[mask], np.nonzero(mask)[0]), mask


def _rectangle(values: np.ndarray, mask: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(on_tokens(values, mask, np.float64)).to(like.device, like.dtype)
