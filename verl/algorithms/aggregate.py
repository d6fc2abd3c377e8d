"""From per-token terms to one number: the aggregation modes, with counts of the whole mini-batch.

Because T and B are counted over the mini-batch before its first micro-batch, the parts of micro-batches and
ranks simply add up: batching changes neither the value nor the gradient.
"""

from __future__ import annotations

import torch

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)

Count = float | torch.Tensor


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` where mask is set, 0 elsewhere, whatever is there (padding may hold NaN). Shapes as given."""
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens with mask set; 0 if there is none. Scalar."""
    return masked(values, mask).sum() / mask.sum().clamp(min=1)


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: float | None = None,
    trajectory_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Aggregate per-token terms [b, L] under a mask [b, L] into a scalar (algorithms.md §4).

    batch_num_tokens is T, the mini-batch's tokens with mask 1; global_batch_size is B, its responses that have
    one; None counts what is given here. loss_scale_factor is H (None: L). trajectory_tokens [b] is T_i, where rows are
    segments of trajectories that have others (None: a row's own tokens). The value is multiplied by
    `dp_size`, for callers whose gradients are averaged over ranks. A mask without a token gives 0.
    Raises ValueError for an unknown mode, and for dp_size > 1 without the count that the mode divides by.
    """
    if loss_agg_mode not in MODES:
        raise ValueError(f"unknown loss_agg_mode {loss_agg_mode!r}; there are: {', '.join(MODES)}")
    terms = masked(loss_mat, loss_mask)
    if loss_agg_mode == "token-sum":
        return terms.sum() * dp_size
    if loss_agg_mode == "token-mean":
        tokens = _count(batch_num_tokens, loss_mask.sum(), "batch_num_tokens", loss_agg_mode, dp_size)
        return terms.sum() / tokens * dp_size
    carrying = (loss_mask.sum(-1) > 0).sum()
    responses = _count(global_batch_size, carrying, "global_batch_size", loss_agg_mode, dp_size)
    if loss_agg_mode == "seq-mean-token-mean":
        tokens = loss_mask.sum(-1) if trajectory_tokens is None else trajectory_tokens
        terms = terms / tokens.unsqueeze(-1).clamp(min=1)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        scale = float(loss_mat.shape[-1] if loss_scale_factor is None else loss_scale_factor)
        if scale <= 0:
            raise ValueError(f"loss_scale_factor must be greater than 0, not {scale}")
        terms = terms / scale
    return terms.sum() / responses * dp_size


def _count(given: Count | None, counted: torch.Tensor, name: str, mode: str, dp_size: int) -> Count:
    """The count to divide by, at least 1: where it is 0 there is nothing to divide either."""
    if given is None:
        if dp_size > 1:
            raise ValueError(
                f"agg_loss in mode {mode!r} needs {name} when dp_size is {dp_size}: "
                "the count over all ranks cannot be seen from one of them"
            )
        given = counted
    return given.clamp(min=1) if isinstance(given, torch.Tensor) else max(given, 1)
