"""The sampler's two attention plans: decode (one token per answer) and prefill (segments of prompts and answers).

Both write the new keys and values into the cache first and attend afterwards. In bf16 mode keys are kept in
float32 (their values are bf16): scores must not be rounded to bf16, which a bf16 batched product on CPU would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from verl.engine.rollout.native.cache import Book, TilePool
from verl.engine.rollout.native.reader import MASKED, Reader


class _Writer:
    """Where the tokens of this forward pass go in the cache."""

    def __init__(self, pool: TilePool, compute: torch.dtype):
        self.pool = pool
        self.compute = compute
        self._rows = np.zeros(0, np.int64)
        self._cols = np.zeros(0, np.int64)
        self._flat: dict[int, torch.Tensor] = {}

    def place(self, rows: np.ndarray, cols: np.ndarray) -> None:
        self._rows, self._cols = rows, cols
        self._flat.clear()

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value [1, Hkv, S, D] of all tokens, in the order of `place`."""
        heads = key.shape[1]
        keys, values = self.pool.layer(layer, heads, key.shape[-1], value.shape[-1])
        flat = self._flat.get(heads)
        if flat is None:
            cols = self.pool.geometry.cols
            index = (self._rows[:, None] * heads + np.arange(heads)) * cols + self._cols[:, None]
            flat = self._flat[heads] = torch.from_numpy(index.reshape(-1)).to(key.device)
        for store, new in ((keys, key), (values, value)):
            rows = new[0].transpose(0, 1).reshape(-1, new.shape[-1])
            store.view(-1, new.shape[-1]).index_copy_(0, flat, rows.to(self.compute).to(store.dtype))


class DecodePlan:
    """One token for each running answer, against the answer's own cache and its group's prompt."""

    def __init__(self, prompts: Book, answers: Book, compute: torch.dtype):
        self._writer = _Writer(prompts.pool, compute)
        self._prompts, self._answers = Reader(prompts), Reader(answers)
        self._device = prompts.pool.device
        self._compute = compute

    def prepare(
        self, slots: np.ndarray, lengths: np.ndarray, prompt_slots: np.ndarray, prompt_lengths: np.ndarray
    ) -> None:
        """All int64 [B]; slots ascending; lengths count the answer's tokens including the one being fed."""
        book = self._answers.book
        self._writer.place(*book.token_rows(slots, lengths - 1))
        by_slot = np.zeros(book.slots, np.int64)
        by_slot[slots] = lengths
        self._answers.plan(by_slot)
        by_prompt = np.zeros(self._prompts.book.slots, np.int64)
        by_prompt[prompt_slots] = prompt_lengths
        self._prompts.plan(by_prompt)

        row_of_slot = np.zeros(self._answers.slots, np.int64)
        row_of_slot[slots] = np.arange(len(slots))
        self._dense = len(slots) == self._answers.slots
        self._row_of_slot, self._slot_of_row = self._tensor(row_of_slot), self._tensor(slots)
        # the answers of one prompt, side by side: place[row] = (prompt slot, number among its answers)
        order = np.argsort(prompt_slots, kind="stable")
        first = np.searchsorted(prompt_slots[order], prompt_slots[order])
        number = np.empty(len(slots), np.int64)
        number[order] = np.arange(len(slots)) - first
        self._per_prompt = int(number.max()) + 1
        row_of_place = np.zeros((self._prompts.slots, self._per_prompt), np.int64)
        row_of_place[prompt_slots, number] = np.arange(len(slots))
        self._row_of_place = row_of_place
        self._place_of_row = (prompt_slots, number)
        self._lengths, self._prompt_lengths = by_slot, by_prompt
        position = np.zeros((self._prompts.slots, self._per_prompt), np.int64)
        position[prompt_slots, number] = prompt_lengths + lengths - 1
        self._position = position
        self._blocks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._masks: dict[tuple[str, int, int | None], torch.Tensor] = {}

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _block_index(self, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Row-major [B, kv heads] blocks to prompt-major [prompt slots, kv heads, answers] blocks, and back."""
        found = self._blocks.get(heads)
        if found is None:
            h = np.arange(heads)
            there = self._row_of_place[:, None, :] * heads + h[None, :, None]
            slot, number = self._place_of_row
            back = (slot[:, None] * heads + h) * self._per_prompt + number[:, None]
            found = self._blocks[heads] = (self._tensor(there.reshape(-1)), self._tensor(back.reshape(-1)))
        return found

    def _mask(self, which: str, number: int, window: int | None) -> torch.Tensor:
        """What zone `number` may not see: 0 or MASKED, [slots, 1, answers per slot or 1, 1, width]."""
        if window is not None and int(self._position.max()) < window:
            window = None
        found = self._masks.get((which, number, window))
        if found is None:
            zone = (self._answers if which == "answers" else self._prompts).zones[number]
            at = np.arange(zone.width)
            if which == "answers":
                length = self._lengths[zone.lo : zone.hi, None]
                hidden = at >= length
                if window is not None:
                    hidden |= at <= length - 1 - window
                hidden = hidden[:, None]
            else:
                hidden = (at >= self._prompt_lengths[zone.lo : zone.hi, None])[:, None]
                if window is not None:
                    hidden = hidden | (at <= self._position[zone.lo : zone.hi, :, None] - window)
            mask = np.where(hidden, np.float32(MASKED), np.float32(0.0))[:, None, :, None]
            found = self._masks[which, number, window] = self._tensor(mask)
        return found

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
        layer = layer_index(module)
        self._writer.write(layer, key, value)
        heads, rows = key.shape[1], query.shape[2]
        per_head, dim = query.shape[1] // heads, query.shape[-1]
        q = query[0].transpose(0, 1).reshape(rows, -1).to(self._compute).to(self._writer.pool.key_dtype)

        there, back = self._block_index(heads)
        asked = q.view(rows * heads, per_head * dim).index_select(0, there)
        asked = asked.view(-1, self._per_prompt * per_head, dim)
        o_prompt, lse_prompt = self._read("prompts", layer, asked, heads, scaling, sliding_window, softcap)
        o_prompt = o_prompt.view(-1, per_head * o_prompt.shape[-1]).index_select(0, back)
        lse_prompt = lse_prompt.view(-1, per_head).index_select(0, back)

        own = q if self._dense else q.index_select(0, self._row_of_slot)
        o_own, lse_own = self._read(
            "answers", layer, own.view(-1, per_head, dim), heads, scaling, sliding_window, softcap
        )
        o_own, lse_own = o_own.view(self._answers.slots, -1), lse_own.view(self._answers.slots, -1)
        if not self._dense:
            o_own, lse_own = (
                o_own.index_select(0, self._slot_of_row),
                lse_own.index_select(0, self._slot_of_row),
            )

        shape = (rows, query.shape[1], value.shape[-1])
        lse_prompt, lse_own = lse_prompt.view(rows, -1), lse_own.view(rows, -1)
        out = torch.lerp(
            o_prompt.view(shape), o_own.view(shape), torch.sigmoid(lse_own - lse_prompt)[..., None]
        )
        if sinks is not None:
            out.mul_(torch.sigmoid(torch.logaddexp(lse_own, lse_prompt) - sinks.float())[..., None])
        return out.to(self._compute)[None]

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
        reader = self._answers if which == "answers" else self._prompts
        parts = []
        covered = 0
        for number, zone in enumerate(reader.zones):
            if zone.lo > covered:
                parts.append(self._nothing(query[covered * heads : zone.lo * heads], parts, reader, layer))
            mask = self._mask(which, number, window)
            part = query[zone.lo * heads : zone.hi * heads]
            parts.append(reader.attend(layer, number, part, mask, scaling, softcap))
            covered = zone.hi
        if len(parts) == 1:
            return parts[0]
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])

    def _nothing(
        self, query: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor]], reader: Reader, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A stand-in for banks that nobody asks about, so that slots keep their place."""
        dim = reader.book.pool.stored(layer)[1].shape[-1]
        return query.new_zeros(*query.shape[:2], dim, dtype=torch.float32), query.new_full(
            query.shape[:2], MASKED
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens start … start + count - 1 of one slot. An answer's segment names its prompt (slot, length)."""

    book: Book
    slot: int
    start: int
    count: int
    prompt: tuple[Book, int, int] | None = None


class PrefillPlan:
    """Packed segments; each sees its prompt, what its slot already holds, and itself causally."""

    def __init__(self, pool: TilePool, segments: Sequence[Segment], compute: torch.dtype):
        self._writer = _Writer(pool, compute)
        self._segments = segments
        self._compute = compute
        places = [
            s.book.token_rows(np.full(s.count, s.slot, np.int64), np.arange(s.start, s.start + s.count))
            for s in segments
        ]
        self._writer.place(np.concatenate([r for r, _ in places]), np.concatenate([c for _, c in places]))
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
        layer = layer_index(module)
        self._writer.write(layer, key, value)
        query, key, value = (t.to(self._compute) for t in (query, key, value))
        out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        at = 0
        for segment in self._segments:
            here = slice(at, at + segment.count)
            k, v = key[:, :, here], value[:, :, here]
            if segment.start:
                k, v = self._join(layer, segment.book, segment.slot, segment.start, k, v)
            if segment.prompt is not None:
                k, v = self._join(layer, *segment.prompt, k, v)
            part = self._one(query[:, :, here], k, v, scaling, sliding_window, softcap, sinks)
            out[:, here] = part.transpose(1, 2)
            at += segment.count
        return out

    def _join(
        self, layer: int, book: Book, slot: int, length: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the first `length` tokens of a slot before key and value, [1, Hkv, length + S, D] each."""
        keys, values = book.pool.stored(layer)
        g = book.pool.geometry
        joined = []
        for store, new in ((keys, key), (values, value)):
            parts = []
            for column in range(-(-length // g.cols)):
                width = min(g.cols, length - column * g.cols)
                tile = book.tiles[slot // g.rows][column]
                parts.append(store[tile, slot % g.rows, :, :width].to(self._compute))
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
            if new == total and window is None:
                return F.scaled_dot_product_attention(
                    query, key, value, is_causal=True, scale=scaling, enable_gqa=True
                )
            mask = self._mask(new, total, window, query.device)
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
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


def layer_index(module: torch.nn.Module) -> int:
    """`module.layer_idx`. Raises ValueError when the architecture does not number its attention layers."""
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ValueError(
            f"{type(module).__name__} has no layer_idx: the sampler cannot tell its cache from the others'"
        )
    return index
