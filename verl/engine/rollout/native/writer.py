"""Puts the keys and values of a forward pass where the tables say.

In bf16 mode on CPU keys are kept in float32 (their values are bf16): scores must not be rounded to bf16, which a
bf16 batched product on CPU would do. Attention logits of 100 are common, and bf16 has no fractions there.
"""

from __future__ import annotations

import numpy as np
import torch

from verl.engine.rollout.native.cache import KVBlockPool
from verl.engine.rollout.native.supported import INSTEAD


class Calls:
    """Numbers the attention calls of a pass: the cache has a layer for each.

    Not the architecture's own numbers, because some attend twice in a layer (DiffLlama), go through their layers several
    times (HRM), or number nothing. Every pass makes the same calls in the same order, which is checked.
    """

    def __init__(self) -> None:
        self._modules: list[torch.nn.Module] = []
        self._whole = False
        self._next = 0

    def start(self) -> None:
        """A pass begins."""
        self._next = 0

    def number(self, module: torch.nn.Module) -> int:
        """The number of this call. RuntimeError if another module made it in earlier passes."""
        at, self._next = self._next, self._next + 1
        if at == len(self._modules) and not self._whole:
            self._modules.append(module)
        if at >= len(self._modules) or self._modules[at] is not module:
            raise RuntimeError(self._changed(module, f"makes attention call {at}"))
        return at

    def finish(self) -> None:
        """A pass is over. RuntimeError if it made fewer calls than earlier ones."""
        if self._next != len(self._modules):
            module = self._modules[self._next]
            raise RuntimeError(self._changed(module, f"stops after {self._next} attention calls"))
        self._whole = True

    @staticmethod
    def _changed(module: torch.nn.Module, what: str) -> str:
        return (
            f"{type(module).__name__}: a pass {what}, unlike the passes before it, so the embedded sampler cannot tell "
            f"whose keys it stored: {INSTEAD}"
        )


class Writer:
    """Where the tokens of this forward pass go in the cache."""

    def __init__(self, pool: KVBlockPool, compute: torch.dtype, calls: Calls):
        self.pool = pool
        self.calls = calls
        self._compute = compute
        self._rows = np.zeros(0, np.int64)
        self._cols = np.zeros(0, np.int64)

    def place(self, rows: np.ndarray, cols: np.ndarray) -> None:
        """`KVSlotTable.token_rows` of each token, in the order of the packed tokens."""
        self._rows, self._cols = rows, cols

    def index(self, heads: int) -> np.ndarray:
        """Row in the flat view [.., D] of a layer's keys for each (token, kv head), int64 [S × heads]."""
        cols = self.pool.layout.cols
        return ((self._rows[:, None] * heads + np.arange(heads)) * cols + self._cols[:, None]).reshape(-1)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, index: torch.Tensor) -> None:
        """key, value [1, Hkv, S, D] of all tokens; index as from `index`."""
        keys, values = self.pool.layer(layer, key.shape[1], key.shape[-1], value.shape[-1])
        for store, new in ((keys, key), (values, value)):
            rows = new[0].transpose(0, 1).reshape(-1, new.shape[-1])
            store.view(-1, new.shape[-1]).index_copy_(0, index, rows.to(self._compute).to(store.dtype))
