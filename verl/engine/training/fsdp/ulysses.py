"""Sequence parallelism after Ulysses (2309.14509): ranks share the tokens of a pack, and in attention its heads.

    tokens [S/n] × all heads ── all-to-all ──▶ tokens [S] × heads [H/n] ── attention ── all-to-all ──▶ back

Everything but attention works token by token, so each rank runs its share of the pack. Inside attention each rank
sees the whole pack for its share of the heads: packing, shared prompts and windows stay as they are.

Layers of linear attention are called whole (`verl.models.recurrent`), with all of their heads. For them the ranks deal
out the sequences of the pack, each prompt with its responses: one rank computes those of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.engine.training.packing import Pack
from verl.models.attention import AttentionOptions, AttentionPlan, TokenSpan, product_dtype
from verl.models.packed_attention import PackedPlan
from verl.models.recurrent import PackedStates, run
from verl.trajectory import UNKNOWN_EXPERT


class SequenceParallel:
    """The ranks of `group`, whose number divides `heads`, share each pack. image_token: of a vision-language model,
    else None; each rank runs its tower over all images of a pack and goes on with those of its own tokens."""

    def __init__(self, group: dist.ProcessGroup, heads: int, image_token: int | None = None):
        self._group, self._size, self._rank = group, dist.get_world_size(group), dist.get_rank(group)
        self._heads, self._image_token = heads, image_token

    def share(self, batch: Pack) -> tuple[Pack, Tensor, AttentionPlan]:
        """This rank's tokens [S/n] and those of the response tokens that are predicted from them, with their places
        among all response tokens. A segment that nothing attends to pads the pack to a multiple of the ranks."""
        width = -(-batch.size // self._size)
        fill = width * self._size - batch.size
        ids = torch.nn.functional.pad(batch.input_ids, (0, fill))
        positions = torch.cat((batch.positions, torch.arange(fill, device=batch.positions.device)))
        segments = [*batch.segments, TokenSpan(batch.size, batch.size + fill)]
        start = self._rank * width
        here = slice(start, start + width)
        mine = ((batch.source >= start) & (batch.source < start + width)).nonzero()[:, 0]
        source, targets = batch.source[mine] - start, batch.targets[mine]
        candidates = None if batch.candidates is None else batch.candidates[mine]
        sets = None if batch.sampling_mask is None else batch.sampling_mask.rows(mine)
        routes = batch.routes
        if routes is not None:
            routes = torch.nn.functional.pad(routes, (0, 0, 0, 0, 0, fill), value=UNKNOWN_EXPERT)[here]
        part = Pack(batch.rows, ids[here], positions[here], [], source, targets, candidates, sets, routes)
        if batch.media:
            padding = torch.arange(fill, device=ids.device).expand(3, -1)
            axes = batch.positions.expand(3, -1) if batch.axes is None else batch.axes
            is_image = ids == self._image_token
            first = int(is_image[:start].sum())
            part.axes, part.media = torch.cat((axes, padding), 1)[:, here], batch.media
            part.image_span = first, first + int(is_image[here].sum())
        whole = PackedPlan(segments, positions, self._heads // self._size)
        return part, mine, UlyssesPlan(whole, self._group, self._rank, self._size, segments)

    def all_tokens(self, own: Tensor) -> Tensor:
        """What each rank knows of its tokens, [S/n, …], of all of them, those that fill up included."""
        parts = [torch.empty_like(own) for _ in range(self._size)]
        dist.all_gather(parts, own, group=self._group)
        return torch.cat(parts)

    def whole(self, outputs: dict[str, Tensor], mine: Tensor, count: int) -> dict[str, Tensor]:
        """Outputs of all `count` response tokens on every rank; gradients go back to the rank they came from."""
        columns = [output.unsqueeze(0) if output.ndim == 1 else output.t() for output in outputs.values()]
        joined = _Join.apply(torch.cat(columns), mine, count, self._group)
        parts = torch.split(joined, [len(column) for column in columns])
        pairs = zip(outputs.items(), parts, strict=True)
        return {name: part[0] if output.ndim == 1 else part.t() for (name, output), part in pairs}


class UlyssesPlan:
    """An `AttentionPlan` that exchanges tokens for heads around another one. segments: of the whole pack."""

    def __init__(
        self, whole: AttentionPlan, group: dist.ProcessGroup, rank: int, size: int, segments: Sequence[TokenSpan]
    ):
        self._whole, self._group, self._rank, self._size = whole, group, rank, size
        self._segments = [s for s in segments if s.end > s.start]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See `AttentionPlan.attend`; tensors hold this rank's tokens and all heads."""
        query, key, value = (x.to(product_dtype(x)) for x in (query, key, value))
        # Key heads that the ranks do not divide are repeated just as often as it takes.
        repeat = self._size // math.gcd(key.shape[1], self._size)
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        query, key, value = (self._gather_tokens(x) for x in (query, key, value))
        if options.sinks is not None:
            options = replace(options, sinks=options.sinks.view(self._size, -1)[self._rank])
        return self._gather_heads(self._whole.attend(module, query, key, value, options))

    def mix(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """See `AttentionPlan.mix`; hidden [1, S/n, H] holds this rank's tokens."""
        return self._dealt.mix(layer, hidden)

    @cached_property
    def _dealt(self) -> DealtStates:
        return DealtStates(self._segments, self._group, self._rank, self._size)

    def _gather_tokens(self, x: Tensor) -> Tensor:
        """[1, H, S/n, D] → [1, H/n, S, D]."""
        n, (_, heads, tokens, width) = self._size, x.shape
        swapped = _AllToAll.apply(x.reshape(n, heads // n, tokens, width), self._group)
        return swapped.transpose(0, 1).reshape(1, heads // n, n * tokens, width)

    def _gather_heads(self, x: Tensor) -> Tensor:
        """[1, S, H/n, D] → [1, S/n, H, D]."""
        n, (_, tokens, heads, width) = self._size, x.shape
        swapped = _AllToAll.apply(x.reshape(n, tokens // n, heads, width), self._group)
        return swapped.transpose(0, 1).reshape(1, tokens // n, n * heads, width)


class DealtStates:
    """`PackedStates` of which each rank has some sequences, dealt out such that none has many more tokens than
    others."""

    def __init__(self, segments: Sequence[TokenSpan], group: dist.ProcessGroup, rank: int, size: int):
        owners = self._owners(segments, size).reshape(size, -1)
        here = np.flatnonzero(owners == rank)
        places = dict(zip(here.tolist(), range(len(here)), strict=True))

        def moved(start: int, end: int) -> tuple[int, int]:
            return places[start], places[end - 1] + 1

        local = [s for s in segments if s.start in places]
        self._segments = [
            TokenSpan(*moved(s.start, s.end), tuple(moved(*before) for before in s.prefix)) for s in local
        ]
        self._group = group
        self._order = torch.from_numpy(np.argsort(owners[rank], kind="stable"))
        self._sent = np.bincount(owners[rank], minlength=size).tolist()
        self._received = (owners == rank).sum(1).tolist()

    @staticmethod
    def _owners(segments: Sequence[TokenSpan], size: int) -> np.ndarray:
        """The rank of each token of the pack, int64 [S]."""
        owners = np.zeros(segments[-1].end, np.int64)
        loads = [0] * size
        families: dict[int, list[TokenSpan]] = {}
        for s in segments:
            families.setdefault(s.prefix[0][0] if s.prefix else s.start, []).append(s)
        counts = {first: sum(s.end - s.start for s in family) for first, family in families.items()}
        for first in sorted(families, key=lambda f: -counts[f]):
            rank = loads.index(min(loads))
            loads[rank] += counts[first]
            for s in families[first]:
                owners[s.start : s.end] = rank
        return owners

    def mix(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """hidden [1, S/n, H] → output [1, S/n, H] of this rank's tokens. Collective."""
        order = self._order.to(hidden.device)
        own = _Exchange.apply(hidden[0].index_select(0, order), self._sent, self._received, self._group)
        if self._segments:
            out = PackedStates(self._segments, hidden.device).mix(layer, own[None])[0]
        else:  # the layer's weights get their gradients on every rank
            out = own + run(layer, hidden.new_zeros(1, 1, hidden.shape[-1]), None)[0].sum() * 0.0
        back = _Exchange.apply(out, self._received, self._sent, self._group)
        return back.index_select(0, order.argsort())[None]


class _Exchange(torch.autograd.Function):
    """Rows of [S, H], so many to each rank, and so many from each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = received, sent, group
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Exchange.apply(grads[0], *ctx.arguments), None, None, None


class _AllToAll(torch.autograd.Function):
    """Slice i of the first dimension goes to rank i; its own inverse, so also its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _AllToAll.apply(grads[0], ctx.group), None


class _Join(torch.autograd.Function):
    """Columns of [k, own] put in their places of [k, count] on every rank."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, mine: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(mine)
        out = own.new_zeros(own.shape[0], count)
        out[:, mine] = own
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (mine,) = ctx.saved_tensors
        return grads[0][:, mine], None, None, None
