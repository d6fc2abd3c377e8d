"""Triton kernels of a layer's parts between its products: normalisation, rotation of queries and keys, gated activation.

Forward only. They compute in float32 and round where the model's own code does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x, weight, out, x_row, x_part, eps, offset, PARTS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
              ROUND: tl.constexpr):  # fmt: skip
    row, d = tl.program_id(0), tl.arange(0, BD)
    at = (row // PARTS).to(tl.int64) * x_row + row % PARTS * x_part + d
    value = tl.load(x + at, mask=d < D, other=0.0).to(tl.float32)
    scale = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32) + offset
    value = value * tl.rsqrt(tl.sum(value * value) / D + eps)
    if ROUND:
        value = value.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row.to(tl.int64) * D + d, (value * scale).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _rotate(
    q, k, cos, sin, q_out, k_out, q_row, q_head, k_row, k_head, cos_row,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    row, head, d = tl.program_id(0), tl.arange(0, H)[:, None], tl.arange(0, BH)[None, :]
    inside = d < D // 2
    c0 = tl.load(cos + row * cos_row + d, mask=inside).to(tl.float32)
    s0 = tl.load(sin + row * cos_row + d, mask=inside).to(tl.float32)
    c1 = tl.load(cos + row * cos_row + D // 2 + d, mask=inside).to(tl.float32)
    s1 = tl.load(sin + row * cos_row + D // 2 + d, mask=inside).to(tl.float32)
    at, to, there = q + row * q_row + head * q_head, q_out + (row * HEADS + head) * D, inside & (head < HEADS)
    a = tl.load(at + d, mask=there).to(tl.float32)
    b = tl.load(at + D // 2 + d, mask=there).to(tl.float32)
    tl.store(to + d, (a * c0 - b * s0).to(q_out.dtype.element_ty), mask=there)
    tl.store(to + D // 2 + d, (b * c1 + a * s1).to(q_out.dtype.element_ty), mask=there)
    at, to, there = k + row * k_row + head * k_head, k_out + (row * KV + head) * D, inside & (head < KV)
    a = tl.load(at + d, mask=there).to(tl.float32)
    b = tl.load(at + D // 2 + d, mask=there).to(tl.float32)
    tl.store(to + d, (a * c0 - b * s0).to(k_out.dtype.element_ty), mask=there)
    tl.store(to + D // 2 + d, (b * c1 + a * s1).to(k_out.dtype.element_ty), mask=there)


@triton.jit
def _swiglu(gate, up, out, gate_row, up_row, width, C: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C)
    g = tl.load(gate + row * gate_row + c, mask=c < width, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + c, mask=c < width, other=0.0).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + c, (silu * u).to(out.dtype.element_ty), mask=c < width)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """x [1, S, D] or [1, S, H, D], rows with any stride → (weight + offset)·x/√(mean x² + eps), in the wider type of x
    and the weight."""
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    parts, d = (x.shape[2] if x.ndim == 4 else 1), x.shape[-1]
    strides = x.stride(1), (x.stride(2) if x.ndim == 4 else 0)
    # the architectures whose weight has an offset round after the product, the others before it
    sizes = parts, d, triton.next_power_of_2(d), offset == 0.0
    _rms_norm[(x.numel() // d,)](x, weight, out, *strides, eps, offset, *sizes)
    return out


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [1, H, S, D], cos and sin [1, S, D] → both rotated, as views of [1, S, H, D] in the wider type of q and
    cos."""
    dtype, (rows, d) = torch.promote_types(q.dtype, cos.dtype), q.shape[2:]
    heads, kv_heads = q.shape[1], k.shape[1]
    q_out, k_out = (torch.empty(1, rows, h, d, dtype=dtype, device=q.device) for h in (heads, kv_heads))
    strides = q.stride(2), q.stride(1), k.stride(2), k.stride(1), cos.stride(1)
    sizes = heads, kv_heads, d, triton.next_power_of_2(heads), triton.next_power_of_2(d // 2)
    _rotate[(rows,)](q, k, cos, sin, q_out, k_out, *strides, *sizes)
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate)·up of [1, S, W], rows with any stride."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, width = gate.shape[1:]
    _swiglu[(rows, triton.cdiv(width, 1024))](gate, up, out, gate.stride(1), up.stride(1), width, C=1024)
    return out
