"""Attention of a decode step: one token for each running response.

The response's own cache and its group's prompt are two tables. Each is read for all responses at once, the responses of
a group side by side against the one copy of their prompt, and the two results are merged by their log-sum-exp.

A table is read by batched products on strided views. Neighbouring block_rows with the same number of blocks make a
span. A span's scores are one batched product per block column and run of neighbouring blocks, one softmax over all
columns, and one more product each with the values.

What was measured (Zen 5, one thread, 256 responses): batched products of whole, contiguous blocks run near the
memory's speed; torch's fused CPU attention with one query per head takes 1.4 (fp32) to 2.5 (bf16) times as long;
with few queries per slot, keys × queries is twice as fast as queries × keys.

All that a step needs on the device (indices, masks) are named tensors, made when first asked for. A device's own kernel
(`FusedOperators.decode_attention`) does all of it in one call a layer. Devices that Triton compiles for have another
plan (`device_decode`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from verl.engine.rollout.native.cache import KVSlotTable
from verl.engine.rollout.native.step import TILE
from verl.models.attention import AttentionOptions
from verl.models.recurrent import run
from verl.platform import platform_of

# Finite, so that a slot without any visible key gives a useless row with a tiny weight, and no NaN.
MASKED = -1e30
_FEW = 8  # queries per slot and kv head up to which keys × queries is the faster order

# A run of neighbouring blocks in one layer: rows of the query, and their keys and values [rows, cols, dim].
View = tuple[slice, Tensor, Tensor]
# The method of `DecodePlan` that gives a tensor's values, without its underscore, and its arguments.
Name = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Slots lo … hi of a table and the runs of each block column that they attend to; width in tokens.

    Whole block_rows, or the first slots of one block_row.
    """

    lo: int
    hi: int
    width: int
    # For each column its runs: (block_row in the span, block, how many of both).
    columns: tuple[tuple[tuple[int, int, int], ...], ...]


class TableReader:
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

    def plan(self, lengths: np.ndarray) -> None:
        """Choose spans for slots whose visible tokens are `lengths` (int64 [slots], 0 for a slot that is not read).

        A span of a single block_row ends at its last slot in use.
        """
        g = self.table.pool.layout
        self.lengths = lengths
        by_block_row = lengths.reshape(-1, g.rows)
        columns = -(-by_block_row.max(1) // g.cols)
        lasts = np.where(by_block_row > 0, np.arange(1, g.rows + 1), 0).max(1)
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

    def mask(self, number: int, last: np.ndarray, window: int | None) -> np.ndarray:
        """What span `number` may not see: 0 or MASKED, float32 [slots, 1, queries or 1, 1, width].

        last: with a window, the newest token that each query [slots, queries] sees, as a position in this table.
        """
        span = self.spans[number]
        at = np.arange(span.width)
        hidden = at >= self.lengths[span.lo : span.hi, None, None]
        if window is not None:
            hidden = hidden | (at <= last[span.lo : span.hi, :, None] - window)
        return np.where(hidden, np.float32(MASKED), np.float32(0.0))[:, None, :, None]

    def read(
        self, layer: int, query: Tensor, heads: int, mask: Callable[[int], Tensor], options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """query [slots × kv heads, M, D] in the keys' dtype → output float32 [slots × kv heads, M, Dv], lse [.., M].

        mask: of a span by its number, added to scores: broadcastable to [slots, kv heads, queries, heads per kv head,
        width]. Slots between spans get an output of no weight.
        """
        if len(self.spans) == 1 and self.spans[0].lo == 0:
            return self._read_span(layer, 0, query[: self.slots * heads], mask(0), options)
        shape, width = (self.slots * heads, query.shape[1]), self.table.pool.stored(layer)[1].shape[-1]
        out = query.new_zeros(*shape, width, dtype=torch.float32)
        lse = query.new_full(shape, MASKED, dtype=torch.float32)
        for number, span in enumerate(self.spans):
            at = slice(span.lo * heads, span.hi * heads)
            out[at], lse[at] = self._read_span(layer, number, query[at], mask(number), options)
        return out, lse

    def _view(self, layer: int, number: int, heads: int) -> list[list[View]]:
        """Per column, per run: the query's rows, keys and values."""
        views = self._views.get((layer, number))
        if views is None:
            span = self.spans[number]
            rows = min(span.hi - span.lo, self.table.pool.layout.rows)
            stored = self.table.pool.stored(layer)

            def view(block_row: int, block: int, count: int) -> View:
                keys, values = (store[block : block + count, :rows].flatten(0, 2) for store in stored)
                per = rows * heads
                return slice(block_row * per, (block_row + count) * per), keys, values

            views = self._views[layer, number] = [[view(*run) for run in runs] for runs in span.columns]
        return views

    def _read_span(
        self, layer: int, number: int, query: Tensor, mask: Tensor, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        span = self.spans[number]
        slots = span.hi - span.lo
        (batch, m, _), few = query.shape, query.shape[1] <= _FEW
        views = self._view(layer, number, batch // slots)
        turned, cols = query.transpose(1, 2), self.table.pool.layout.cols
        parts = []
        for column in views:
            part = query.new_empty((batch, cols, m) if few else (batch, m, cols), dtype=torch.float32)
            for at, keys, _ in column:
                factors = (keys, turned[at]) if few else (query[at], keys.transpose(1, 2))
                _product(*factors, options.scaling, part[at])
            parts.append(part.transpose(1, 2) if few else part)
        scores = torch.cat(parts, -1) if len(parts) > 1 else parts[0].contiguous()
        if options.softcap is not None:
            scores.div_(options.softcap).tanh_().mul_(options.softcap)
        queries = mask.shape[2]
        scores.view(slots, batch // slots, queries, m // queries, span.width).add_(mask)
        weights = scores.softmax(-1)
        # exp is slow on some CPUs: the softmax's own largest weight is 1 / sum(exp(score - max))
        lse = scores.amax(-1) - weights.amax(-1).log_()
        return self._weighted(views, weights), lse

    def _weighted(self, views: list[list[View]], weights: Tensor) -> Tensor:
        """The values of all columns by their weights, float32."""
        values = views[0][0][2]
        weights = weights.to(values.dtype)
        out: Tensor | None = None
        for column, share in zip(views, weights.split(values.shape[1], -1), strict=True):
            part = weights.new_empty(*weights.shape[:2], values.shape[-1])
            for at, _, values in column:
                torch.bmm(share[at], values, out=part[at])
            out = part.float() if out is None else out.add_(part)
        assert out is not None
        return out


class DecodePlan:
    """See the module. `prepare` once per step, then the model calls `attend` in each layer."""

    def __init__(self, prompts: KVSlotTable, responses: KVSlotTable):
        self._pool = prompts.pool
        self._prompts, self._responses = TableReader(prompts), TableReader(responses)
        self._tensors: dict[Name, Tensor] = {}
        fused = platform_of(self._pool.device).fused_operators()
        self._kernel = None if fused is None else fused.decode_attention

    def prepare(
        self, slots: np.ndarray, lengths: np.ndarray, prompt_slots: np.ndarray, prompt_lengths: np.ndarray
    ) -> None:
        """All int64 [B]; slots ascending; lengths count the response's tokens including the one being fed."""
        self._slots = slots
        if self._kernel is not None:
            self._tables = self._kernel_tables(slots, lengths, prompt_slots, prompt_lengths)
            return
        table = self._responses.table
        self._places = table.token_rows(slots, lengths - 1)
        own_lengths = np.zeros(table.slots, np.int64)
        own_lengths[slots] = lengths
        self._responses.plan(own_lengths)
        shared_lengths = np.zeros(self._prompts.table.slots, np.int64)
        shared_lengths[prompt_slots] = prompt_lengths
        self._prompts.plan(shared_lengths)

        self._dense = len(slots) == self._responses.slots
        # the responses of one prompt, side by side: (prompt slot, number among its responses) of each row
        order = np.argsort(prompt_slots, kind="stable")
        number = np.empty(len(slots), np.int64)
        number[order] = np.arange(len(slots)) - np.searchsorted(prompt_slots[order], prompt_slots[order])
        self._per_prompt = int(number.max()) + 1
        self._row_of_place, self._position = np.zeros((2, self._prompts.slots, self._per_prompt), np.int64)
        self._row_of_place[prompt_slots, number] = np.arange(len(slots))
        self._position[prompt_slots, number] = prompt_lengths + lengths - 1
        self._place_of_row = np.stack((prompt_slots, number))
        self._tensors = {}

    def _kernel_tables(
        self, slots: np.ndarray, lengths: np.ndarray, prompt_slots: np.ndarray, prompt_lengths: np.ndarray
    ) -> tuple[Tensor, ...]:
        """See `verl.platform.cpu_kernels.decode_attention`."""
        order = np.argsort(prompt_slots, kind="stable")
        by_prompt = prompt_slots[order]
        number = np.arange(len(order)) - np.searchsorted(by_prompt, by_prompt)
        starts = np.flatnonzero(number % TILE == 0)
        counts = np.diff(starts, append=len(order))
        blocks = self._responses.table.slot_blocks(slots), self._prompts.table.slot_blocks(by_prompt[starts])
        tables = order, starts, counts, lengths, prompt_lengths, *blocks
        return tuple(torch.from_numpy(np.ascontiguousarray(table, np.int32)) for table in tables)

    def forget(self) -> None:
        """Hold no memory of the cache any more."""
        self._responses.forget()
        self._prompts.forget()
        self._tensors = {}

    def _get(self, *name: Hashable) -> Tensor:
        if name not in self._tensors:
            kind, *arguments = name
            values = np.ascontiguousarray(getattr(self, f"_{kind}")(*arguments))
            self._tensors[name] = torch.from_numpy(values).to(self._pool.device)
        return self._tensors[name]

    def _slot_of_row(self) -> np.ndarray:
        return self._slots

    def _row_of_slot(self) -> np.ndarray:
        rows = np.zeros(self._responses.slots, np.int64)
        rows[self._slots] = np.arange(len(self._slots))
        return rows

    def _write(self, heads: int) -> np.ndarray:
        return self._pool.layout.flat_index(*self._places, heads)

    def _to_prompts(self, heads: int) -> np.ndarray:
        """[B, kv heads] blocks → [prompt slots, kv heads, responses] blocks."""
        return (self._row_of_place[:, None, :] * heads + np.arange(heads)[None, :, None]).reshape(-1)

    def _from_prompts(self, heads: int) -> np.ndarray:
        slot, number = self._place_of_row[:, :, None]
        return ((slot * heads + np.arange(heads)) * self._per_prompt + number).reshape(-1)

    def _prompt_mask(self, number: int, window: int | None) -> np.ndarray:
        return self._prompts.mask(number, self._position, window)

    def _response_mask(self, number: int, window: int | None) -> np.ndarray:
        return self._responses.mask(number, self._responses.lengths[:, None] - 1, window)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See `AttentionPlan`."""
        layer = self._pool.calls.number(module)
        if self._kernel is not None:
            stored = self._pool.layer(layer, key.shape[1], key.shape[-1], value.shape[-1])
            keys, values = (store.flatten(0, 1) for store in stored)
            query, key, value = (x.to(self._pool.compute) for x in (query, key, value))
            numbers = options.scaling, options.softcap or 0.0, options.sliding_window or 0
            return self._kernel(query, key, value, keys, values, options.sinks, self._tables, *numbers)
        window = self._window(options.sliding_window)
        heads, rows = key.shape[1], query.shape[2]
        self._pool.write(layer, key, value, self._get("write", heads))
        per_head, dim = query.shape[1] // heads, query.shape[-1]
        q = query[0].transpose(0, 1).reshape(rows, -1).to(self._pool.compute).to(self._pool.key_dtype)
        # a part of one product for queries, keys and values (GPT-2) has gaps between its rows
        q = q.contiguous()

        prompt_q = q.view(rows * heads, per_head * dim).index_select(0, self._get("to_prompts", heads))
        prompt_q = prompt_q.view(-1, self._per_prompt * per_head, dim)
        o_prompt, lse_prompt = self._prompts.read(
            layer, prompt_q, heads, lambda number: self._get("prompt_mask", number, window), options
        )
        back = self._get("from_prompts", heads)
        o_prompt = o_prompt.view(-1, per_head * o_prompt.shape[-1]).index_select(0, back)
        lse_prompt = lse_prompt.view(-1, per_head).index_select(0, back).view(rows, -1)

        response_q = q if self._dense else q.index_select(0, self._get("row_of_slot"))
        response_q = response_q.view(-1, per_head, dim)
        o_own, lse_own = self._responses.read(
            layer, response_q, heads, lambda number: self._get("response_mask", number, window), options
        )
        o_own, lse_own = o_own.view(self._responses.slots, -1), lse_own.view(self._responses.slots, -1)
        if not self._dense:
            slots = self._get("slot_of_row")
            o_own, lse_own = o_own.index_select(0, slots), lse_own.index_select(0, slots)

        shape = (rows, query.shape[1], value.shape[-1])
        own_share = torch.sigmoid(lse_own - lse_prompt)[..., None]
        out = torch.lerp(o_prompt.view(shape), o_own.view(shape), own_share)
        if options.sinks is not None:
            total = torch.logaddexp(lse_own, lse_prompt)
            out.mul_(torch.sigmoid(total - options.sinks.float())[..., None])
        return out.to(self._pool.compute)[None]

    def mix(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """See `AttentionPlan`."""
        pool, numbers = self._pool.states, self._responses.table.states[self._slots]
        assert pool is not None
        out, after = run(layer, hidden.transpose(0, 1), pool.read(layer, numbers))
        pool.write(layer, numbers, after)
        return out.transpose(0, 1)

    def _window(self, window: int | None) -> int | None:
        """The window if any response has outgrown it; masks without one are smaller."""
        return window if window is not None and int(self._position.max()) >= window else None


def _product(a: Tensor, b: Tensor, alpha: float, out: Tensor) -> None:
    """out = alpha·a·b in float32 for any type of a and b: scores of 100 are common, where bfloat16 has no fractions."""
    if a.dtype == out.dtype:
        out.baddbmm_(a, b, beta=0, alpha=alpha)
    elif platform_of(a.device).has_widening_product():
        torch.bmm(a, b, out_dtype=out.dtype, out=out)
        out.mul_(alpha)
    else:
        torch.mul(torch.bmm(a, b), alpha, out=out)
