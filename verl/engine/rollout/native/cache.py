"""Key/value memory: one pool of tiles, and books that say which tile holds which tokens.

A tile holds `rows` sequences × `cols` consecutive tokens of every layer. A book is an array of slots, one per
sequence; `rows` neighbouring slots form a bank, and a bank owns a list of tiles, one per `cols` tokens of its
longest sequence. So memory grows with the tokens stored, has a hard limit (the pool), and yet attention over
a whole bank is one batched product on a strided view: nothing is gathered or copied to be read.

    slot        0 1 2 3 | 4 5 6 7 | …         rows = 4
    tokens 0-   tile 0  | tile 1  |
    tokens 128- tile 5  |         |           bank 0 holds a longer sequence

There are two books on one pool: prompts (stored once per group) and answers.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of the cache. `tiles` × `rows` × `cols` tokens in all."""

    rows: int
    cols: int
    tiles: int

    @classmethod
    def fit(cls, cache_tokens: int, max_model_len: int, max_num_seqs: int) -> Geometry:
        """The coarsest tiles (16 × 32 … 128) that leave room to share a cache of `cache_tokens` tokens.

        Products read whole tiles, because strided ones would be copied first (measured: twice the time), so
        the longer the sequences may be, the wider the tiles.

        Raises ValueError when not even one sequence of `max_model_len` tokens fits.
        """
        rows, cols = 16, 32 if max_model_len <= 512 else 64 if max_model_len <= 2048 else 128

        def needed() -> int:
            # a prompt and an answer that together have max_model_len tokens, each rounded up to whole tiles
            return -(-max_model_len // cols) + 1

        def roomy() -> bool:
            """Enough for eight banks, or for all sequences at once."""
            return cache_tokens // (rows * cols) >= min(8, -(-max_num_seqs // rows)) * needed()

        while rows > 1 and not roomy():
            rows //= 2
        while cols > 16 and not roomy():
            cols //= 2
        tiles = cache_tokens // (rows * cols)
        if tiles < needed():
            raise ValueError(
                f"a key/value cache of {cache_tokens} tokens cannot hold one sequence of max_model_len={max_model_len} "
                f"tokens (needs {needed() * rows * cols}): raise cache_tokens or lower max_model_len"
            )
        return cls(rows, cols, tiles)


class TilePool:
    """The memory itself. Layers are allocated when first written, because only then their shape is known."""

    def __init__(
        self, geometry: Geometry, device: torch.device, key_dtype: torch.dtype, value_dtype: torch.dtype
    ):
        self.geometry = geometry
        self.device = device
        self.key_dtype = key_dtype
        self._dtypes = (key_dtype, value_dtype)
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._free = list(range(geometry.tiles))
        self._clean = np.zeros(geometry.tiles, bool)
        self.peak = 0

    @property
    def free_tiles(self) -> int:
        return len(self._free)

    @property
    def used_tiles(self) -> int:
        return self.geometry.tiles - len(self._free)

    def take(self, *, last: bool = False) -> int | None:
        """The lowest (or highest) free tile, or None when the pool is full.

        Prompts fill the pool from its end: tiles that answers take one after the other stay neighbours, and
        neighbours are read in one product.
        """
        if not self._free:
            return None
        tile = self._free.pop(-1 if last else 0)
        self.peak = max(self.peak, self.used_tiles)
        if not self._clean[tile]:
            # Unwritten places are masked, but 0 × NaN of stray memory would still be NaN.
            for layer in self._layers.values():
                for tensor in layer:
                    tensor[tile].zero_()
            self._clean[tile] = bool(self._layers)
        return tile

    def give(self, tile: int) -> None:
        bisect.insort(self._free, tile)

    def layer(
        self, index: int, kv_heads: int, key_dim: int, value_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, [tiles, rows, kv_heads, cols, dim] each."""
        found = self._layers.get(index)
        if found is None:
            g = self.geometry
            used = sorted(set(range(g.tiles)) - set(self._free))
            shape = (g.tiles, g.rows, kv_heads, g.cols)
            found = (
                torch.empty(*shape, key_dim, dtype=self._dtypes[0], device=self.device),
                torch.empty(*shape, value_dim, dtype=self._dtypes[1], device=self.device),
            )
            for tensor in found:
                tensor[used] = 0
            self._clean[:] = False
            self._clean[used] = True
            self._layers[index] = found
        keys, values = found
        if keys.shape[2] != kv_heads or keys.shape[4] != key_dim or values.shape[4] != value_dim:
            raise ValueError(
                f"layer {index} attended with {kv_heads} heads of {key_dim}/{value_dim} after {keys.shape[2]} heads of "
                f"{keys.shape[4]}/{values.shape[4]}: its keys must keep their shape"
            )
        return found

    def stored(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer that was written before."""
        return self._layers[index]

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(self._layers.values())

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer in self._layers.values() for t in layer)

    def drop(self) -> None:
        """Free the memory (no book may hold a tile)."""
        self._layers.clear()
        self._clean[:] = False


class Book:
    """Slots for sequences, and the tiles of each bank of slots."""

    def __init__(self, pool: TilePool, slots: int, *, from_end: bool = False):
        g = pool.geometry
        self.pool = pool
        self._from_end = from_end
        self.slots = -(-slots // g.rows) * g.rows
        self.lengths = np.zeros(self.slots, np.int64)  # tokens there is room for, which a step then writes
        self.taken = np.zeros(self.slots, bool)
        self.tiles: list[list[int]] = [[] for _ in range(self.slots // g.rows)]
        self.version = 0
        self._limit = slots

    @property
    def free_slots(self) -> int:
        return self._limit - int(self.taken.sum())

    def acquire(self) -> int | None:
        """The first free slot, or None."""
        if self.free_slots == 0:
            return None
        slot = int(np.argmin(self.taken))
        self.taken[slot] = True
        self.lengths[slot] = 0
        self.version += 1
        return slot

    def reserve(self, slot: int, length: int) -> bool:
        """Make room for `length` tokens in a slot; False (and nothing changed) when the pool is full."""
        g = self.pool.geometry
        bank = self.tiles[slot // g.rows]
        wanted = -(-length // g.cols) - len(bank)
        if wanted > self.pool.free_tiles:
            return False
        self.lengths[slot] = max(length, self.lengths[slot])
        if wanted <= 0:
            return True
        for _ in range(wanted):
            tile = self.pool.take(last=self._from_end)
            assert tile is not None
            bank.append(tile)
        self.version += 1
        return True

    def release(self, slot: int) -> None:
        """Give a slot back, and the tiles that only it needed."""
        self.taken[slot] = False
        self.lengths[slot] = 0
        self._trim(slot // self.pool.geometry.rows)
        self.version += 1

    def _trim(self, bank: int) -> None:
        g = self.pool.geometry
        longest = int(self.lengths[bank * g.rows : (bank + 1) * g.rows].max())
        keep = -(-longest // g.cols)
        while len(self.tiles[bank]) > keep:
            self.pool.give(self.tiles[bank].pop())

    def token_rows(self, slots: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tile × rows + row, column) of each (slot, position): where a token's keys and values lie."""
        g = self.pool.geometry
        banks, columns = slots // g.rows, positions // g.cols
        table = np.full((len(self.tiles), max((len(t) for t in self.tiles), default=0) or 1), -1, np.int64)
        for bank in np.unique(banks):
            table[bank, : len(self.tiles[bank])] = self.tiles[bank]
        return table[banks, columns] * g.rows + slots % g.rows, positions % g.cols

    def waste(self) -> tuple[int, int]:
        """(tiles in use, tiles that the same sequences would need if sorted by length)."""
        g = self.pool.geometry
        need = np.sort(-(-self.lengths[self.taken] // g.cols))[::-1]
        return sum(map(len, self.tiles)), int(need[:: g.rows].sum())

    def sparse(self) -> bool:
        """More than half of the slots up to the last one in use are holes."""
        used = np.flatnonzero(self.taken)
        return len(used) > 0 and int(used[-1]) + 1 > 2 * len(used)

    def repack(self) -> dict[int, int]:
        """Sort the sequences by their number of tiles, longest first, without holes. Returns {old slot: new slot}.

        Bytes move inside the pool: tile column by tile column, each through a temporary copy. In a column the
        sequences that reach it move to its first slots, which lie in tiles that the column already had.
        """
        g = self.pool.geometry
        old = np.flatnonzero(self.taken)
        need = -(-self.lengths[old] // g.cols)
        order = np.argsort(-need, kind="stable")
        old, need = old[order], need[order]
        tiles: list[list[int]] = [[] for _ in self.tiles]
        for column in range(max(map(len, self.tiles))):
            source = np.array([t[column] if len(t) > column else -1 for t in self.tiles], np.int64)
            present = source[source >= 0]
            count = int((need > column).sum())
            banks = -(-count // g.rows)
            at, to = old[:count], np.arange(count)
            self._move(
                source[at // g.rows] * g.rows + at % g.rows, present[to // g.rows] * g.rows + to % g.rows
            )
            for bank in range(banks):
                tiles[bank].append(int(present[bank]))
            for tile in present[banks:]:
                self.pool.give(int(tile))
        self.tiles = tiles
        lengths = self.lengths[old]
        self.lengths[:], self.taken[:] = 0, False
        self.lengths[: len(old)], self.taken[: len(old)] = lengths, True
        self.version += 1
        return dict(zip(old.tolist(), range(len(old)), strict=True))

    def _move(self, src: np.ndarray, dst: np.ndarray) -> None:
        moved = src != dst
        if not moved.any():
            return
        source = torch.from_numpy(src[moved]).to(self.pool.device)
        target = torch.from_numpy(dst[moved]).to(self.pool.device)
        for layer in self.pool.layers():
            for tensor in layer:
                flat = tensor.view(tensor.shape[0] * tensor.shape[1], -1)
                flat.index_copy_(0, target, flat.index_select(0, source))
