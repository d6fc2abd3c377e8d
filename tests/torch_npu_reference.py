"""What stands in for `torch_npu` in tests: functions with its documented signatures, computed plainly.

https://www.hiascend.com/document, "Ascend Extension for PyTorch", API reference. `calls` counts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

calls: Counter[str] = Counter()
_STATISTICS = 8  # softmax_max and softmax_sum are written eight times


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(x / rms(x) · gamma, 1 / rms(x)), of one data type."""
    calls["npu_rms_norm"] += 1
    assert self.dtype == gamma.dtype
    inverse = self.float().square().mean(-1, keepdim=True).add(epsilon).rsqrt()
    return (self.float() * inverse * gamma.float()).to(self.dtype), inverse


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) · second half."""
    calls["npu_swiglu"] += 1
    gate, up = self.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """input·r1 + (−second half, first half)·r2 of four dimensions."""
    calls["npu_rotary_mul"] += 1
    assert rotary_mode == "half" and input.ndim == r1.ndim == r2.ndim == 4
    first, second = input.chunk(2, -1)
    return input * r1 + torch.cat((-second, first), -1) * r2


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int = -1,
    group_list_type: int = 0,
) -> list[Tensor]:
    """One tensor: rows of each group times its matrix (group type 0), or products over each group's rows (2)."""
    calls["npu_grouped_matmul"] += 1
    assert group_list is not None and group_list.dtype == torch.int64 and group_list_type == 0 and bias is None
    assert split_item in (2, 3) and x[0].dtype == weight[0].dtype in (torch.bfloat16, torch.float16)
    groups = _spans(group_list.tolist())
    if group_type == 0:
        return [torch.cat([x[0][g] @ w for g, w in zip(groups, weight[0], strict=True)])]
    assert group_type == 2
    return [torch.stack([x[0][:, g] @ weight[0][g] for g in groups])]


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """(output, softmax_max, softmax_sum [T, N, 8], softmax_out, seed, offset, numels) of packed sequences."""
    calls["npu_fusion_attention"] += 1
    _check(query, head_num, input_layout, atten_mask, sparse_mode)
    out = torch.zeros_like(query)
    maxima, sums = (torch.zeros(*query.shape[:2], _STATISTICS, device=query.device) for _ in range(2))
    for q, k, scores in _sequences(query, key, actual_seq_qlen, actual_seq_kvlen, scale, sparse_mode):
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        total = weights.sum(-1, keepdim=True)
        out[q] = torch.einsum("hqk,khd->qhd", weights / total, _grouped(value[k], head_num)).to(out.dtype)
        maxima[q], sums[q] = (x.movedim(0, 1).expand(-1, -1, _STATISTICS) for x in (largest, total))
    return out, maxima, sums, torch.zeros(0), 0, 0, 0


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and pse from the output and the statistics of the forward call."""
    calls["npu_fusion_attention_grad"] += 1
    _check(query, head_num, input_layout, atten_mask, sparse_mode)
    assert softmax_max is not None and softmax_sum is not None and attention_in is not None
    assert softmax_max.shape == softmax_sum.shape == (*query.shape[:2], _STATISTICS)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value))
    along = (dy.float() * attention_in.float()).sum(-1).t()
    for q, k, scores in _sequences(query, key, actual_seq_qlen, actual_seq_kvlen, scale_value, sparse_mode):
        largest, total = (x[q, :, :1].movedim(1, 0) for x in (softmax_max, softmax_sum))
        weights, grad = (scores - largest).exp() / total, dy[q].float()
        ds = torch.einsum("qhd,khd->hqk", grad, _grouped(value[k], head_num)) - along[:, q, None]
        ds = ds * weights * scale_value
        dq[q] = torch.einsum("hqk,khd->qhd", ds, _grouped(key[k], head_num))
        dk[k] += _folded(torch.einsum("hqk,qhd->khd", ds, query[q].float()), key.shape[1])
        dv[k] += _folded(torch.einsum("hqk,qhd->khd", weights, grad), key.shape[1])
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), torch.zeros(0)


def _check(query: Tensor, head_num: int, layout: str, mask: Tensor | None, sparse_mode: int) -> None:
    assert layout == "TND" and query.ndim == 3 and query.shape[1] == head_num
    if sparse_mode == 3:  # causal from the lower right corner, with a compressed mask
        assert mask is not None and mask.dtype == torch.bool and mask.shape == (2048, 2048)


def _sequences(
    query: Tensor, key: Tensor, q_ends: Any, k_ends: Any, scale: float, sparse_mode: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(its queries, its keys, scores float32 [N, Sq, Sk]) of each."""
    assert all(type(end) is int for end in (*q_ends, *k_ends)) and len(q_ends) == len(k_ends)
    for q, k in zip(_spans(q_ends), _spans(k_ends), strict=True):
        scores = torch.einsum("qhd,khd->hqk", query[q].float(), _grouped(key[k], query.shape[1])) * scale
        if sparse_mode == 3:
            rows, keys = scores.shape[-2:]
            hidden = torch.ones(rows, keys, dtype=torch.bool, device=query.device).triu(1 + keys - rows)
            scores = scores.masked_fill(hidden, -torch.inf)
        yield q, k, scores


def _spans(ends: Sequence[int]) -> list[slice]:
    return [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def _grouped(x: Tensor, heads: int) -> Tensor:
    return x.float().repeat_interleave(heads // x.shape[1], 1)


def _folded(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(1, (heads, -1)).sum(2)
