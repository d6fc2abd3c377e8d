"""Attention of a few queries per slot over everything a book holds, by batched products on strided views.

Neighbouring banks with the same number of tiles make a zone. A zone's scores are one batched product per tile
column and run of neighbouring tiles, one softmax over all columns, and one more product each with the values.
`lse` lets two books be merged (prompt and answer).

What was measured (Zen 5, one thread, 256 answers): batched products of whole, contiguous tiles run near the
memory's speed; torch's fused CPU attention with one query per head takes 1.4 (fp32) to 2.5 (bf16) times as long;
with few queries per slot, keys × queries is twice as fast as queries × keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from verl.engine.rollout.native.cache import Book

# Finite, so that a slot without any visible key gives a useless row with a tiny weight, and no NaN.
MASKED = -1e30
_FEW = 8  # queries per slot and kv head up to which keys × queries is the faster order


@dataclass(frozen=True, slots=True)
class Run:
    """Tiles `tile … tile + banks - 1` of one column, which belong to neighbouring banks from `bank` (in the zone)."""

    bank: int
    tile: int
    banks: int


@dataclass(frozen=True, slots=True)
class Zone:
    """Slots lo … hi of a book and the runs of each tile column that they attend to; width in tokens.

    Whole banks, or the first slots of one bank.
    """

    lo: int
    hi: int
    width: int
    columns: tuple[tuple[Run, ...], ...]


class Reader:
    """Reads one book. `plan` once per step, `attend` once per layer and zone."""

    def __init__(self, book: Book):
        self.book = book
        self.zones: tuple[Zone, ...] = ()
        self.slots = 0
        self._signature: object = None
        self._views: dict[tuple[int, int], list[list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def forget(self) -> None:
        """Let go of the pool's memory: the next `plan` looks at it anew."""
        self.zones, self.slots, self._signature = (), 0, None
        self._views.clear()

    def plan(self, lengths: np.ndarray, *, whole_banks: bool = False) -> None:
        """Choose zones for slots whose visible tokens are `lengths` (int64 [slots], 0 where nobody asks).

        A zone of a single bank ends at its last slot in use, unless whole_banks.
        """
        g = self.book.pool.geometry
        by_bank = lengths.reshape(-1, g.rows)
        columns = -(-by_bank.max(1) // g.cols)
        lasts = np.where(by_bank > 0, np.arange(1, g.rows + 1), 0).max(1)
        if whole_banks:
            lasts[:] = g.rows
        signature = (self.book.version, tuple(columns), tuple(lasts))
        if signature == self._signature:
            return
        self._signature = signature
        self._views.clear()
        used = np.flatnonzero(columns)
        banks = int(used[-1]) + 1 if len(used) else 0
        zones: list[Zone] = []
        start = 0
        while start < banks:
            stop = start + 1
            while stop < banks and columns[stop] == columns[start]:
                stop += 1
            if columns[start]:
                end = stop * g.rows if stop > start + 1 else start * g.rows + int(lasts[start])
                zones.append(self._zone(start, stop, end, int(columns[start])))
            start = stop
        self.zones = tuple(zones)
        self.slots = zones[-1].hi if zones else 0

    def _zone(self, start: int, stop: int, end: int, count: int) -> Zone:
        g = self.book.pool.geometry
        columns = []
        for column in range(count):
            runs: list[Run] = []
            for bank in range(start, stop):
                tile = self.book.tiles[bank][column]
                if runs and runs[-1].tile + runs[-1].banks == tile:
                    runs[-1] = Run(runs[-1].bank, runs[-1].tile, runs[-1].banks + 1)
                else:
                    runs.append(Run(bank - start, tile, 1))
            columns.append(tuple(runs))
        return Zone(start * g.rows, end, count * g.cols, tuple(columns))

    def _tensors(self, layer: int, number: int, zone: Zone) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Per column, per run: keys and values, [rows × kv heads, cols, dim] each."""
        found = self._views.get((layer, number))
        if found is None:
            stored = self.book.pool.stored(layer)
            found = []
            rows = min(zone.hi - zone.lo, self.book.pool.geometry.rows)
            for runs in zone.columns:
                at = [(slice(run.tile, run.tile + run.banks), slice(rows)) for run in runs]
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
        """Zone `number`: query [slots × kv heads, M, D] in the keys' dtype; mask added to scores, broadcastable to
        [slots, kv heads, queries, heads per kv head, width] → output float32 [slots × kv heads, M, Dv], lse [.., M]."""
        zone = self.zones[number]
        g = self.book.pool.geometry
        views = self._tensors(layer, number, zone)
        batch, m, _ = query.shape
        per_bank = batch // (zone.hi - zone.lo) * min(zone.hi - zone.lo, g.rows)
        turned = query.transpose(1, 2)
        parts = []
        for runs, column in zip(zone.columns, views, strict=True):
            shape = (batch, g.cols, m) if m <= _FEW else (batch, m, g.cols)
            part = query.new_empty(shape, dtype=torch.float32)
            for run, (keys, _) in zip(runs, column, strict=True):
                at = slice(run.bank * per_bank, (run.bank + run.banks) * per_bank)
                if m <= _FEW:
                    _product(keys, turned[at], scaling, part[at])
                else:
                    _product(query[at], keys.transpose(1, 2), scaling, part[at])
            parts.append(part.transpose(1, 2) if m <= _FEW else part)
        scores = torch.cat(parts, -1) if len(parts) > 1 else parts[0].contiguous()
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
        for number, (runs, column) in enumerate(zip(zone.columns, views, strict=True)):
            cols = column[0][1].shape[1]
            share = weights[:, :, number * cols : (number + 1) * cols]
            part = weights.new_empty(*weights.shape[:2], column[0][1].shape[-1])
            for run, (_, values) in zip(runs, column, strict=True):
                at = slice(run.bank * per_bank, (run.bank + run.banks) * per_bank)
                torch.bmm(share[at], values, out=part[at])
            out = part.float() if out is None else out.add_(part)
        assert out is not None
        return out


def _product(a: torch.Tensor, b: torch.Tensor, alpha: float, out: torch.Tensor) -> None:
    """out = alpha·a·b in float32, whatever a and b are: scores of 100 are common, and bfloat16 has no fractions there."""
    if a.dtype == out.dtype:
        out.baddbmm_(a, b, beta=0, alpha=alpha)
    elif a.is_cuda and torch.version.hip is None:
        torch.bmm(a, b, out_dtype=out.dtype, out=out)
        out.mul_(alpha)
    else:
        torch.mul(torch.bmm(a, b), alpha, out=out)
