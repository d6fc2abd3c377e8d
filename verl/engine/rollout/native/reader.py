"""Attention of a few queries per slot over everything a book holds, by batched products on strided views.

Neighbouring banks with the same number of tiles make a zone. A zone's scores are one batched product per tile
column and run of neighbouring tiles, one softmax over all columns, and one more product each with the values.
`lse` lets two books be merged (prompt and answer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from verl.engine.rollout.native.cache import Book

# Finite, so that a slot without any visible key gives a useless row with a tiny weight, and no NaN.
MASKED = -1e30
_STEP = 16

Masker = Callable[["Zone"], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Run:
    """Tiles `tile … tile + banks - 1` of one column, which belong to neighbouring banks from `bank` (in the zone)."""

    bank: int
    tile: int
    banks: int


@dataclass(frozen=True, slots=True)
class Zone:
    """Slots lo … hi of a book and the columns (width, runs) that they attend to."""

    lo: int
    hi: int
    width: int
    columns: tuple[tuple[int, tuple[Run, ...]], ...]


class Reader:
    """Reads one book. `plan` once per step, `attend` once per layer and zone."""

    def __init__(self, book: Book):
        self.book = book
        self.zones: tuple[Zone, ...] = ()
        self.slots = 0
        self._signature: object = None
        self._views: dict[tuple[int, int], list[list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def plan(self, lengths: np.ndarray) -> None:
        """Choose zones for slots whose visible tokens are `lengths` (int64 [slots], 0 where nobody asks)."""
        g = self.book.pool.geometry
        longest = lengths.reshape(-1, g.rows).max(1)
        used = np.flatnonzero(longest)
        signature = (self.book.version, tuple(-(-longest // _STEP)))
        if signature == self._signature:
            return
        self._signature = signature
        self._views.clear()
        self.slots = (int(used[-1]) + 1) * g.rows if len(used) else 0
        zones: list[Zone] = []
        columns = -(-longest // g.cols)
        start = 0
        while start < self.slots // g.rows:
            stop = start + 1
            while stop < self.slots // g.rows and columns[stop] == columns[start]:
                stop += 1
            if columns[start]:
                width = -(-int(longest[start:stop].max()) // _STEP) * _STEP
                zones.append(self._zone(start, stop, width))
            start = stop
        self.zones = tuple(zones)

    def _zone(self, start: int, stop: int, width: int) -> Zone:
        g = self.book.pool.geometry
        width = min(width, -(-width // g.cols) * g.cols)
        columns = []
        for column, begin in enumerate(range(0, width, g.cols)):
            runs: list[Run] = []
            for bank in range(start, stop):
                tile = self.book.tiles[bank][column]
                if runs and runs[-1].tile + runs[-1].banks == tile:
                    runs[-1] = Run(runs[-1].bank, runs[-1].tile, runs[-1].banks + 1)
                else:
                    runs.append(Run(bank - start, tile, 1))
            columns.append((min(g.cols, width - begin), tuple(runs)))
        return Zone(start * g.rows, stop * g.rows, width, tuple(columns))

    def _tensors(self, layer: int, number: int, zone: Zone) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Per column, per run: transposed keys [rows × kv heads, key dim, width], values [.., width, value dim]."""
        found = self._views.get((layer, number))
        if found is None:
            keys, values = self.book.pool.stored(layer)
            found = []
            for width, runs in zone.columns:
                views = []
                for run in runs:
                    k = keys[run.tile : run.tile + run.banks, :, :, :width].flatten(0, 2).transpose(1, 2)
                    v = values[run.tile : run.tile + run.banks, :, :, :width].flatten(0, 2)
                    views.append((k, v))
                found.append(views)
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
        """Zone `number`: query [slots × kv heads, M, D] in the keys' dtype; mask added to scores, broadcastable to
        [slots, kv heads, queries, heads per kv head, width] → output float32 [slots × kv heads, M, Dv], lse [.., M]."""
        zone = self.zones[number]
        views = self._tensors(layer, number, zone)
        batch, m, _ = query.shape
        per_bank = batch // ((zone.hi - zone.lo) // self.book.pool.geometry.rows)
        parts = []
        for (width, runs), column in zip(zone.columns, views, strict=True):
            scores = query.new_empty(batch, m, width)
            for run, (keys, _) in zip(runs, column, strict=True):
                at = slice(run.bank * per_bank, (run.bank + run.banks) * per_bank)
                scores[at].baddbmm_(query[at], keys, beta=0, alpha=scaling)
            parts.append(scores)
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        rows = zone.hi - zone.lo
        queries = mask.shape[2]
        scores.view(rows, batch // rows, queries, m // queries, zone.width).add_(mask)
        weights = scores.softmax(-1)
        # exp is slow on some CPUs: the softmax's own largest weight is 1 / sum(exp(score - max))
        lse = scores.amax(-1) - weights.amax(-1).log_()
        return self._values(zone, views, weights, per_bank), lse

    def _values(
        self,
        zone: Zone,
        views: list[list[tuple[torch.Tensor, torch.Tensor]]],
        weights: torch.Tensor,
        per_bank: int,
    ) -> torch.Tensor:
        weights = weights.to(views[0][0][1].dtype)
        out: torch.Tensor | None = None
        begin = 0
        for (width, runs), column in zip(zone.columns, views, strict=True):
            part = weights.new_empty(weights.shape[0], weights.shape[1], column[0][1].shape[-1])
            for run, (_, values) in zip(runs, column, strict=True):
                at = slice(run.bank * per_bank, (run.bank + run.banks) * per_bank)
                torch.bmm(weights[at, :, begin : begin + width], values, out=part[at])
            out = part.float() if out is None else out.add_(part)
            begin += width
        assert out is not None
        return out
