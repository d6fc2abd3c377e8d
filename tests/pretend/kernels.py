"""Slow references of CUDA's kernels that the processor lacks. They refuse what the kernels refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

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
    assert mq > 1 or q.shape[1] == k.shape[1] or len(q) == len(cq) - 1, "of one query each, with grouped heads"
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


REFERENCES: dict[Any, Any] = {
    aten._flash_attention_forward.default: flash,
    aten._flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_flash_attention.default: sdpa_flash,
    aten.bmm.dtype_out: wide_bmm,
    aten.mm.dtype: wide_mm,
    aten.addmm.dtype_out: wide_addmm,
}
