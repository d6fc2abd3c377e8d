"""The packed attention of `packed_attention` through a variable-length flash kernel, on CUDA and Ascend in half
precision.

Two calls of the kernel: every segment on its own, causal; and every response against its group's prompt, all of it
visible. Their outputs are merged by their log-denominators, out = Σ_i e^{ℓ_i − ℓ}·out_i with ℓ = log Σ e^{ℓ_i}, and
each backward call is given the merged output and normaliser: the probabilities the kernel makes again from them
are then those of the joint softmax, and its rowsum(dO∘O) is that of the joint one (the identity that ring
attention rests on, 2310.01889). No key is copied but the prompts' own.

The kernel is the platform's. The arithmetic is tested on a CPU with a plain stand-in for it; tests/gpu runs it on a
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from verl.models.attention import AttentionOptions, TokenSpan
from verl.platform import platform_of

MAX_HEAD_WIDTH = 256
_WIDTH_STEP = 8  # the kernel copies 16 bytes at a time


@dataclass(slots=True)
class KernelCall:
    """One call of the kernel: cumulative lengths int32 [n+1] of queries and keys, also without the first 0 on the host,
    their maxima, and which tokens they are (None: all, in order)."""

    queries: Tensor
    keys: Tensor
    query_ends: list[int]
    key_ends: list[int]
    max_queries: int
    max_keys: int
    causal: bool
    query_index: Tensor | None = None
    key_index: Tensor | None = None


def parts_of(segments: Sequence[TokenSpan], device: torch.device) -> list[KernelCall]:
    """The one or two calls that a pack needs. Spans that see the same ones before them are one sequence of queries."""
    lengths = [s.end - s.start for s in segments]
    segment_bounds, ends = _bounds(lengths, device), list(accumulate(lengths))
    parts = [KernelCall(segment_bounds, segment_bounds, ends, ends, max(lengths), max(lengths), True)]
    members: dict[tuple[tuple[int, int], ...], list[tuple[int, int]]] = {}
    for s in segments:
        if s.prefix:
            members.setdefault(s.prefix, []).append((s.start, s.end))
    if members:
        queries = [sum(end - start for start, end in spans) for spans in members.values()]
        keys = [sum(end - start for start, end in prefix) for prefix in members]
        query_index = _indices([span for spans in members.values() for span in spans], device)
        bounds = _bounds(queries, device), _bounds(keys, device), list(accumulate(queries)), list(accumulate(keys))
        key_index = _indices([span for prefix in members for span in prefix], device)
        parts.append(KernelCall(*bounds, max(queries), max(keys), False, query_index, key_index))
    return parts


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def _indices(ranges: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(a, b) for a, b in ranges]).to(device)


Kernel = tuple[Callable[..., Any], Callable[..., Any]]
"""The functions (forward, backward) of an attention kernel.

forward(q [Sq, Hq, D], k and v [Sk, Hkv, D], part, scale) → (out [Sq, Hq, D], log-normaliser float32 [Hq, Sq], state);
backward(gradient of out, q, k, v, out, log-normaliser, part, state, scale) → gradients of q, k, v for one part, given
the output and normaliser of the whole.
"""


def fits(query: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    """True where a kernel can be used, for packs in which no sliding window cuts anything: a window would have
    to reach across the two calls."""
    width = query.shape[-1]
    plain = options.softcap is None and options.sinks is None
    width_fits = width == value.shape[-1] and width <= MAX_HEAD_WIDTH and width % _WIDTH_STEP == 0
    return plain and width_fits and query.dtype in (torch.bfloat16, torch.float16)


def attend(
    query: Tensor, key: Tensor, value: Tensor, parts: Sequence[KernelCall], scale: float, kernel: Kernel
) -> Tensor:
    """query [1, Hq, S, D], key and value [1, Hkv, S, D] → [1, S, Hq, D]."""
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return _Merged.apply(q, k, v, parts, scale, kernel)[None]


def _take(x: Tensor, index: Tensor | None) -> Tensor:
    return x.contiguous() if index is None else x.index_select(0, index)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, parts, scale, kernel):  # type: ignore[no-untyped-def]
        base, *shared = parts
        fused = platform_of(q.device).fused_operators()
        merge = None if fused is None else fused.merge_attention
        out, lse, state = kernel[0](*(_take(x, None) for x in (q, k, v)), base, scale)
        states = [state]
        for part in shared:
            index = part.query_index
            inputs = _take(q, index), _take(k, part.key_index), _take(v, part.key_index)
            other, other_lse, state = kernel[0](*inputs, part, scale)
            states.append(state)
            if merge is not None:
                merge(out, lse, other, other_lse, index)
                continue
            mine = lse[:, index]
            joint = torch.logaddexp(mine, other_lse)
            weight, other_weight = ((x - joint).exp().t()[..., None] for x in (mine, other_lse))
            out[index] = (out[index] * weight + other * other_weight).to(out.dtype)
            lse[:, index] = joint
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.parts, ctx.scale, ctx.kernel, ctx.states = parts, scale, kernel, states
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, out, lse = ctx.saved_tensors
        totals: list[Tensor] = []
        for part, state in zip(ctx.parts, ctx.states, strict=True):
            qi, ki = part.query_index, part.key_index
            lse_part = lse if qi is None else lse[:, qi].contiguous()
            inputs = _take(grad, qi), _take(q, qi), _take(k, ki), _take(v, ki), _take(out, qi), lse_part
            grads = ctx.kernel[1](*inputs, part, state, ctx.scale)
            if qi is None:
                totals = list(grads)
            else:
                for total, index, grad_part in zip(totals, (qi, ki, ki), grads, strict=True):
                    total.index_add_(0, index, grad_part)
        return (*totals, None, None, None)
