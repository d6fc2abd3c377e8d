"""Key/value memory: one pool of blocks, and tables that say which block holds which tokens.

A block holds `rows` sequences × `cols` consecutive tokens of every layer. A table is an array of slots, one per
sequence; `rows` neighbouring slots form a block_row, and a block_row owns a list of blocks, one per `cols` tokens of
its longest sequence. So memory grows with the tokens stored, has a hard limit (the pool), and yet attention over
a whole block_row is one batched product on a strided view: nothing is gathered or copied to be read.

    slot        0 1 2 3 | 4 5 6 7 | …         rows = 4
    tokens 0-   block 0  | block 1  |
    tokens 128- block 5  |         |           block_row 0 holds a longer sequence

There are two tables on one pool: prompts (stored once per group) and responses. The pool has a layer for each call of
attention in a pass, which `AttentionCalls` numbers.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from verl.engine.rollout.native.states import StatePool
from verl.errors import UserError
from verl.platform import platform_of
from verl.platform.host_resources import total_memory

_NARROWEST = 16  # columns of the smallest block


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """Shape of the cache. `blocks` × `rows` × `cols` tokens in all."""

    rows: int
    cols: int
    blocks: int

    @classmethod
    def fit(cls, cache_tokens: int, max_model_len: int, max_num_seqs: int, *, paged: bool = False) -> KVCacheLayout:
        """The coarsest blocks (16 × 32 … 128) that leave room to share a cache of `cache_tokens` tokens.

        Products read whole blocks, because strided ones would be copied first (measured: twice the time), so
        the longer the sequences may be, the wider the blocks. paged: blocks of one sequence each, for kernels that
        follow a block table.

        Raises UserError when not even one sequence of `max_model_len` tokens fits.
        """
        widest = 32 if max_model_len <= 512 else 64 if max_model_len <= 2048 else 128
        coarse = [(rows, widest) for rows in ((1,) if paged else (16, 8, 4, 2, 1))]
        for rows, cols in [*coarse, *((1, cols) for cols in (64, 32, _NARROWEST) if cols < widest)]:
            blocks = cache_tokens // (rows * cols)
            # a prompt and a response that together have max_model_len tokens, each rounded up to whole blocks
            needed = -(-max_model_len // cols) + 1
            if blocks >= min(8, -(-max_num_seqs // rows)) * needed:
                break  # enough for eight block_rows, or for all sequences at once
        if blocks < needed:
            raise UserError(
                f"a key/value cache of {cache_tokens} tokens cannot hold one sequence of max_model_len={max_model_len} "
                f"tokens (needs {needed * rows * cols}): raise rollout.gpu_memory_utilization "
                "(cache_tokens, where that is given) or lower max_model_len"
            )
        return cls(rows, cols, blocks)

    def flat_index(self, rows: np.ndarray, cols: np.ndarray, heads: int) -> np.ndarray:
        """Row in the flat view [.., D] of a layer for each (token, kv head), int64 [S × heads], from
        `KVSlotTable.token_rows`."""
        return ((rows[:, None] * heads + np.arange(heads)) * self.cols + cols[:, None]).reshape(-1)


def default_cache_tokens(
    per_token: int,
    device: torch.device,
    max_num_seqs: int,
    max_model_len: int,
    engines: int = 1,
    *,
    share: float = 0.5,
    taken_later: int = 0,
) -> int:
    """Room for max_num_seqs sequences of max_model_len tokens, or a share of the device's free memory, at `per_token`
    bytes. taken_later: bytes of it that something else is about to take.

    On a CPU the share is of half the machine, divided among `engines` samplers, and does not depend on the memory free
    at the moment: a resumed run must schedule exactly as the first one did. One sequence always has room."""
    # whole blocks of at most 16 × 128 tokens, and both tables as if all their sequences were longest
    largest = 2 * (-(-max_num_seqs // 16) * 16) * (-(-max_model_len // 128) * 128)
    room = cache_room(device, engines, share=share, taken_later=taken_later)
    least = (-(-max_model_len // _NARROWEST) + 1) * _NARROWEST if platform_of(device).on_host else 0
    return min(largest, max(room // per_token, least))


def cache_room(device: torch.device, engines: int = 1, *, share: float, taken_later: int) -> int:
    """Bytes of the share of memory; see `default_cache_tokens`."""
    platform = platform_of(device)
    room = total_memory() // engines / 2 if platform.on_host else platform.room(device.index or 0) - taken_later
    return int(room * share)


class AttentionCalls:
    """Numbers the attention calls of a pass: the cache has a layer for each.

    The architecture's own numbers do not serve, because some attend twice in a layer (DiffLlama), run their layers
    several times (HRM), or number nothing. Every pass makes the same calls in the same order, which is checked.
    """

    def __init__(self) -> None:
        self._usual: list[nn.Module] = []
        self._made: list[nn.Module] = []

    def start(self) -> None:
        """A pass begins."""
        self._made = []

    def number(self, module: nn.Module) -> int:
        """The number of the call that this module makes now."""
        self._made.append(module)
        return len(self._made) - 1

    def finish(self) -> None:
        """A pass is over. RuntimeError if its calls were others than those of the passes before it."""
        self._usual = self._usual or self._made
        if self._made != self._usual:
            raise RuntimeError(
                f"a pass of {len(self._made)} attention calls differs from the passes before it, of "
                f"{len(self._usual)}: the embedded sampler cannot tell whose keys it stored; use another rollout "
                "engine (rollout.name=vllm)"
            )


class KVBlockPool:
    """The memory itself. Layers are allocated when first written, because only then their shape is known.

    Keys may be kept in a wider data type than `compute`, in which values are kept and attention's inputs come.
    paged: kernels read single sequences by their block tables, so blocks need no zeros, and no neighbours.
    states: of a model with layers of linear attention.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        device: torch.device,
        key_dtype: torch.dtype,
        compute: torch.dtype,
        *,
        paged: bool = False,
        states: StatePool | None = None,
    ):
        self.layout = layout
        self.paged, self.states = paged, states
        self.device = device
        self.key_dtype = key_dtype
        self.compute = compute
        self.calls = AttentionCalls()
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._free = list(range(layout.blocks))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def take(self, *, last: bool = False) -> int:
        """The lowest (or highest) free block, zeroed unless paged. IndexError when the pool is full.

        Prompts fill the pool from its end: blocks that responses take one after the other stay neighbours, and
        neighbours are read in one product.
        """
        block = self._free.pop(-1 if last else 0)
        # Unwritten places are masked, but 0 × NaN of stray memory would still be NaN.
        for tensor in () if self.paged else self.tensors():
            tensor[block].zero_()
        return block

    def give(self, block: int) -> None:
        """A block is free again."""
        bisect.insort(self._free, block)

    def layer(self, index: int, kv_heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [blocks, rows, kv_heads, cols, dim] each."""
        if index not in self._layers:
            g = self.layout
            shape = g.blocks, g.rows, kv_heads, g.cols
            large = platform_of(self.device).large_tensor
            keys = large((*shape, key_dim), self.key_dtype, self.device)
            values = large((*shape, value_dim), self.compute, self.device)
            if not self.paged:
                used = sorted(set(range(g.blocks)) - set(self._free))
                keys[used], values[used] = 0, 0
            self._layers[index] = keys, values
        return self._layers[index]

    def stored(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that was written before."""
        return self._layers[index]

    def write(self, layer: int, key: Tensor, value: Tensor, index: Tensor) -> None:
        """Store key and value [1, Hkv, S, D] at the rows `index` (`KVCacheLayout.flat_index`) of a layer."""
        stores = self.layer(layer, key.shape[1], key.shape[-1], value.shape[-1])
        for store, new in zip(stores, (key, value), strict=True):
            rows = new[0].transpose(0, 1).reshape(-1, new.shape[-1])
            store.view(-1, new.shape[-1]).index_copy_(0, index, rows.to(self.compute).to(store.dtype))

    def tensors(self) -> list[Tensor]:
        """Keys and values of all layers."""
        return [tensor for layer in self._layers.values() for tensor in layer]

    def drop(self) -> None:
        """Free the memory (no table may hold a block)."""
        self._layers.clear()
        if self.states is not None:
            self.states.drop()


class KVSlotTable:
    """Slots for sequences, and the blocks of each block_row of slots."""

    def __init__(self, pool: KVBlockPool, slots: int, *, from_end: bool = False):
        g = pool.layout
        self.pool = pool
        self._from_end = from_end
        self.slots = -(-slots // g.rows) * g.rows
        self.lengths = np.zeros(self.slots, np.int64)  # tokens there is room for, which a step then writes
        self.taken = np.zeros(self.slots, bool)
        self.states = np.zeros(self.slots, np.int64)  # of slots that are taken, in the pool's, if it has any
        self.blocks: list[list[int]] = [[] for _ in range(self.slots // g.rows)]
        self.version = 0
        self._limit = slots

    def acquire(self, length: int = 0) -> int | None:
        """The first free slot, with room for `length` tokens and a state; None (and no change) when slots, pool or
        states are full."""
        states = self.pool.states
        if self.taken.sum() == self._limit or (states is not None and not states.free):
            return None
        slot = int(np.argmin(self.taken))
        if not self.reserve(slot, length):
            return None
        self.taken[slot] = True
        self.version += 1
        if states is not None:
            self.states[slot] = states.take()
        return slot

    def reserve(self, slot: int, length: int) -> bool:
        """Make room for `length` tokens in a slot; False (and nothing changed) when the pool is full."""
        g = self.pool.layout
        block_row = self.blocks[slot // g.rows]
        new_blocks = -(-length // g.cols) - len(block_row)
        if new_blocks > self.pool.free_blocks:
            return False
        self.lengths[slot] = max(length, self.lengths[slot])
        if new_blocks <= 0:
            return True
        for _ in range(new_blocks):
            block_row.append(self.pool.take(last=self._from_end))
        self.version += 1
        return True

    def release(self, slot: int) -> None:
        """Give a slot back, and the blocks that only it needed."""
        g = self.pool.layout
        self.taken[slot], self.lengths[slot] = False, 0
        self.version += 1
        if self.pool.states is not None:
            self.pool.states.give(int(self.states[slot]))
        block_row = slot // g.rows
        longest = int(self.lengths[block_row * g.rows : (block_row + 1) * g.rows].max())
        while len(self.blocks[block_row]) > -(-longest // g.cols):
            self.pool.give(self.blocks[block_row].pop())

    def token_rows(self, slots: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(block × rows + row, column) of each (slot, position): where a token's keys and values lie."""
        cols = self.pool.layout.cols
        return self.slot_blocks(slots)[np.arange(len(slots)), positions // cols], positions % cols

    def slot_blocks(self, slots: np.ndarray) -> np.ndarray:
        """block × rows + row of each slot's blocks, in their order [slots, most blocks]; arbitrary where it has
        none."""
        g = self.pool.layout
        table = np.full((len(self.blocks), max((len(t) for t in self.blocks), default=0) or 1), -1, np.int64)
        for block_row in np.unique(slots // g.rows):
            table[block_row, : len(self.blocks[block_row])] = self.blocks[block_row]
        return table[slots // g.rows] * g.rows + slots[:, None] % g.rows

    def waste(self) -> tuple[int, int]:
        """(blocks in use, blocks that the same sequences would need if sorted by length)."""
        g = self.pool.layout
        need = np.sort(-(-self.lengths[self.taken] // g.cols))[::-1]
        return sum(map(len, self.blocks)), int(need[:: g.rows].sum())

    def sparse(self) -> bool:
        """More than half of the slots up to the last one in use are holes."""
        used = np.flatnonzero(self.taken)
        return len(used) > 0 and int(used[-1]) + 1 > 2 * len(used)

    def repack(self) -> dict[int, int]:
        """Sort the sequences by their number of blocks, longest first, without holes. Returns {old slot: new slot}.

        Bytes move inside the pool: block column by block column, each through a temporary copy. In a column the
        sequences that reach it move to its first slots, which lie in blocks that the column already had.
        """
        g = self.pool.layout
        old = np.flatnonzero(self.taken)
        need = -(-self.lengths[old] // g.cols)
        order = np.argsort(-need, kind="stable")
        old, need = old[order], need[order]
        blocks: list[list[int]] = [[] for _ in self.blocks]
        for column in range(max(map(len, self.blocks))):
            source = np.array([t[column] if len(t) > column else -1 for t in self.blocks], np.int64)
            present = source[source >= 0]
            count = int((need > column).sum())
            block_rows = -(-count // g.rows)
            at, to = old[:count], np.arange(count)
            self._move(source[at // g.rows] * g.rows + at % g.rows, present[to // g.rows] * g.rows + to % g.rows)
            for block_row in range(block_rows):
                blocks[block_row].append(int(present[block_row]))
            for block in present[block_rows:]:
                self.pool.give(int(block))
        self.blocks = blocks
        lengths, self.states[: len(old)] = self.lengths[old], self.states[old]
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
        for tensor in self.pool.tensors():
            flat = tensor.view(tensor.shape[0] * tensor.shape[1], -1)
            flat.index_copy_(0, target, flat.index_select(0, source))
