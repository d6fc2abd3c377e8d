"""Attention over packed sequences that share their beginnings, on any device, in plain matrix products.

A pack is one row of tokens: spans one after the other, a prompt, a response, or a part of one. A token sees the tokens
of its own span up to itself and the whole spans that its sequence begins with. No key or value is repeated
for that, and no score outlives its tile:

    rows of a tile          the keys they may see             scores
    [q0, q1)                [prefix) … + [k0, q1)             [heads, rows, keys], masked, softmax, thrown away

The backward pass computes the scores of a tile again from queries and keys. Short neighbours are merged into
one tile with a mask, long segments are cut into blocks of rows, so neither the number of calls nor the size of
a tile grows with the shape of the data. Query heads that share a key head are folded into the rows, so grouped
keys are never expanded. Soft-capped scores (Gemma 2), attention sinks and sliding windows are part of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from verl.models import flash_attention
from verl.models.attention import AttentionOptions, TokenSpan, product_dtype
from verl.models.recurrent import PackedStates
from verl.platform import platform_of

# Largest number of scores of one tile, and what one more tile costs counted in scores (measured: about 150 µs
# of calls forward and backward against 5 ns a score in bfloat16).
TILE_SCORES = 512 * 1024
TILE_OVERHEAD = 24 * 1024


@dataclass(slots=True)
class Tile:
    """Rows [q0, q1) against the keys of `prefix` + [k0, q1). `mask` [rows, keys] is None where the causal triangle of
    the last q1 − q0 keys says it all; `merged` tiles are of several segments."""

    q0: int
    q1: int
    prefix: tuple[tuple[int, int], ...]
    k0: int
    merged: bool = False
    mask: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.q1 - self.q0

    @property
    def keys(self) -> int:
        return self.shared + self.q1 - self.k0

    @property
    def shared(self) -> int:
        """Keys of the prefix."""
        return sum(end - start for start, end in self.prefix)


class PackedPlan:
    """How the tokens of one pack see each other: an `AttentionPlan`. Made once, used by every layer.

    `segments` cover the pack in order, without gaps; empty ones are allowed. `positions` int64 [S] are the
    tokens' positions in their own sequence (for sliding windows). `heads` scales the size of the tiles.
    """

    def __init__(self, segments: Sequence[TokenSpan], positions: Tensor, heads: int):
        self.segments = [s for s in segments if s.end > s.start]
        self.positions = positions
        self.device = positions.device
        self.size = int(positions.shape[0])
        self._owner, self._before = self._token_tables()
        self._triangles: dict[int, Tensor] = {}
        self._windows: dict[int, list[Tile]] = {}
        self.longest = int(positions.max()) + 1 if self.size else 0
        self._heads = heads

    @cached_property
    def tiles(self) -> list[Tile]:
        """The pack as tiles. Their masks are many small operations, which a pack for the flash kernel is spared."""
        tiles: list[Tile] = []
        heads = self._heads
        for s in self.segments:
            last = tiles[-1] if tiles else None
            if last is not None:
                joined = Tile(last.q0, s.end, last.prefix, last.k0, merged=True)
                # A prefix that lies outside of the last tile's keys cannot be seen from a joined tile.
                visible = all(span in last.prefix or span[0] >= last.k0 for span in s.prefix)
                by_itself = Tile(s.start, s.end, s.prefix, s.start)
                alone = by_itself.rows * by_itself.keys + last.rows * last.keys
                scores = joined.rows * joined.keys
                if visible and (scores - alone) * heads <= TILE_OVERHEAD and scores * heads <= TILE_SCORES:
                    tiles[-1] = joined
                    continue
            tiles += self._cut(s, heads)
        for tile in tiles:
            if tile.merged:
                tile.mask = self._mask(tile, None)
        return tiles

    def _token_tables(self) -> tuple[Tensor, list[Tensor]]:
        """TokenSpan number of each token, and the numbers of the spans before it, one a table (−1 for none)."""
        starts = {s.start: i for i, s in enumerate(self.segments)}
        owner = torch.zeros(self.size, dtype=torch.int32)
        before = torch.full((max((len(s.prefix) for s in self.segments), default=0), self.size), -1, dtype=torch.int32)
        for i, s in enumerate(self.segments):
            owner[s.start : s.end] = i
            for table, (start, _) in zip(before, s.prefix, strict=False):
                table[s.start : s.end] = starts[start]
        return owner.to(self.device), list(before.to(self.device))

    @staticmethod
    def _cut(s: TokenSpan, heads: int) -> list[Tile]:
        """One segment in blocks of rows, no block with more than about TILE_SCORES scores."""
        out, start, shared = [], s.start, sum(end - begin for begin, end in s.prefix)
        while start < s.end:
            visible_keys = shared + start - s.start
            rows = 16
            while rows < 512 and rows * 2 * (visible_keys + rows * 2) * heads <= TILE_SCORES:
                rows *= 2
            remaining = s.end - start
            rows = remaining if remaining <= rows * 5 // 4 else rows
            out.append(Tile(start, start + rows, s.prefix, s.start))
            start += rows
        return out

    def _mask(self, tile: Tile, window: int | None) -> Tensor:
        """float32 [rows, keys]: 0 where a row sees a key, −inf elsewhere."""
        spans = (*tile.prefix, (tile.k0, tile.q1))
        index = torch.cat([torch.arange(start, end, device=self.device) for start, end in spans])
        rows = torch.arange(tile.q0, tile.q1, device=self.device)
        same = (self._owner[rows, None] == self._owner[index]) & (rows[:, None] >= index)
        visible = same
        for table in self._before:
            visible |= table[rows, None] == self._owner[index]
        if window is not None:
            visible &= self.positions[rows, None] - self.positions[index] < window
        return torch.zeros(visible.shape, device=self.device).masked_fill_(~visible, float("-inf"))

    def triangle(self, rows: int) -> Tensor:
        """float32 [rows, rows]: 0 up to the diagonal, −inf above it."""
        if rows not in self._triangles:
            full = torch.full((rows, rows), float("-inf"), device=self.device)
            self._triangles[rows] = full.triu_(1)
        return self._triangles[rows]

    @cached_property
    def flash_kernel(self) -> flash_attention.Kernel | None:
        """The device's own, None where it has none."""
        return platform_of(self.device).flash_kernel(self.device)

    @cached_property
    def flash_parts(self) -> list[flash_attention.KernelCall]:
        """The pack as calls of a flash kernel."""
        return flash_attention.parts_of(self.segments, self.device)

    def _kernels(self, query: Tensor, value: Tensor, options: AttentionOptions) -> Any:
        """The device's own functions for a pack, None where there are none that fit."""
        fused = platform_of(self.device).fused_operators()
        plain = options.softcap is None and options.sinks is None and query.dtype.itemsize <= 4
        return fused.pack_attention if fused and plain and query.shape[-1] == value.shape[-1] else None

    @cached_property
    def span_tables(self) -> tuple[Tensor, ...]:
        """See `verl.platform.cpu_kernels.pack_attention`."""
        firsts = accumulate((len(s.prefix) for s in self.segments), initial=0)
        prefixes = [span for s in self.segments for span in s.prefix]
        columns = [s.start for s in self.segments], [s.end for s in self.segments], firsts
        ends = [start for start, _ in prefixes], [end for _, end in prefixes]
        return tuple(torch.tensor(list(column), dtype=torch.int64) for column in (*columns, *ends))

    @cached_property
    def _states(self) -> PackedStates:
        return PackedStates(self.segments, self.device)

    def mix(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """See `AttentionPlan.mix`."""
        return self._states.mix(layer, hidden)

    def tiles_for(self, window: int | None) -> list[Tile]:
        """The tiles; with a sliding window, tiles whose masks know of it."""
        if window is None:
            return self.tiles
        if window not in self._windows:
            self._windows[window] = [replace(t, mask=self._mask(t, window)) for t in self.tiles]
        return self._windows[window]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See `AttentionPlan.attend`. Under autocast the products run in its dtype."""
        query, key, value = (x.to(product_dtype(x)) for x in (query, key, value))
        # A window that takes nothing away from any token of this pack is none.
        window = options.sliding_window
        window = None if window is None or self.longest <= window else window
        kernel = self.flash_kernel
        with torch.autocast(query.device.type, enabled=False):
            if kernel and window is None and flash_attention.fits(query, value, options):
                return flash_attention.attend(query, key, value, self.flash_parts, options.scaling, kernel)
            if (kernels := self._kernels(query, value, options)) and window is None:
                return _PackAttention.apply(query, key, value, self.span_tables, options.scaling, kernels)
            tiles = self.tiles_for(window)
            return _TiledAttention.apply(query, key, value, options.sinks, self, tiles, options)


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """[1, Hkv·G, S, D] → contiguous [Hkv, S·G, D]; the heads of a group become neighbouring rows."""
    _, heads, size, width = x.shape
    return x[0].view(kv_heads, heads // kv_heads, size, width).transpose(1, 2).reshape(kv_heads, -1, width)


def _keys(x: Tensor, tile: Tile) -> Tensor:
    """The tile's keys (or values) out of [Hkv, S, D]: [Hkv, keys, D]."""
    segment = x[:, tile.k0 : tile.q1]
    return torch.cat((*(x[:, start:end] for start, end in tile.prefix), segment), 1) if tile.prefix else segment


def _product(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=alpha)


def _probabilities(
    plan: PackedPlan, tile: Tile, q: Tensor, k: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Softmax of one tile in float32 [Hkv, rows·G, keys]; with a soft cap also d(capped)/d(score); with sinks
    also the sink's own share [Hkv, rows·G, 1]."""
    heads, folded, keys = q.shape[0], q.shape[1], k.shape[1]
    softcap, sinks = options.softcap, options.sinks
    scores = _product(q, k.transpose(1, 2), options.scaling).float()
    slope = None
    if softcap is not None:
        scores = torch.tanh_(scores.div_(softcap))
        slope = 1 - scores * scores
        scores = scores.mul_(softcap)
    by_row = scores.view(heads, tile.rows, folded // tile.rows, keys)
    if tile.mask is not None:
        by_row.add_(tile.mask[:, None])
    else:
        by_row[..., keys - tile.rows :].add_(plan.triangle(tile.rows)[:, None])
    if sinks is None:
        return torch.softmax(scores, -1, out=scores), slope, None
    column = sinks.float().view(heads, 1, -1).expand(heads, tile.rows, -1).reshape(heads, folded, 1)
    full = torch.softmax(torch.cat((scores, column), -1), -1)
    return full[..., :keys], slope, full[..., keys:]


class _TiledAttention(torch.autograd.Function):
    """Forward and backward over tiles; nothing but queries, keys and values is kept in between."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, plan, tiles, options):  # type: ignore[no-untyped-def]
        heads, kv_heads = query.shape[1], key.shape[1]
        group = heads // kv_heads
        q, k, v = _fold(query, kv_heads), key[0].contiguous(), value[0].contiguous()
        out = torch.empty(kv_heads, q.shape[1], v.shape[2], dtype=v.dtype, device=v.device)
        for t in tiles:
            rows = slice(t.q0 * group, t.q1 * group)
            p, _, _ = _probabilities(plan, t, q[:, rows], _keys(k, t), options)
            out[:, rows] = torch.bmm(p.to(v.dtype), _keys(v, t))
        ctx.save_for_backward(q, k, v, sinks)
        ctx.plan, ctx.tiles, ctx.options, ctx.group = plan, tiles, replace(options, sinks=None), group
        size = key.shape[2]
        # Contiguous, as attention's output is elsewhere: some architectures take a view of it.
        return out.view(kv_heads, size, group, -1).transpose(0, 1).reshape(1, size, heads, -1).contiguous()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, sinks = ctx.saved_tensors
        options = replace(ctx.options, sinks=sinks)
        group, kv_heads, size = ctx.group, k.shape[0], k.shape[1]
        dout = _fold(grad.to(v.dtype).transpose(1, 2), kv_heads)
        dq = torch.empty_like(q)
        # Shared keys gather a share from every tile: the sums are float32 whatever the products are.
        dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        dv = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
        dsinks = torch.zeros_like(sinks, dtype=torch.float32) if sinks is not None else None
        for t in ctx.tiles:
            rows = slice(t.q0 * group, t.q1 * group)
            kt, vt, qt, dt = _keys(k, t), _keys(v, t), q[:, rows], dout[:, rows]
            p, slope, sink = _probabilities(ctx.plan, t, qt, kt, options)
            dp = torch.bmm(dt, vt.transpose(1, 2)).float()
            _scatter(dv, t, torch.bmm(p.to(v.dtype).transpose(1, 2), dt))
            if sink is None:
                ds = torch._softmax_backward_data(dp, p, -1, torch.float32)
            else:
                mean = (dp * p).sum(-1, keepdim=True)
                ds = p * (dp - mean)
                share = (-sink * mean).view(kv_heads, t.rows, group).sum(1)
                dsinks += share.reshape(dsinks.shape)
            if slope is not None:
                ds = ds * slope
            ds = ds.to(q.dtype)
            dq[:, rows] = _product(ds, kt, options.scaling)
            _scatter(dk, t, _product(ds.transpose(1, 2), qt, options.scaling))
        dq = dq.view(kv_heads, size, group, -1).transpose(1, 2).reshape(1, kv_heads * group, size, -1)
        dsinks = dsinks.to(sinks.dtype) if dsinks is not None else None
        return dq, dk.to(k.dtype)[None], dv.to(v.dtype)[None], dsinks, None, None, None


class _PackAttention(torch.autograd.Function):
    """The same by a device's own kernels, for spans without softcap, sinks and window."""

    @staticmethod
    def forward(ctx, query, key, value, spans, scale, kernels):  # type: ignore[no-untyped-def]
        out, lse = kernels[0](query, key, value, spans, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.spans, ctx.scale, ctx.kernels = spans, scale, kernels
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *ctx.kernels[1](grad, *ctx.saved_tensors, ctx.spans, ctx.scale), None, None, None


def _scatter(total: Tensor, tile: Tile, part: Tensor) -> None:
    """Add a tile's gradient [Hkv, keys, D] to the rows of [Hkv, S, D] that its keys came from."""
    at = 0
    for start, end in (*tile.prefix, (tile.k0, tile.q1)):
        total[:, start:end] += part[:, at : at + end - start]
        at += end - start
