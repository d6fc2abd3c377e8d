"""Attention of a decode step: one token for each running response.

The response's own cache and its group's prompt are two tables. Each is read for all responses at once, the responses of
a group side by side against the one copy of their prompt, and the two results are merged by their log-sum-exp.

All that a step needs on the device (indices, masks) are named tensors, made when first asked for. A captured
graph keeps the tensors it was captured with, and `refill` gives them the values of another step.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch

from verl.engine.rollout.native.architecture import AttentionCalls
from verl.engine.rollout.native.cache import KVSlotTable
from verl.engine.rollout.native.reader import Reader
from verl.models.attention import AttentionOptions

Name = tuple[Hashable, ...]
"""The method of `DecodePlan` that gives a tensor's values, without its underscore, and its arguments."""


class DecodePlan:
    """See the module. `prepare` once per step, then the model calls `attend` in each layer."""

    def __init__(self, prompts: KVSlotTable, responses: KVSlotTable, calls: AttentionCalls):
        self._pool, self._calls = prompts.pool, calls
        self._prompts, self._responses = Reader(prompts), Reader(responses)
        self._seen_windows: frozenset[int] = frozenset()
        self.tensors: dict[Name, torch.Tensor] = {}

    def prepare(
        self,
        slots: np.ndarray,
        lengths: np.ndarray,
        prompt_slots: np.ndarray,
        prompt_lengths: np.ndarray,
        *,
        rounded: bool = False,
    ) -> None:
        """All int64 [B]; slots ascending; lengths count the response's tokens including the one being fed.

        Length 0 marks a row that only fills a gap: its slot must be free and its output means nothing.
        rounded: take the next power of two for the responses per prompt, so that fewer different shapes occur.
        """
        table = self._responses.table
        self._places = table.token_rows(slots, np.maximum(lengths, 1) - 1)
        own_lengths = np.zeros(table.slots, np.int64)
        own_lengths[slots] = lengths
        self._responses.plan(own_lengths, whole_block_rows=rounded)
        live = np.flatnonzero(lengths)
        asked = prompt_slots[live]
        shared_lengths = np.zeros(self._prompts.table.slots, np.int64)
        shared_lengths[asked] = prompt_lengths[live]
        self._prompts.plan(shared_lengths, whole_block_rows=rounded)

        self._dense = len(slots) == self._responses.slots
        self._slots = slots
        # the responses of one prompt, side by side: (prompt slot, number among its responses) of each row
        order = np.argsort(asked, kind="stable")
        number = np.empty(len(live), np.int64)
        number[order] = np.arange(len(live)) - np.searchsorted(asked[order], asked[order])
        self._per_prompt = int(number.max()) + 1
        if rounded:
            self._per_prompt = 1 << (self._per_prompt - 1).bit_length()
        self._row_of_place, self._position = np.zeros((2, self._prompts.slots, self._per_prompt), np.int64)
        self._row_of_place[asked, number] = live
        self._position[asked, number] = prompt_lengths[live] + lengths[live] - 1
        self._place_of_row = np.zeros((2, len(slots)), np.int64)
        self._place_of_row[:, live] = asked, number
        self.tensors = {}

    def forget(self) -> None:
        """Hold no memory of the cache any more."""
        self._responses.forget()
        self._prompts.forget()
        self.tensors = {}

    def signature(self) -> Hashable:
        """Equal signatures: the same shapes, the same blocks, and the same masks in use."""
        windows = frozenset(w for w in self._seen_windows if int(self._position.max()) >= w)
        spans = self._responses.spans, self._prompts.spans
        return len(self._slots), self._dense, self._per_prompt, spans, windows

    def refill(self, tensors: dict[Name, torch.Tensor]) -> None:
        """Write this step's values into the tensors of an earlier step with the same signature."""
        for name, tensor in tensors.items():
            tensor.copy_(self._values(name))

    def _get(self, *name: Hashable) -> torch.Tensor:
        found = self.tensors.get(name)
        if found is None:
            found = self.tensors[name] = self._values(name).to(self._pool.device)
        return found

    def _values(self, name: Name) -> torch.Tensor:
        kind, *arguments = name
        return torch.from_numpy(np.ascontiguousarray(getattr(self, f"_{kind}")(*arguments)))

    def _slot_of_row(self) -> np.ndarray:
        return self._slots

    def _row_of_slot(self) -> np.ndarray:
        rows = np.zeros(self._responses.slots, np.int64)
        rows[self._slots] = np.arange(len(self._slots))
        return rows

    def _write(self, heads: int) -> np.ndarray:
        return self._pool.layout.flat_index(*self._places, heads)

    def _to_prompts(self, heads: int) -> np.ndarray:
        """[B, kv heads] blocks → [prompt slots, kv heads, responses] blocks."""
        return (self._row_of_place[:, None, :] * heads + np.arange(heads)[None, :, None]).reshape(-1)

    def _from_prompts(self, heads: int) -> np.ndarray:
        slot, number = self._place_of_row[:, :, None]
        return ((slot * heads + np.arange(heads)) * self._per_prompt + number).reshape(-1)

    def _prompt_mask(self, number: int, window: int | None) -> np.ndarray:
        return self._prompts.mask(number, self._position, window)

    def _response_mask(self, number: int, window: int | None) -> np.ndarray:
        return self._responses.mask(number, self._responses.lengths[:, None] - 1, window)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `AttentionPlan`."""
        layer, window = self._calls.number(module), self._window(options.sliding_window)
        heads, rows = key.shape[1], query.shape[2]
        self._pool.write(layer, key, value, self._get("write", heads))
        per_head, dim = query.shape[1] // heads, query.shape[-1]
        q = query[0].transpose(0, 1).reshape(rows, -1).to(self._pool.compute).to(self._pool.key_dtype)
        # a part of one product for queries, keys and values (GPT-2) has gaps between its rows
        q = q.contiguous()

        asked = q.view(rows * heads, per_head * dim).index_select(0, self._get("to_prompts", heads))
        asked = asked.view(-1, self._per_prompt * per_head, dim)
        o_prompt, lse_prompt = self._prompts.read(
            layer, asked, heads, lambda number: self._get("prompt_mask", number, window), options
        )
        back = self._get("from_prompts", heads)
        o_prompt = o_prompt.view(-1, per_head * o_prompt.shape[-1]).index_select(0, back)
        lse_prompt = lse_prompt.view(-1, per_head).index_select(0, back).view(rows, -1)

        own = q if self._dense else q.index_select(0, self._get("row_of_slot"))
        o_own, lse_own = self._responses.read(
            layer,
            own.view(-1, per_head, dim),
            heads,
            lambda number: self._get("response_mask", number, window),
            options,
        )
        o_own, lse_own = o_own.view(self._responses.slots, -1), lse_own.view(self._responses.slots, -1)
        if not self._dense:
            slots = self._get("slot_of_row")
            o_own, lse_own = o_own.index_select(0, slots), lse_own.index_select(0, slots)

        shape = (rows, query.shape[1], value.shape[-1])
        own_share = torch.sigmoid(lse_own - lse_prompt)[..., None]
        out = torch.lerp(o_prompt.view(shape), o_own.view(shape), own_share)
        if options.sinks is not None:
            total = torch.logaddexp(lse_own, lse_prompt)
            out.mul_(torch.sigmoid(total - options.sinks.float())[..., None])
        return out.to(self._pool.compute)[None]

    def _window(self, window: int | None) -> int | None:
        """The window if any response has outgrown it; masks without one are smaller."""
        if window is None:
            return None
        if window not in self._seen_windows:
            self._seen_windows |= {window}
        return window if int(self._position.max()) >= window else None
