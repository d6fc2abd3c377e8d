"""Attention of a prefill: packed spans of prompts, and of responses that must be computed again.

In half precision on a device with a flash kernel (`Platform.flash_kernel`) all spans are one call of it, else each span
is a call of torch's attention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.engine.rollout.base import RecordedRoutes
from verl.engine.rollout.native.cache import KVBlockPool, KVSlotTable
from verl.models.attention import AttentionOptions
from verl.models.flash_attention import Kernel, KernelCall, fits
from verl.models.inputs import ImageContext, text_axes
from verl.models.recurrent import run
from verl.platform import platform_of
from verl.trajectory import Media


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of one prompt and where its tokens are."""

    media: Media
    context: ImageContext


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Tokens `ids` of one slot from token `start` of it. `routes`: where those of the slot's tokens are recorded.
    `prompt`: a response's (table, slot, length) of its prompt. `images`: of the prompt."""

    table: KVSlotTable
    slot: int
    start: int
    ids: list[int]
    routes: RecordedRoutes
    prompt: tuple[KVSlotTable, int, int] | None = None
    images: PromptImages | None = None

    @property
    def first(self) -> int:
        """Number of the first token in prompt + response."""
        return self.start + (self.prompt[2] if self.prompt is not None else 0)

    @property
    def earlier_state(self) -> int:
        """The state that the tokens follow, where they are not their sequence's first."""
        table, slot = (self.table, self.slot) if self.start or self.prompt is None else self.prompt[:2]
        return int(table.states[slot])

    @property
    def positions(self) -> np.ndarray:
        """Positions of the tokens in prompt + response."""
        return np.arange(self.first, self.first + len(self.ids))

    @property
    def axes(self) -> np.ndarray:
        """Positions int64 [3, tokens] for a model that sees images."""
        axes = text_axes if self.images is None else self.images.context.axes
        return axes(self.first, len(self.ids))


class PrefillPlan:
    """Packed spans; each sees its prompt, what its slot already holds, and itself causally."""

    def __init__(self, pool: KVBlockPool, spans: Sequence[PrefillSpan]):
        self._pool, self._spans = pool, spans
        self._slots = [
            s.table.token_rows(np.full(len(s.ids), s.slot), np.arange(s.start, s.start + len(s.ids))) for s in spans
        ]
        self._index: dict[int, Tensor] = {}
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See `AttentionPlan`."""
        layer = self._pool.calls.number(module)
        self._pool.write(layer, key, value, self.places(key.shape[1]))
        query, key, value = (t.to(self._pool.compute) for t in (query, key, value))
        if (kernel := self._kernel(query, value, options)) is not None:
            return self._at_once(kernel, layer, query, key, value, options.scaling)
        out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        at = 0
        for span in self._spans:
            here = slice(at, at := at + len(span.ids))
            k, v = key[:, :, here], value[:, :, here]
            if span.start:
                k, v = self._join(layer, span.table, span.slot, span.start, k, v)
            if span.prompt is not None:
                k, v = self._join(layer, *span.prompt, k, v)
            out[:, here] = self._one(query[:, :, here], k, v, options).transpose(1, 2)
        return out

    @cached_property
    def _together(self) -> list[list[tuple[PrefillSpan, int]]]:
        """Spans of one length that all follow a state or none, each with its first token's number in the pass. A prompt
        comes after the responses that were scheduled before it and before those after it: it may begin again."""
        alike: dict[tuple[int, bool, int], list[tuple[PrefillSpan, int]]] = defaultdict(list)
        prompts, start = set(), 0
        for span in self._spans:
            turn = 1 if span.prompt is None else 2 if span.prompt[1] in prompts else 0
            if span.prompt is None:
                prompts.add(span.slot)
            alike[turn, span.first > 0, len(span.ids)].append((span, start))
            start += len(span.ids)
        return [alike[key] for key in sorted(alike)]

    def mix(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """See `AttentionPlan`."""
        states, out = self._pool.states, torch.empty_like(hidden)
        assert states is not None
        for batch in self._together:
            places = [slice(start, start + len(span.ids)) for span, start in batch]
            earlier = [span.earlier_state for span, _ in batch if span.first]
            before = states.read(layer, earlier) if earlier else None
            computed, after = run(layer, torch.stack([hidden[0, place] for place in places]), before)
            states.write(layer, [span.table.states[span.slot] for span, _ in batch], after)
            for place, row in zip(places, computed, strict=True):
                out[0, place] = row
        return out

    def _kernel(self, query: Tensor, value: Tensor, options: AttentionOptions) -> Kernel | None:
        """The device's kernel if it can compute this; windows that cut something are left to torch."""
        cuts = options.sliding_window is not None and self._packed[0].max_keys > options.sliding_window
        usable = not cuts and fits(query, value, options)
        return platform_of(query.device).flash_kernel(query.device) if usable else None

    def _at_once(
        self, kernel: Kernel, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:  # fmt: skip
        call, places = self._packed
        keys_values = [x[0].transpose(0, 1) for x in (key, value)]
        if places is not None:
            stored = (store.flatten(0, 1) for store in self._pool.stored(layer))
            keys_values = [store[places[0], :, places[1]].to(self._pool.compute) for store in stored]
        packed = (x.contiguous() for x in (query[0].transpose(0, 1), *keys_values))
        return kernel[0](*packed, call, scale)[0][None]

    @cached_property
    def _packed(self) -> tuple[KernelCall, Tensor | None]:
        """The call for all spans, each after what it sees of earlier tokens, and the places of all keys in the cache,
        int64 [2, keys]; None where no span has earlier tokens."""
        queries, keys = ([n(s) for s in self._spans] for n in (lambda s: len(s.ids), lambda s: s.first + len(s.ids)))
        ends = list(accumulate(queries)), list(accumulate(keys))
        device = self._pool.device
        bounds = torch.tensor([[0, *e] for e in ends], dtype=torch.int32).to(device)
        call = KernelCall(bounds[0], bounds[1], *ends, max(queries), max(keys), True)
        if queries == keys:
            return call, None
        places = [part for s in self._spans for part in self._seen(s)]
        return call, torch.from_numpy(np.concatenate(places, axis=1)).to(device)

    def _seen(self, span: PrefillSpan) -> Iterator[np.ndarray]:
        """(row, column) of the tokens that a span's last one sees, int64 [2, tokens], in their order."""
        g = self._pool.layout
        for table, slot, length in filter(None, (span.prompt, (span.table, span.slot, span.start + len(span.ids)))):
            at = np.arange(length)
            blocks = np.array(table.blocks[slot // g.rows], np.int64)[at // g.cols]
            yield np.stack((blocks * g.rows + slot % g.rows, at % g.cols))

    def places(self, heads: int) -> Tensor:
        """Where the tokens' keys go, int64 [tokens × heads]: rows of the flat view [.., D] of a layer."""
        if heads not in self._index:
            rows, cols = (np.concatenate(parts) for parts in zip(*self._slots, strict=True))
            index = self._pool.layout.flat_index(rows, cols, heads)
            self._index[heads] = torch.from_numpy(index).to(self._pool.device)
        return self._index[heads]

    def _join(
        self, layer: int, table: KVSlotTable, slot: int, length: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put the first `length` tokens of a slot before key and value, [1, Hkv, length + S, D] each."""
        g = self._pool.layout
        blocks = table.blocks[slot // g.rows][: -(-length // g.cols)]
        joined = []
        for store, new in zip(self._pool.stored(layer), (key, value), strict=True):
            parts = [store[block, slot % g.rows].to(self._pool.compute) for block in blocks]
            parts[-1] = parts[-1][:, : length - (len(blocks) - 1) * g.cols]
            joined.append(torch.cat([*parts, new[0]], 1)[None])
        return joined[0], joined[1]

    def _one(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        new, total, window = query.shape[2], key.shape[2], options.sliding_window
        if window is not None and total <= window:
            window = None
        if options.softcap is not None or options.sinks is not None:
            return self._by_scores(query, key, value, self._mask(new, total, window), options)
        causal = new == total and window is None
        if not platform_of(query.device).has_grouped_attention(query.dtype, causal):
            group = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        mask, grouped = None if causal else self._mask(new, total, window), key.shape[1] != query.shape[1]
        arguments: dict[str, Any] = {"is_causal": causal, "scale": options.scaling, "enable_gqa": grouped}
        return F.scaled_dot_product_attention(query, key, value, mask, **arguments)

    @staticmethod
    def _by_scores(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
        """Attention with a softcap or sinks, which torch's kernels do not know."""
        heads = key.shape[1]
        q = query.float().unflatten(1, (heads, -1))
        scores = torch.einsum("bhgqd,bhkd->bhgqk", q, key.float()) * options.scaling
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        scores = scores.masked_fill(~mask, -torch.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        out = torch.einsum("bhgqk,bhkd->bhgqd", (scores - lse).exp(), value.float())
        if options.sinks is not None:
            out = out * torch.sigmoid(lse - options.sinks.float().view(heads, -1)[None, :, :, None, None])
        return out.flatten(1, 2).to(query.dtype)

    def _mask(self, new: int, total: int, window: int | None) -> Tensor:
        """True where the query sees the key, [new, total]; the queries are the last `new` positions."""
        name = new, total, window
        if name not in self._masks:
            position = torch.arange(total - new, total, device=self._pool.device)[:, None]
            keys = torch.arange(total, device=self._pool.device)
            self._masks[name] = keys <= position
            if window is not None:
                self._masks[name] &= keys > position - window
        return self._masks[name]
