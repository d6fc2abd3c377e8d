"""Puts the keys and values of a forward pass where the books say.

In bf16 mode on CPU keys are kept in float32 (their values are bf16): scores must not be rounded to bf16, which a
bf16 batched product on CPU would do. Attention logits of 100 are common, and bf16 has no fractions there.
"""

from __future__ import annotations

import numpy as np
import torch

from verl.engine.rollout.native.cache import TilePool


class Writer:
    """Where the tokens of this forward pass go in the cache."""

    def __init__(self, pool: TilePool, compute: torch.dtype):
        self.pool = pool
        self._compute = compute
        self._rows = np.zeros(0, np.int64)
        self._cols = np.zeros(0, np.int64)

    def place(self, rows: np.ndarray, cols: np.ndarray) -> None:
        """`Book.token_rows` of each token, in the order of the packed tokens."""
        self._rows, self._cols = rows, cols

    def index(self, heads: int) -> np.ndarray:
        """Row in the flat view [.., D] of a layer's keys for each (token, kv head), int64 [S × heads]."""
        cols = self.pool.geometry.cols
        return ((self._rows[:, None] * heads + np.arange(heads)) * cols + self._cols[:, None]).reshape(-1)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, index: torch.Tensor) -> None:
        """key, value [1, Hkv, S, D] of all tokens; index as from `index`."""
        keys, values = self.pool.layer(layer, key.shape[1], key.shape[-1], value.shape[-1])
        for store, new in ((keys, key), (values, value)):
            rows = new[0].transpose(0, 1).reshape(-1, new.shape[-1])
            store.view(-1, new.shape[-1]).index_copy_(0, index, rows.to(self._compute).to(store.dtype))


def layer_index(module: torch.nn.Module) -> int:
    """`module.layer_idx`. Raises ValueError when the architecture does not number its attention layers."""
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ValueError(
            f"{type(module).__name__} has no layer_idx: the sampler cannot tell its cache from the others'"
        )
    return index
