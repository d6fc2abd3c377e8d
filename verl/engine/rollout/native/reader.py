"""Attention of a few queries per slot over everything a table holds, by batched products on strided views.

Neighbouring block_rows with the same number of blocks make a span. A span's scores are one batched product per block
column and run of neighbouring blocks, one softmax over all columns, and one more product each with the values.
`lse` lets two tables be merged (prompt and response).

What was measured (Zen 5, one thread, 256 responses): batched products of whole, contiguous blocks run near the
memory's speed; torch's fused CPU attention with one query per head takes 1.4 (fp32) to 2.5 (bf16) times as long;
with few queries per slot, keys × queries is twice as fast as queries × keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from verl.engine.rollout.native.cache import KVSlotTable
from verl.models.attention import AttentionOptions
from verl.platform import platform_of

# Finite, so that a slot without any visible key gives a useless row with a tiny weight, and no NaN.
MASKED = -1e30
_FEW = 8  # queries per slot and kv head up to which keys × queries is the faster order

View = tuple[slice, torch.Tensor, torch.Tensor]
"""A run of neighbouring blocks in one layer: rows of the query, and their keys and values [rows, cols, dim]."""


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Slots lo … hi of a table and the runs of each block column that they attend to; width in tokens.

    Whole block_rows, or the first slots of one block_row.
    """

    lo: int
    hi: int
    width: int
    columns: tuple[tuple[tuple[int, int, int], ...], ...]
    """For each column its runs: (block_row in the span, block, how many of both)."""


class Reader:
    """Reads one table. `plan` once per step, `read` once per layer."""

    def __init__(self, table: KVSlotTable):
        self.table = table
        self.forget()

    def forget(self) -> None:
        """Release the pool's memory: the next `plan` looks at it anew."""
        self.spans: tuple[BlockSpan, ...] = ()
        self.slots = 0
        self._signature: object = None
        self._views: dict[tuple[int, int], list[list[View]]] = {}

    def plan(self, lengths: np.ndarray, *, whole_block_rows: bool = False) -> None:
        """Choose spans for slots whose visible tokens are `lengths` (int64 [slots], 0 for a slot that is not read).

        A span of a single block_row ends at its last slot in use, unless whole_block_rows.
        """
        g = self.table.pool.layout
        self.lengths = lengths
        by_block_row = lengths.reshape(-1, g.rows)
        columns = -(-by_block_row.max(1) // g.cols)
        lasts = np.where(by_block_row > 0, np.arange(1, g.rows + 1), 0).max(1)
        if whole_block_rows:
            lasts[:] = g.rows
        signature = (self.table.version, tuple(columns), tuple(lasts))
        if signature == self._signature:
            return
        self._signature = signature
        self._views.clear()
        spans: list[BlockSpan] = []
        bounds = [0, *(np.flatnonzero(np.diff(columns)) + 1).tolist(), len(columns)]
        for start, stop in pairwise(bounds):
            if columns[start]:
                end = stop * g.rows if stop > start + 1 else start * g.rows + int(lasts[start])
                spans.append(self._span(start, stop, end, int(columns[start])))
        self.spans = tuple(spans)
        self.slots = spans[-1].hi if spans else 0

    def _span(self, start: int, stop: int, end: int, count: int) -> BlockSpan:
        g = self.table.pool.layout
        columns = []
        for column in range(count):
            runs: list[tuple[int, int, int]] = []
            for block_row in range(start, stop):
                block = self.table.blocks[block_row][column]
                if runs and runs[-1][1] + runs[-1][2] == block:
                    runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
                else:
                    runs.append((block_row - start, block, 1))
            columns.append(tuple(runs))
        return BlockSpan(start * g.rows, end, count * g.cols, tuple(columns))

    def mask(self, number: int, last: np.ndarray | None, window: int | None) -> np.ndarray:
        """What span `number` may not see: 0 or MASKED, float32 [slots, 1, queries or 1, 1, width].

        last: with a window, the newest token that each query [slots, queries] sees, as a position in this table.
        """
        span = self.spans[number]
        at = np.arange(span.width)
        hidden = at >= self.lengths[span.lo : span.hi, None, None]
        if window is not None and last is not None:
            hidden = hidden | (at <= last[span.lo : span.hi, :, None] - window)
        return np.where(hidden, np.float32(MASKED), np.float32(0.0))[:, None, :, None]

    def read(
        self,
        layer: int,
        query: torch.Tensor,
        heads: int,
        mask: Callable[[int], torch.Tensor],
        options: AttentionOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query [slots × kv heads, M, D] in the keys' dtype → output float32 [slots × kv heads, M, Dv], lse [.., M].

        mask: of a span by its number, added to scores: broadcastable to [slots, kv heads, queries, heads per kv head,
        width]. Slots between spans get an output of no weight.
        """
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        covered = 0
        for number, span in enumerate(self.spans):
            if span.lo > covered:
                shape = (span.lo - covered) * heads, query.shape[1]
                width = self.table.pool.stored(layer)[1].shape[-1]
                empty = query.new_zeros(*shape, width, dtype=torch.float32)
                parts.append((empty, query.new_full(shape, MASKED, dtype=torch.float32)))
            part = query[span.lo * heads : span.hi * heads]
            parts.append(self._read_span(layer, number, part, mask(number), options))
            covered = span.hi
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def _view(self, layer: int, number: int, heads: int) -> list[list[View]]:
        """Per column, per run: the query's rows, keys and values."""
        found = self._views.get((layer, number))
        if found is None:
            span = self.spans[number]
            rows = min(span.hi - span.lo, self.table.pool.layout.rows)
            stored = self.table.pool.stored(layer)

            def view(block_row: int, block: int, count: int) -> View:
                keys, values = (store[block : block + count, :rows].flatten(0, 2) for store in stored)
                per = rows * heads
                return slice(block_row * per, (block_row + count) * per), keys, values

            found = self._views[layer, number] = [[view(*run) for run in runs] for runs in span.columns]
        return found

    def _read_span(
        self, layer: int, number: int, query: torch.Tensor, mask: torch.Tensor, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        span = self.spans[number]
        slots = span.hi - span.lo
        batch, m, _ = query.shape
        views = self._view(layer, number, batch // slots)
        turned, cols = query.transpose(1, 2), self.table.pool.layout.cols
        parts = []
        for column in views:
            part = query.new_empty((batch, cols, m) if m <= _FEW else (batch, m, cols), dtype=torch.float32)
            for at, keys, _ in column:
                if m <= _FEW:
                    _product(keys, turned[at], options.scaling, part[at])
                else:
                    _product(query[at], keys.transpose(1, 2), options.scaling, part[at])
            parts.append(part.transpose(1, 2) if m <= _FEW else part)
        scores = torch.cat(parts, -1) if len(parts) > 1 else parts[0].contiguous()
        if options.softcap is not None:
            scores.div_(options.softcap).tanh_().mul_(options.softcap)
        queries = mask.shape[2]
        scores.view(slots, batch // slots, queries, m // queries, span.width).add_(mask)
        weights = scores.softmax(-1)
        # exp is slow on some CPUs: the softmax's own largest weight is 1 / sum(exp(score - max))
        lse = scores.amax(-1) - weights.amax(-1).log_()
        return self._weighted(views, weights), lse

    def _weighted(self, views: list[list[View]], weights: torch.Tensor) -> torch.Tensor:
        """The values of all columns by their weights, float32."""
        values = views[0][0][2]
        weights = weights.to(values.dtype)
        out: torch.Tensor | None = None
        for column, share in zip(views, weights.split(values.shape[1], -1), strict=True):
            part = weights.new_empty(*weights.shape[:2], values.shape[-1])
            for at, _, values in column:
                torch.bmm(share[at], values, out=part[at])
            out = part.float() if out is None else out.add_(part)
        assert out is not None
        return out


def _product(a: torch.Tensor, b: torch.Tensor, alpha: float, out: torch.Tensor) -> None:
    """out = alpha·a·b in float32, whatever a and b are: scores of 100 are common, and bfloat16 has no fractions there."""
    if a.dtype == out.dtype:
        out.baddbmm_(a, b, beta=0, alpha=alpha)
    elif platform_of(a.device).has_widening_product():
        torch.bmm(a, b, out_dtype=out.dtype, out=out)
        out.mul_(alpha)
    else:
        torch.mul(torch.bmm(a, b), alpha, out=out)
