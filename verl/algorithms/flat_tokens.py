"""Flat tokens: the response tokens of several rows, one row after the other, without padding.

Sums over rows, aggregation of terms to a loss, the columns of a micro-batch, and the counts of a mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.config.schema.actor import AGG_MODES as MODES
from verl.trajectory import Segment, flat

Count = float | Tensor
Metrics = dict[str, tuple[float, float]]
"""By name (sum, weight): what an objective returns beside its scalar."""


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


def discounted_sums(values: np.ndarray, factor: float) -> np.ndarray:
    """y_k = Σ_{j ≥ k} factor^{j−k}·x_j, float64 [K].

    By doubling: a pass adds to every window the one after it, so that log₂ K passes do instead of K steps, or fewer
    where what is further away no longer counts.
    """
    if factor == 1:
        return np.cumsum(values[::-1])[::-1]
    sums, window = values.astype(np.float64), 1
    while window < len(sums) and factor > 1e-30:
        sums[:-window] += factor * sums[window:]
        window, factor = 2 * window, factor * factor
    return sums


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


@dataclass(frozen=True, slots=True)
class LossDenominators:
    """Counts over a whole mini-batch, all ranks: T tokens in the loss, B trajectories that have one, H, response tokens
    that the policy did not write, and those of demonstrations."""

    tokens: int
    trajectories: int
    max_response_length: float | None
    observed: int = 0
    demonstrated: int = 0


def loss_mask(row: Segment) -> np.ndarray:
    """m of a segment, bool [L]: its loss mask, or its policy mask where no phase has set one."""
    mask = row.columns.get("loss_mask")
    return row.columns["response_mask"] if mask is None else mask


def count_denominators(rows: Sequence[Segment], max_response_length: float | None) -> LossDenominators:
    """T and B of a mini-batch, after rejection and drops; `max_response_length` is H of seq-mean-token-sum-norm."""
    counts = [int(np.count_nonzero(loss_mask(row))) for row in rows]
    carrying = {id(row.trajectory or row) for row, count in zip(rows, counts, strict=True) if count}
    demonstrated = sum(row.length for row in rows if demonstrates(row))
    observed = sum(row.length - int(np.count_nonzero(row.columns["response_mask"])) for row in rows) - demonstrated
    return LossDenominators(sum(counts), len(carrying), max_response_length, observed, demonstrated)


def demonstrates(row: Segment) -> bool:
    """True for the segment of a demonstration."""
    weights = row.columns.get("demonstration_weights")
    return weights is not None and bool(weights.any())


def trajectory_tokens(rows: Sequence[Segment]) -> list[int] | None:
    """T_i for each row: loss tokens of all segments of its trajectory. None where every trajectory has one segment."""
    if all(row.trajectory is None or len(row.trajectory.segments) == 1 for row in rows):
        return None
    return [sum(int(np.count_nonzero(loss_mask(s))) for s in (row.trajectory or row).segments) for row in rows]


class MicroBatchColumns:
    """Columns of the segments of a micro-batch as flat tensors [T, …], in the dtype and on the device of the pass's
    outputs."""

    def __init__(self, segments: Sequence[Segment], like: Tensor):
        self.segments, self.like = segments, like
        self.rows = Rows([segment.length for segment in segments], like.device)
        if self.rows.cu_seqlens[-1] != len(like):
            raise ValueError(f"{len(like)} log-probs for rows with {self.rows.cu_seqlens[-1]} response tokens")

    def __getitem__(self, name: str) -> Tensor:
        """A column that every segment must have. ValueError naming the first that lacks it."""
        return self.joined([flat(self.segments, name)])

    def joined(self, values: Sequence[np.ndarray]) -> Tensor:
        """Arrays [L_i, …], one after the other."""
        return torch.from_numpy(np.concatenate(values)).to(self.like.device, self.like.dtype)

    @property
    def loss_mask(self) -> Tensor:
        """m [T]."""
        return self.joined([loss_mask(segment) for segment in self.segments])

    def old_log_probs(self) -> Tensor:
        """The column; the detached log-probs of this pass for segments without it: a step's first update is its own old
        policy."""
        current = self.like.detach()
        present = ["old_log_probs" in segment.columns for segment in self.segments]
        if not any(present):
            return current
        zeros = (segment.columns.get("old_log_probs", np.zeros(segment.length)) for segment in self.segments)
        mask = torch.from_numpy(np.repeat(present, self.rows.lengths)).to(current.device)
        return torch.where(mask, self.joined(list(zeros)), current)

    def batch_info(self, denominators: LossDenominators, tokens_of: Mapping[int, int] | None) -> dict[str, Any]:
        """The keywords of `aggregate`; `tokens_of`: T_i of segments (by id) whose trajectory has others.

        Gradients are added, never averaged, hence dp_size 1.
        """
        info: dict[str, Any] = {
            "dp_size": 1,
            "batch_num_tokens": denominators.tokens,
            "global_batch_size": denominators.trajectories,
            "loss_scale_factor": denominators.max_response_length,
        }
        if tokens_of is not None:
            counts = [tokens_of[id(segment)] for segment in self.segments]
            info["trajectory_tokens"] = torch.tensor(counts, device=self.like.device)
        return info
