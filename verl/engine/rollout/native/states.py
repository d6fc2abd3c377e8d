"""States of layers of linear attention (`verl.models.recurrent`) beside the key/value cache: one for each sequence in
it, of all layers, and no more than there is memory for. Each state is that after the tokens that its sequence has
cached.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from verl.errors import UserError
from verl.models.recurrent import State

_SEQUENCES = 4  # in the cache for each that may be sampled at a time: prompts, and sessions that wait for a tool


class StatePool:
    """Memory for `count` states. A layer's is allocated when first written, because only then its shape is known."""

    def __init__(self, count: int, device: torch.device):
        self._count, self._device = count, device
        self._layers: dict[nn.Module, State] = {}
        self._free = list(range(count))

    @classmethod
    def fit(cls, bytes_each: int, room: int, max_num_seqs: int, device: torch.device) -> StatePool:
        """As many states as are of use, in half of the cache's `room`. UserError if not even two fit."""
        count = min(_SEQUENCES * max_num_seqs, room // 2 // bytes_each)
        if count < 2:
            raise UserError(
                f"a prompt and a response need states of {2 * bytes_each:,} bytes in the layers of linear attention, "
                f"and the cache may take {room // 2:,}: raise rollout.gpu_memory_utilization"
            )
        return cls(count, device)

    @property
    def free(self) -> int:
        """States that no sequence has."""
        return len(self._free)

    def take(self) -> int:
        """The number of a free state."""
        return self._free.pop(0)

    def give(self, number: int) -> None:
        """A state is free again."""
        bisect.insort(self._free, number)

    def read(self, layer: nn.Module, numbers: Sequence[int] | np.ndarray) -> State:
        """Copies of the states of some sequences in one layer."""
        index = self._index(numbers)
        conv, heads = (stored.index_select(0, index) for stored in self._layers[layer])
        return conv, heads

    def write(self, layer: nn.Module, numbers: Sequence[int] | np.ndarray, state: State) -> None:
        """Store the states of some sequences in one layer."""
        if layer not in self._layers:
            conv, heads = (x.new_empty(self._count, *x.shape[1:]) for x in state)
            self._layers[layer] = conv, heads
        index = self._index(numbers)
        for stored, new in zip(self._layers[layer], state, strict=True):
            stored.index_copy_(0, index, new.to(stored.dtype))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Give sequences the states of others, in all layers: (from, to) of each."""
        if not pairs:
            return
        source, target = (self._index(numbers) for numbers in zip(*pairs, strict=True))
        for layer in self._layers.values():
            for stored in layer:
                stored.index_copy_(0, target, stored.index_select(0, source))

    def drop(self) -> None:
        """Free the memory (no sequence may have a state)."""
        self._layers.clear()

    def _index(self, numbers: Sequence[int] | np.ndarray) -> Tensor:
        return torch.tensor(np.asarray(numbers), device=self._device)
