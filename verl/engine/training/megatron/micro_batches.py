"""From rows to what one forward pass of a megatron-core model reads, and back from its hidden states to response
tokens.

    with TransformerEngine      one packed row of all sequences ("thd"), each padded to what ranks must divide
    without                     [rows, longest] tokens, padded on the right: no token sees what follows it

Under context parallelism a rank computes two pieces of each sequence, one from its front and its mirror image from its
end, so that all have the same work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.engine.training.packing import Pack
from verl.trajectory import Segment


@dataclass(slots=True)
class ModelBatch:
    """One forward pass.

    input_ids, positions  int64 [B, S]  this rank's tokens
    source                int64 [R]  index into [B·S·context] of the hidden state that predicts a response token
    place                 int64 [S]  index of each token of the pack in the whole layout, [B·S·context]
    share                 int64  indices in the whole layout of this context-parallel rank's tokens, None: all
    packed                megatron-core's description of sequences in one row, None for padded rows
    seen, given, used     of `verl.engine.training.megatron.routes`
    deep                  of `verl.engine.training.megatron.vision`
    """

    pack: Pack
    input_ids: Tensor
    positions: Tensor
    source: Tensor
    place: Tensor
    packed: Any = None
    context: int = 1
    order: Tensor | None = None
    share: Tensor | None = None
    seen: Tensor | None = None
    given: Tensor | None = None
    used: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    deep: list[Tensor] = field(default_factory=list)

    @property
    def rows(self) -> Sequence[Segment]:
        return self.pack.rows

    @property
    def size(self) -> int:
        """Tokens of the whole layout, padding too."""
        return self.input_ids.numel() * self.context

    def axes(self) -> Tensor:
        """int64 [3, B, S] that a model that sees images rotates by. Not under context parallelism."""
        if self.pack.axes is None:
            return self.positions.expand(3, -1, -1)
        whole = self.pack.axes.new_zeros(3, self.size)
        whole[:, self.place] = self.pack.axes
        return whole.view(3, *self.input_ids.shape)

    def predicting(self, hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """[R, H] hidden states that predict the response tokens, of the model's [B, S, H]. Collective in `group`, the
        ranks that share sequences, if they are several."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        if self.context > 1:
            flat = _Gathered.apply(flat, group)
            flat = flat.index_select(0, self.order)  # type: ignore[arg-type]
        return flat.index_select(0, self.source)


class Turns:
    """Which micro-batch a part of the model computes. One that is computed again in the backward pass comes to its
    micro-batches in the same order."""

    def __init__(self) -> None:
        self._again: deque[ModelBatch] = deque()

    def clear(self) -> None:
        self._again.clear()

    def take(self, current: ModelBatch, *, trains: bool) -> tuple[ModelBatch, bool]:
        """The micro-batch, and whether it is computed again. current: whose first pass is being computed."""
        if self._again and torch.is_grad_enabled():
            return self._again.popleft(), True
        if trains and not torch.is_grad_enabled():
            self._again.append(current)
        return current, False


class _Gathered(torch.autograd.Function):
    """All ranks' parts one after the other. Each rank's loss is the whole, so a part's gradient is its own slice."""

    @staticmethod
    def forward(ctx, mine, group):  # type: ignore[no-untyped-def]
        ctx.rank, ctx.size = dist.get_rank(group), mine.shape[0]
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient.narrow(0, ctx.rank * ctx.size, ctx.size), None


def padded(pack: Pack, multiple: int) -> ModelBatch:
    """Rows of one length, a multiple of `multiple`."""
    device, lengths = pack.input_ids.device, [span.end - span.start for span in pack.segments] or [1]
    width = -(-max(lengths) // multiple) * multiple
    ids = torch.zeros((len(lengths), width), dtype=torch.int64, device=device)
    place = torch.cat([torch.arange(n, device=device) + row * width for row, n in enumerate(lengths)])[: pack.size]
    ids.view(-1)[place] = pack.input_ids
    positions = torch.arange(width, device=device).expand(len(lengths), width)
    return ModelBatch(pack, ids, positions, place[pack.source], place)


def packed(pack: Pack, multiple: int, context: int, context_rank: int) -> ModelBatch:
    """One row of all sequences, each padded to a multiple of `multiple` (which `2 · context` divides)."""
    from megatron.core.packed_seq_params import PackedSeqParams

    device, lengths = pack.input_ids.device, [span.end - span.start for span in pack.segments] or [1]
    sizes = [-(-n // multiple) * multiple for n in lengths]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    ids = torch.zeros(starts[-1], dtype=torch.int64, device=device)
    place = torch.cat([torch.arange(n, device=device) + start for n, start in zip(lengths, starts[:-1], strict=True)])
    place = place[: pack.size]
    ids[place] = pack.input_ids
    positions = torch.cat([torch.arange(size, device=device) for size in sizes])
    bounds = torch.tensor(starts, dtype=torch.int32, device=device)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=max(sizes),
        max_seqlen_kv=max(sizes),
    )
    source = place[pack.source]
    if context == 1:
        return ModelBatch(pack, ids[None], positions[None], source, place, params)
    shares = [_share(sizes, starts, rank, context, device) for rank in range(context)]
    order = torch.empty(starts[-1], dtype=torch.int64, device=device)
    order[torch.cat(shares)] = torch.arange(starts[-1], device=device)
    mine = shares[context_rank]
    return ModelBatch(pack, ids[mine][None], positions[mine][None], source, place, params, context, order, mine)


def _share(sizes: Sequence[int], starts: Sequence[int], rank: int, context: int, device: torch.device) -> Tensor:
    """Which tokens of the packed row a context-parallel rank computes: pieces `rank` and its mirror image."""
    parts = []
    for size, start in zip(sizes, starts[:-1], strict=True):
        piece = size // (2 * context)
        for number in (rank, 2 * context - 1 - rank):
            parts.append(torch.arange(piece, device=device) + start + number * piece)
    return torch.cat(parts)
