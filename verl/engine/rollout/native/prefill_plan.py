"""Attention of a prefill: packed segments of prompts and of responses that must be computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from verl.engine.rollout.native.cache import KVBlockPool, KVSlotTable
from verl.engine.rollout.native.reader import MASKED
from verl.engine.rollout.native.writer import Calls, Writer
from verl.platform import platform_of


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Tokens start … start + count - 1 of one slot. A response's segment names its prompt (slot, length)."""

    table: KVSlotTable
    slot: int
    start: int
    count: int
    prompt: tuple[KVSlotTable, int, int] | None = None


class PrefillPlan:
    """Packed segments; each sees its prompt, what its slot already holds, and itself causally."""

    def __init__(
        self, pool: KVBlockPool, segments: Sequence[PrefillSpan], compute: torch.dtype, calls: Calls
    ):
        self._writer = Writer(pool, compute, calls)
        self._segments = segments
        self._compute = compute
        places = [
            s.table.token_rows(np.full(s.count, s.slot, np.int64), np.arange(s.start, s.start + s.count))
            for s in segments
        ]
        self._writer.place(np.concatenate([r for r, _ in places]), np.concatenate([c for _, c in places]))
        self._index: dict[int, torch.Tensor] = {}
        self._masks: dict[tuple[int, int, int | None], torch.Tensor] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `AttentionPlan`."""
        layer = self._writer.calls.number(module)
        index = self._index.get(key.shape[1])
        if index is None:
            index = self._index[key.shape[1]] = torch.from_numpy(self._writer.index(key.shape[1])).to(
                key.device
            )
        self._writer.write(layer, key, value, index)
        query, key, value = (t.to(self._compute) for t in (query, key, value))
        out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        at = 0
        for segment in self._segments:
            here = slice(at, at + segment.count)
            k, v = key[:, :, here], value[:, :, here]
            if segment.start:
                k, v = self._join(layer, segment.table, segment.slot, segment.start, k, v)
            if segment.prompt is not None:
                k, v = self._join(layer, *segment.prompt, k, v)
            part = self._one(query[:, :, here], k, v, scaling, sliding_window, softcap, sinks)
            out[:, here] = part.transpose(1, 2)
            at += segment.count
        return out

    def _join(
        self, layer: int, table: KVSlotTable, slot: int, length: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the first `length` tokens of a slot before key and value, [1, Hkv, length + S, D] each."""
        keys, values = table.pool.stored(layer)
        g = table.pool.layout
        joined = []
        for store, new in ((keys, key), (values, value)):
            parts = []
            for column in range(-(-length // g.cols)):
                width = min(g.cols, length - column * g.cols)
                block = table.blocks[slot // g.rows][column]
                parts.append(store[block, slot % g.rows, :, :width].to(self._compute))
            joined.append(torch.cat([*parts, new[0]], 1)[None])
        return joined[0], joined[1]

    def _one(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        new, total = query.shape[2], key.shape[2]
        if window is not None and total <= window:
            window = None
        if softcap is None and sinks is None:
            causal = new == total and window is None
            mask = None if causal else self._mask(new, total, window, query.device)
            if not platform_of(query.device).has_grouped_attention(query.dtype, causal):
                group = query.shape[1] // key.shape[1]
                key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=causal,
                scale=scaling,
                enable_gqa=key.shape[1] != query.shape[1],
            )
        heads = key.shape[1]
        q = query.float().unflatten(1, (heads, -1))
        scores = torch.einsum("bhgqd,bhkd->bhgqk", q, key.float()) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~self._mask(new, total, window, query.device), MASKED)
        lse = scores.logsumexp(-1, keepdim=True)
        out = torch.einsum("bhgqk,bhkd->bhgqd", (scores - lse).exp(), value.float())
        if sinks is not None:
            out = out * torch.sigmoid(lse - sinks.float().view(heads, -1)[None, :, :, None, None])
        return out.flatten(1, 2).to(query.dtype)

    def _mask(self, new: int, total: int, window: int | None, device: torch.device) -> torch.Tensor:
        """True where the query sees the key, [new, total]; the queries are the last `new` positions."""
        found = self._masks.get((new, total, window))
        if found is None:
            position = torch.arange(total - new, total, device=device)[:, None]
            keys = torch.arange(total, device=device)
            found = keys <= position
            if window is not None:
                found &= keys > position - window
            self._masks[new, total, window] = found
        return found
