"""Attention of a decode step: one token for each running response.

The response's own cache and its group's prompt are two tables. Each is read for all answers at once, the responses of
a group side by side against the one copy of their prompt, and the two results are merged by their log-sum-exp.

All that a step needs on the device (indices, masks) are named tensors, made when first asked for. A captured
graph keeps the tensors it was captured with, and `refill` gives them the values of another step.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch

from verl.engine.rollout.native.cache import KVSlotTable
from verl.engine.rollout.native.reader import MASKED, Reader
from verl.engine.rollout.native.writer import Calls, Writer

Name = tuple[Hashable, ...]


class DecodePlan:
    """See the module. `prepare` once per step, then the model calls `attend` in each layer."""

    def __init__(self, prompts: KVSlotTable, responses: KVSlotTable, compute: torch.dtype, calls: Calls):
        self._writer = Writer(prompts.pool, compute, calls)
        self._prompts, self._responses = Reader(prompts), Reader(responses)
        self._device = prompts.pool.device
        self._compute = compute
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
        self._writer.place(*table.token_rows(slots, np.maximum(lengths, 1) - 1))
        self._lengths = np.zeros(table.slots, np.int64)
        self._lengths[slots] = lengths
        self._responses.plan(self._lengths, whole_block_rows=rounded)
        live = np.flatnonzero(lengths)
        asked = prompt_slots[live]
        self._prompt_lengths = np.zeros(self._prompts.table.slots, np.int64)
        self._prompt_lengths[asked] = prompt_lengths[live]
        self._prompts.plan(self._prompt_lengths, whole_block_rows=rounded)

        self._dense = len(slots) == self._responses.slots
        self._slot_of_row = slots
        # the responses of one prompt, side by side: (prompt slot, number among its responses) of each row
        order = np.argsort(asked, kind="stable")
        number = np.empty(len(live), np.int64)
        number[order] = np.arange(len(live)) - np.searchsorted(asked[order], asked[order])
        self._per_prompt = int(number.max()) + 1
        if rounded:
            self._per_prompt = 1 << (self._per_prompt - 1).bit_length()
        self._row_of_place = np.zeros((self._prompts.slots, self._per_prompt), np.int64)
        self._row_of_place[asked, number] = live
        self._position = np.zeros((self._prompts.slots, self._per_prompt), np.int64)
        self._position[asked, number] = prompt_lengths[live] + lengths[live] - 1
        self._place_of_row = np.zeros(len(slots), np.int64), np.zeros(len(slots), np.int64)
        self._place_of_row[0][live], self._place_of_row[1][live] = asked, number
        self.tensors = {}

    def forget(self) -> None:
        """Hold no memory of the cache any more."""
        self._responses.forget()
        self._prompts.forget()
        self.tensors = {}

    def signature(self) -> Hashable:
        """Equal signatures: the same shapes, the same blocks, and the same masks in use."""
        rows, longest = len(self._slot_of_row), int(self._position.max())
        windows = frozenset(w for w in self._seen_windows if longest >= w)
        return rows, self._dense, self._per_prompt, self._responses.spans, self._prompts.spans, windows

    def refill(self, tensors: dict[Name, torch.Tensor]) -> None:
        """Write this step's values into the tensors of an earlier step with the same signature."""
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(self._build(name))))

    def _get(self, *name: Hashable) -> torch.Tensor:
        found = self.tensors.get(name)
        if found is None:
            array = np.ascontiguousarray(self._build(name))
            found = self.tensors[name] = torch.from_numpy(array).to(self._device)
        return found

    def _build(self, name: Name) -> np.ndarray:
        """The values of a named tensor in this step."""
        match name:
            case ("row of slot",):
                rows = np.zeros(self._responses.slots, np.int64)
                rows[self._slot_of_row] = np.arange(len(self._slot_of_row))
                return rows
            case ("slot of row",):
                return self._slot_of_row
            case ("write", int(heads)):
                return self._writer.index(heads)
            case (
                "to prompts",
                int(heads),
            ):  # [B, kv heads] blocks → [prompt slots, kv heads, responses] blocks
                there = self._row_of_place[:, None, :] * heads + np.arange(heads)[None, :, None]
                return there.reshape(-1)
            case ("from prompts", int(heads)):
                slot, number = self._place_of_row
                return (
                    (slot[:, None] * heads + np.arange(heads)) * self._per_prompt + number[:, None]
                ).reshape(-1)
            case ("mask", str(which), int(number), window):
                assert window is None or isinstance(window, int)
                return self._mask(which, number, window)
        raise KeyError(name)

    def _mask(self, which: str, number: int, window: int | None) -> np.ndarray:
        """What span `number` may not see: 0 or MASKED, float32 [slots, 1, responses per slot or 1, 1, width]."""
        span = (self._responses if which == "responses" else self._prompts).spans[number]
        at = np.arange(span.width)
        lengths = self._lengths if which == "responses" else self._prompt_lengths
        own = lengths[span.lo : span.hi, None, None]
        hidden = at >= own
        if window is not None:
            last = own - 1 if which == "responses" else self._position[span.lo : span.hi, :, None]
            hidden = hidden | (at <= last - window)
        return np.where(hidden, np.float32(MASKED), np.float32(0.0))[:, None, :, None]

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
        layer, window = self._writer.calls.number(module), self._window(sliding_window)
        heads, rows = key.shape[1], query.shape[2]
        self._writer.write(layer, key, value, self._get("write", heads))
        per_head, dim = query.shape[1] // heads, query.shape[-1]
        q = query[0].transpose(0, 1).reshape(rows, -1).to(self._compute).to(self._writer.pool.key_dtype)
        # a part of one product for queries, keys and values (GPT-2) has gaps between its rows
        q = q.contiguous()

        asked = q.view(rows * heads, per_head * dim).index_select(0, self._get("to prompts", heads))
        asked = asked.view(-1, self._per_prompt * per_head, dim)
        back = self._get("from prompts", heads)
        o_prompt, lse_prompt = self._read("prompts", layer, asked, heads, scaling, window, softcap)
        o_prompt = o_prompt.view(-1, per_head * o_prompt.shape[-1]).index_select(0, back)
        lse_prompt = lse_prompt.view(-1, per_head).index_select(0, back).view(rows, -1)

        own = q if self._dense else q.index_select(0, self._get("row of slot"))
        o_own, lse_own = self._read(
            "responses", layer, own.view(-1, per_head, dim), heads, scaling, window, softcap
        )
        o_own, lse_own = o_own.view(self._responses.slots, -1), lse_own.view(self._responses.slots, -1)
        if not self._dense:
            slots = self._get("slot of row")
            o_own, lse_own = o_own.index_select(0, slots), lse_own.index_select(0, slots)

        shape = (rows, query.shape[1], value.shape[-1])
        out = torch.lerp(
            o_prompt.view(shape), o_own.view(shape), torch.sigmoid(lse_own - lse_prompt)[..., None]
        )
        if sinks is not None:
            out.mul_(torch.sigmoid(torch.logaddexp(lse_own, lse_prompt) - sinks.float())[..., None])
        return out.to(self._compute)[None]

    def _window(self, window: int | None) -> int | None:
        """The window if any response has outgrown it; masks without one are smaller."""
        if window is not None and window not in self._seen_windows:
            self._seen_windows |= {window}
        return window if window is not None and int(self._position.max()) >= window else None

    def _read(
        self,
        which: str,
        layer: int,
        query: torch.Tensor,
        heads: int,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        reader = self._responses if which == "responses" else self._prompts
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        covered = 0
        for number, span in enumerate(reader.spans):
            if span.lo > covered:
                parts.append(self._nothing(query[covered * heads : span.lo * heads], reader, layer))
            mask = self._get("mask", which, number, window)
            part = query[span.lo * heads : span.hi * heads]
            parts.append(reader.attend(layer, number, part, mask, scaling, softcap))
            covered = span.hi
        if len(parts) == 1:
            return parts[0]
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])

    def _nothing(self, query: torch.Tensor, reader: Reader, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A stand-in for block_rows that nobody asks about, so that slots keep their place."""
        dim = reader.table.pool.stored(layer)[1].shape[-1]
        empty = query.new_zeros(*query.shape[:2], dim, dtype=torch.float32)
        return empty, query.new_full(query.shape[:2], MASKED, dtype=torch.float32)
