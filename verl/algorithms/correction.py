"""Sampler against trainer on the same tokens: how far apart they are, and the correction for it.

e = old − mu per policy token: trainer's log-prob minus sampler's. The metrics are metrics.md §6, the correction is
algorithms.md §7; its arithmetic is in `verl.algorithms.importance`. Plug-ins reach this module as
`verl.trainer.ppo.rollout_corr_helper`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from verl.algorithms.agreement import Agreement
from verl.algorithms.importance import (
    Correction,
    Tokens,
    importance_weights,
    parse_rules,
    parse_weighting,
    rejection,
)
from verl.trajectory import Trajectory


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
    return Agreement.over(pairs, bool(mu is not None)).divergence()


def sampler_metrics(rows: Iterable[Trajectory]) -> dict[str, float]:
    """Every metric of metrics.md §6 that compares log-probs, over the rows that have both of them.

    training/rollout_probs_diff_{valid,max,mean,std}, training/rollout_actor_probs_pearson_corr,
    training/rollout_logprob_abs_diff/{mean,max,p99}, rollout_corr/…; policy tokens only, float64.
    """
    pairs = (
        (_policy(row.old_log_probs, row), _policy(row.rollout_log_probs, row))
        for row in rows
        if row.old_log_probs is not None and row.rollout_log_probs is not None and row.policy_tokens
    )
    found = Agreement.over(pairs, True)
    corrections = {f"rollout_corr/{name}": value for name, value in found.divergence().items()}
    return found.closeness() | corrections


def _policy(values: np.ndarray, row: Trajectory) -> np.ndarray:
    """The row's values of policy tokens."""
    mask = np.asarray(row.response_mask, bool)
    return values if mask.all() else values[mask]


def correct(
    rows: Sequence[Trajectory], correction: Correction, current: Sequence[np.ndarray] | None = None
) -> dict[str, float]:
    """Fill `is_weights` and take what is rejected out of `loss_mask`; returns metrics, `rollout_corr/…`.

    Rows need `rollout_log_probs` and, unless `current` gives the trainer's log-probs ([L] each), `old_log_probs`;
    ValueError naming the first that lacks one. Statistics are over the policy tokens of all rows. With
    `correction.bypass` weights are kept only for loss_type=reinforce: in the ratio they would count twice.
    """
    masks = [np.asarray(row.response_mask, bool) for row in rows]
    errors = _errors(rows, masks, current)
    responses = np.repeat(np.arange(len(rows)), [int(mask.sum()) for mask in masks])
    tokens = Tokens.of(np.concatenate([np.zeros(0), *errors]), responses)
    metrics: dict[str, float] = {}
    if correction.weighting is not None and (correction.reinforce or not correction.bypass):
        weights, found = importance_weights(tokens, correction.weighting)
        metrics |= found
        for row, mask, part in zip(rows, masks, _split(weights, masks), strict=True):
            whole = np.zeros(row.length, np.float32)
            whole[mask] = part
            row.is_weights = whole
    if correction.rules:
        kept, found = rejection(tokens, correction.rules)
        metrics |= found
        for row, mask, part in zip(rows, masks, _split(kept, masks), strict=True):
            keep = np.zeros(row.length, bool)
            keep[mask] = part
            row.loss_mask = keep if row.loss_mask is None else row.loss_mask & keep
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def weights_of_the_update(rows: Sequence[Trajectory], correction: Correction) -> dict[str, float]:
    """Metrics, `rollout_corr/…`, of weights that the loss computed by itself (bypass mode with loss_type=reinforce).

    The rows' `old_log_probs` are those of the update's own first pass. {} where `correct` has said it all.
    """
    how = correction.weighting
    mine = correction.bypass and correction.reinforce and not correction.needs_mini_batch_pass
    rows = [row for row in rows if row.old_log_probs is not None and row.policy_tokens]
    if how is None or not mine or not rows:
        return {}
    masks = [np.asarray(row.response_mask, bool) for row in rows]
    errors = np.concatenate(_errors(rows, masks, None))
    responses = np.repeat(np.arange(len(rows)), [int(mask.sum()) for mask in masks])
    _, metrics = importance_weights(Tokens.of(errors, responses), how)
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _errors(
    rows: Sequence[Trajectory], masks: Sequence[np.ndarray], current: Sequence[np.ndarray] | None
) -> list[np.ndarray]:
    """e of the policy tokens of each row, float64."""
    out = []
    for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        ours = row.old_log_probs if current is None else current[number]
        for name, column in (("old_log_probs", ours), ("rollout_log_probs", row.rollout_log_probs)):
            if column is None:
                raise ValueError(
                    f"algorithm.rollout_correction: response {row.index} of {row.uid} has no {name}"
                    + ("; its agent loop must return response_logprobs" if name.startswith("rollout") else "")
                )
        assert ours is not None and row.rollout_log_probs is not None
        out.append(np.asarray(ours, np.float64)[mask] - np.asarray(row.rollout_log_probs, np.float64)[mask])
    return out


def _split(flat: np.ndarray, masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    return np.split(flat, np.cumsum([int(mask.sum()) for mask in masks])[:-1]) if masks else []


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
    how = parse_weighting(rollout_is, rollout_is_threshold, rollout_is_batch_normalize)
    tokens, mask = _flat(log_ratio, response_mask)
    weights, metrics = importance_weights(tokens, how)
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
    kept, metrics = rejection(tokens, parse_rules(rollout_rs, rollout_rs_threshold))
    return _rectangle(kept, mask, response_mask), metrics


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
    from verl.data_proto import DataProto

    log_ratio = old_log_prob.detach() - rollout_log_prob.detach()
    metrics = compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    weights, mask = None, response_mask
    if rollout_is:
        values, found = compute_rollout_correction_weights(
            log_ratio, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        weights, metrics = DataProto.from_dict({"rollout_is_weights": values}), metrics | found
    if rollout_rs:
        mask, found = compute_rollout_rejection_mask(
            log_ratio, response_mask, rollout_rs, rollout_rs_threshold
        )
        metrics |= found
    return weights, mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _flat(log_ratio: torch.Tensor, response_mask: torch.Tensor) -> tuple[Tokens, np.ndarray]:
    mask = response_mask.bool().cpu().numpy()
    return Tokens.of(log_ratio.detach().double().cpu().numpy()[mask], np.nonzero(mask)[0]), mask


def _rectangle(values: np.ndarray, mask: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    out = np.zeros(mask.shape)
    out[mask] = values
    return torch.from_numpy(out).to(like.device, like.dtype)
