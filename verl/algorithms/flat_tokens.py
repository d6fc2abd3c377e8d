"""Flat tokens: the response tokens of several rows, one row after the other, without padding, and sums over them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from verl.config.schema.actor import AGG_MODES as MODES

Count = float | Tensor


class Rows:
    """Where the rows of T flat tokens begin and end. A row is a segment, or a response of a padded batch.

    cu_seqlens  int64 [b + 1], on the host: tokens of row i are cu_seqlens[i] … cu_seqlens[i + 1] − 1
    device      where the tokens are
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray, device: torch.device | str = "cpu"):
        self.lengths = np.asarray(lengths, np.int64)
        self.cu_seqlens = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])
        self.device = torch.device(device)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Tokens of the longest row, at least 1."""
        return int(self.lengths.max(initial=1))

    @cached_property
    def index(self) -> Tensor:
        """Row of each token, int64 [T]."""
        return torch.from_numpy(np.repeat(np.arange(len(self)), self.lengths)).to(self.device)

    def sums(self, values: Tensor) -> Tensor:
        """Sum over each row, [b], of values [T]; float32 of booleans and of 16 bits, which cannot count far."""
        if values.dtype in (torch.bool, torch.float16, torch.bfloat16):
            values = values.float()
        return values.new_zeros(len(self)).index_add(0, self.index, values)

    def means(self, values: Tensor, mask: Tensor) -> Tensor:
        """Mean over the tokens of each row whose mask is set, [b], of values [T]; 0 without one."""
        return self.sums(masked(values, mask)) / self.sums(mask).clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """The values [b] of the rows on each of their tokens, [T]."""
        return values[self.index]


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is set, 0 elsewhere, whatever is there (padding may hold NaN). Shapes as given."""
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean where the mask is set; 0 without a token."""
    return masked(values, mask).sum() / mask.sum().clamp(min=1)


def aggregate(
    terms: Tensor,
    loss_mask: Tensor,
    rows: Rows,
    mode: str,
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: float | None = None,
    trajectory_tokens: Tensor | None = None,
) -> Tensor:
    """Aggregate per-token terms [T] under a mask [T] into a scalar.

    batch_num_tokens is T, the mini-batch's tokens with mask 1; global_batch_size is B, its responses that have
    one; None counts the tokens of this call. loss_scale_factor is H (None: the longest row). trajectory_tokens [b] is
    T_i, where rows are segments of trajectories that have others (None: a row's own tokens). The value is multiplied by
    `dp_size`, for callers whose gradients are averaged over ranks. A mask without a token gives 0. Raises ValueError
    for an unknown mode, and for dp_size > 1 without the count that the mode divides by.
    """
    if mode not in MODES:
        raise ValueError(f"unknown loss_agg_mode {mode!r}; there are: {', '.join(MODES)}")
    terms = masked(terms, loss_mask)
    if mode == "token-sum":
        return terms.sum() * dp_size
    if mode == "token-mean":
        tokens = _count(batch_num_tokens, loss_mask.sum(), "batch_num_tokens", mode, dp_size)
        return terms.sum() / tokens * dp_size
    tokens_of_rows = rows.sums(loss_mask)
    responses = _count(global_batch_size, (tokens_of_rows > 0).sum(), "global_batch_size", mode, dp_size)
    if mode == "seq-mean-token-mean":
        divisors = tokens_of_rows if trajectory_tokens is None else trajectory_tokens
        terms = terms / rows.spread(divisors.clamp(min=1))
    elif mode == "seq-mean-token-sum-norm":
        scale = float(rows.width if loss_scale_factor is None else loss_scale_factor)
        if scale <= 0:
            raise ValueError(f"loss_scale_factor must be greater than 0, not {scale}")
        terms = terms / scale
    return terms.sum() / responses * dp_size


def _count(count: Count | None, counted: Tensor, name: str, mode: str, dp_size: int) -> Count:
    """The count to divide by, at least 1: where it is 0 there is nothing to divide either."""
    if count is None:
        if dp_size > 1:
            raise ValueError(
                f"agg_loss in mode {mode!r}: {name} is required when dp_size is {dp_size}: "
                "the count over all ranks cannot be seen from one of them"
            )
        count = counted
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
