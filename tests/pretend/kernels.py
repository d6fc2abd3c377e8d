"""Slow references of CUDA's kernels that the processor lacks. They refuse what the kernels refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from verl.platform import cuda_fused  # noqa: F401 - defines torch.ops.verl

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)


def _parts(q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, causal: bool, scale: float) -> Iterator[Any]:
    """Of each sequence the slices of queries and keys, and the scores float32 [Hkv, G, rows, keys]."""
    assert q.dtype in HALF and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and q.stride(-1) == 1
    assert queries.dtype == keys.dtype == torch.int32
    for i in range(len(queries) - 1):
        rows, columns = slice(*queries[i : i + 2].tolist()), slice(*keys[i : i + 2].tolist())
        folded = q[rows].float().unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("rhgd,khd->hgrk", folded, k[columns].float()) * scale
        if causal:
            hidden = torch.ones(scores.shape[-2:]).triu_(scores.shape[-1] - scores.shape[-2] + 1)
            scores = scores.masked_fill(hidden.bool(), float("-inf"))
        yield rows, columns, folded, scores


def flash(q: Any, k: Any, v: Any, cq: Any, ck: Any, mq: int, mk: int, p: float, causal: bool, *_: Any, scale: float):  # type: ignore[no-untyped-def]
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), float("-inf"))
    for rows, columns, _, scores in _parts(q, k, cq, ck, causal, scale):
        lse[:, rows] = scores.logsumexp(-1).flatten(0, 1)
        values = torch.einsum("hgrk,khd->rhgd", scores.softmax(-1), v[columns].float())
        out[rows] = values.flatten(1, 2).to(q.dtype)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), q.new_zeros(0)


def flash_backward(grad, q, k, v, out, lse, cq, ck, mq, mk, p, causal, *_, scale):  # type: ignore[no-untyped-def]
    assert lse.dtype == torch.float32 and lse.is_contiguous() and grad.dtype == out.dtype == q.dtype
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    for rows, columns, folded, scores in _parts(q, k, cq, ck, causal, scale):
        heads = k.shape[1]
        weights = (scores - lse[:, rows].unflatten(0, (heads, -1))[..., None]).exp()
        g = grad[rows].float().unflatten(1, (heads, -1))
        along = (g * out[rows].float().unflatten(1, (heads, -1))).sum(-1).permute(1, 2, 0)[..., None]
        d = weights * (torch.einsum("rhgd,khd->hgrk", g, v[columns].float()) - along) * scale
        dv[columns] += torch.einsum("hgrk,rhgd->khd", weights, g)
        dq[rows] = torch.einsum("hgrk,khd->rhgd", d, k[columns].float()).flatten(1, 2)
        dk[columns] += torch.einsum("hgrk,rhgd->khd", d, folded)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, *_: Any, scale: Any = None):  # type: ignore[no-untyped-def]
    attend = torch.nn.functional.scaled_dot_product_attention
    out, empty = attend(q, k, v, is_causal=causal, scale=scale, enable_gqa=True), torch.zeros(0)
    return out, torch.zeros(q.shape[:3]), None, None, q.shape[2], k.shape[2], empty, empty, empty


def wide_bmm(a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    assert a.dtype in HALF and a.dtype == b.dtype and out.dtype == dtype == torch.float32
    return out.copy_(torch.bmm(a.float(), b.float()))


def wide_addmm(total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1, out: Tensor):  # type: ignore[no-untyped-def]
    assert a.dtype in HALF and a.dtype == b.dtype and out.dtype == total.dtype == dtype == torch.float32
    return out.copy_(torch.addmm(total, a.float(), b.float(), beta=beta, alpha=alpha))


def wide_mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    assert a.dtype in HALF and a.dtype == b.dtype and dtype == torch.float32
    return a.float() @ b.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    assert x.is_contiguous() and weight.is_contiguous()
    inverse = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x.float() * inverse * weight.float()).to(dtype), inverse.reshape(-1)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    assert grad.is_contiguous()
    normed = x.float() * inverse.view(*x.shape[:-1], 1)
    dw, scaled = (grad.float() * normed).reshape(-1, x.shape[-1]).sum(0), grad.float() * weight.float()
    along = (scaled * normed).mean(-1, keepdim=True)
    return ((scaled - normed * along) * inverse.view(*x.shape[:-1], 1)).to(x.dtype), dw


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    assert gate.is_contiguous() and up.is_contiguous()
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    assert grad.is_contiguous()
    g, d, sigmoid = gate.float(), grad.float(), gate.float().sigmoid()
    dg = d * up.float() * sigmoid * (1 + g * (1 - sigmoid))
    return swiglu(gate, up), dg.to(gate.dtype), (d * g * sigmoid).to(gate.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, back: bool) -> Tensor:
    assert x.stride(-1) == 1 and cos.is_contiguous() and sin.is_contiguous() and len(x) == len(cos) == 1
    half, (wide, c, s) = x.shape[-1] // 2, (t.float() for t in (x, cos[:, None], sin[:, None]))
    if back:
        turned = torch.cat(((wide * s)[..., half:], -(wide * s)[..., :half]), -1)
    else:
        turned = torch.cat((-wide[..., half:], wide[..., :half]), -1) * s
    return (wide * c + turned).to(dtype)[0].transpose(0, 1).contiguous().transpose(0, 1)[None]


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, index: Tensor) -> None:
    assert out.is_contiguous() and lse.is_contiguous() and other.is_contiguous() and other_lse.is_contiguous()
    mine = lse[:, index]
    joint = torch.logaddexp(mine, other_lse)
    weight, other_weight = ((x - joint).exp().t()[..., None] for x in (mine, other_lse))
    out[index] = (out[index] * weight + other * other_weight).to(out.dtype)
    lse[:, index] = joint


REFERENCES: dict[Any, Any] = {
    aten._flash_attention_forward.default: flash,
    aten._flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_flash_attention.default: sdpa_flash,
    aten.bmm.dtype_out: wide_bmm,
    aten.mm.dtype: wide_mm,
    aten.addmm.dtype_out: wide_addmm,
}


def head_forward(
    z: Tensor, targets: Tensor, state: Tensor, picked: Tensor, start: int, entropy: bool, squares: bool
) -> None:
    assert all(x.is_contiguous() for x in (z, targets, state, picked))
    (top, total, weighted, twice), wide = state.clone(), z.float()
    most = torch.maximum(top, wide.amax(1))
    shrink, e = (top - most).exp(), (wide - most[:, None]).exp()
    moved = torch.where(total > 0, (top - most) * total, 0.0)
    state[0], state[1] = most, total * shrink + e.sum(1)
    state[2] = (weighted + moved) * shrink + (e * (wide - most[:, None])).sum(1) if entropy else weighted
    state[3] = twice * shrink**2 + e.square().sum(1) if squares else twice
    places = targets - start
    inside = (places >= 0) & (places < z.shape[1])
    picked.copy_(torch.where(inside, wide.gather(1, places.clamp(0, z.shape[1] - 1)), picked))


def head_backward(z: Tensor, stats: Tensor, targets: Tensor, grad: Tensor, entropy: Any, squares: Any, start: int):  # type: ignore[no-untyped-def]
    assert z.is_contiguous() and targets.is_contiguous() and grad.is_contiguous() and stats.stride(1) == 1
    log_pi = z.float() - stats[0][:, None]
    pi, factor, places = log_pi.exp(), -grad.float().sum(1, keepdim=True).expand_as(z), targets - start
    factor = factor if entropy is None else factor - entropy[:, None] * (log_pi + stats[1][:, None])
    factor = factor if squares is None else factor + 2 * squares[:, None] * (pi - stats[2][:, None])
    inside = (places >= 0) & (places < z.shape[1])
    chosen = torch.zeros(z.shape).scatter_add_(1, places.clamp(0, z.shape[1] - 1), grad.float() * inside)
    z.copy_(pi * factor + chosen)


OURS = (head_forward, head_backward, rms_norm, rms_norm_backward, swiglu, swiglu_backward, rotate, merge_attention)
REFERENCES |= {getattr(torch.ops.verl, reference.__name__).default: reference for reference in OURS}
# Of operators that launch more than one kernel; tests/unit/platform/test_cuda_kernels.py counts those of ours.
LAUNCHES = {"verl.rms_norm_backward.default": 2}
