"""Attention of a few queries per slot over everything a table holds, by batched products on strided views.

Neighbouring block_rows with the same number of blocks make a span. A span's scores are one batched product per block
column and run of neighbouring blocks, one softmax over all columns, and one more product each with the values.
`lse` lets two tables be merged (prompt and response).

What was measured (Zen 5, one thread, 256 responses): batched products of whole, contiguous blocks run near the
memory's speed; torch's fused CPU attention with one query per head takes 1.4 (fp32) to 2.5 (bf16) times as long;
with few queries per slot, keys × queries is twice as fast as queries × keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from verl.engine.rollout.native.cache import KVSlotTable
from verl.platform import platform_of

# Finite, so that a slot without any visible key gives a useless row with a tiny weight, and no NaN.
MASKED = -1e30
_FEW = 8  # queries per slot and kv head up to which keys × queries is the faster order


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks `block … block + block_rows - 1` of one column, which belong to neighbouring block_rows from `block_row` (in the span)."""

    block_row: int
    block: int
    block_rows: int


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Slots lo … hi of a table and the runs of each block column that they attend to; width in tokens.

    Whole block_rows, or the first slots of one block_row.
    """

    lo: int
    hi: int
    width: int
    columns: tuple[tuple[Run, ...], ...]


class Reader:
    """Reads one table. `plan` once per step, `attend` once per layer and span."""

    def __init__(self, table: KVSlotTable):
        self.table = table
        self.spans: tuple[BlockSpan, ...] = ()
        self.slots = 0
        self._signature: object = None
        self._views: dict[tuple[int, int], list[list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def forget(self) -> None:
        """Let go of the pool's memory: the next `plan` looks at it anew."""
        self.spans, self.slots, self._signature = (), 0, None
        self._views.clear()

    def plan(self, lengths: np.ndarray, *, whole_block_rows: bool = False) -> None:
        """Choose spans for slots whose visible tokens are `lengths` (int64 [slots], 0 where nobody asks).

        A span of a single block_row ends at its last slot in use, unless whole_block_rows.
        """
        g = self.table.pool.layout
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
        used = np.flatnonzero(columns)
        block_rows = int(used[-1]) + 1 if len(used) else 0
        spans: list[BlockSpan] = []
        start = 0
        while start < block_rows:
            stop = start + 1
            while stop < block_rows and columns[stop] == columns[start]:
                stop += 1
            if columns[start]:
                end = stop * g.rows if stop > start + 1 else start * g.rows + int(lasts[start])
                spans.append(self._span(start, stop, end, int(columns[start])))
            start = stop
        self.spans = tuple(spans)
        self.slots = spans[-1].hi if spans else 0

    def _span(self, start: int, stop: int, end: int, count: int) -> BlockSpan:
        g = self.table.pool.layout
        columns = []
        for column in range(count):
            runs: list[Run] = []
            for block_row in range(start, stop):
                block = self.table.blocks[block_row][column]
                if runs and runs[-1].block + runs[-1].block_rows == block:
                    runs[-1] = Run(runs[-1].block_row, runs[-1].block, runs[-1].block_rows + 1)
                else:
                    runs.append(Run(block_row - start, block, 1))
            columns.append(tuple(runs))
        return BlockSpan(start * g.rows, end, count * g.cols, tuple(columns))

    def _tensors(
        self, layer: int, number: int, span: BlockSpan
    ) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Per column, per run: keys and values, [rows × kv heads, cols, dim] each."""
        found = self._views.get((layer, number))
        if found is None:
            stored = self.table.pool.stored(layer)
            found = []
            rows = min(span.hi - span.lo, self.table.pool.layout.rows)
            for runs in span.columns:
                at = [(slice(run.block, run.block + run.block_rows), slice(rows)) for run in runs]
                found.append([(stored[0][t].flatten(0, 2), stored[1][t].flatten(0, 2)) for t in at])
            self._views[layer, number] = found
        return found

    def attend(
        self,
        layer: int,
        number: int,
        query: torch.Tensor,
        mask: torch.Tensor,
        scaling: float,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """BlockSpan `number`: query [slots × kv heads, M, D] in the keys' dtype; mask added to scores, broadcastable to
        [slots, kv heads, queries, heads per kv head, width] → output float32 [slots × kv heads, M, Dv], lse [.., M]."""
        span = self.spans[number]
        g = self.table.pool.layout
        views = self._tensors(layer, number, span)
        batch, m, _ = query.shape
        per_block_row = batch // (span.hi - span.lo) * min(span.hi - span.lo, g.rows)
        turned = query.transpose(1, 2)
        parts = []
        for runs, column in zip(span.columns, views, strict=True):
            shape = (batch, g.cols, m) if m <= _FEW else (batch, m, g.cols)
            part = query.new_empty(shape, dtype=torch.float32)
            for run, (keys, _) in zip(runs, column, strict=True):
                at = slice(run.block_row * per_block_row, (run.block_row + run.block_rows) * per_block_row)
                if m <= _FEW:
                    _product(keys, turned[at], scaling, part[at])
                else:
                    _product(query[at], keys.transpose(1, 2), scaling, part[at])
            parts.append(part.transpose(1, 2) if m <= _FEW else part)
        scores = torch.cat(parts, -1) if len(parts) > 1 else parts[0].contiguous()
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        rows = span.hi - span.lo
        queries = mask.shape[2]
        scores.view(rows, batch // rows, queries, m // queries, span.width).add_(mask)
        weights = scores.softmax(-1)
        # exp is slow on some CPUs: the softmax's own largest weight is 1 / sum(exp(score - max))
        lse = scores.amax(-1) - weights.amax(-1).log_()
        return self._values(span, views, weights, per_block_row), lse

    def _values(
        self,
        span: BlockSpan,
        views: list[list[tuple[torch.Tensor, torch.Tensor]]],
        weights: torch.Tensor,
        per_block_row: int,
    ) -> torch.Tensor:
        weights = weights.to(views[0][0][1].dtype)
        out: torch.Tensor | None = None
        for number, (runs, column) in enumerate(zip(span.columns, views, strict=True)):
            cols = column[0][1].shape[1]
            share = weights[:, :, number * cols : (number + 1) * cols]
            part = weights.new_empty(*weights.shape[:2], column[0][1].shape[-1])
            for run, (_, values) in zip(runs, column, strict=True):
                at = slice(run.block_row * per_block_row, (run.block_row + run.block_rows) * per_block_row)
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
