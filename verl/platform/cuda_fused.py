"""Operators of NVIDIA devices that read and write each number once, where Triton is installed (torch's CUDA builds bring it).

Each is one launch of a kernel of `cuda_kernels`, `rms_norm_backward` two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.platform.device import FusedOperators
from verl.platform.operators import define, ops

define(
    "verl.platform.cuda_kernels",
    "rms_norm(Tensor x, Tensor weight, float eps, float offset, ScalarType dtype) -> (Tensor, Tensor)",
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, float offset, Tensor inverse) -> (Tensor, Tensor)",
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor, Tensor)",
    "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, ScalarType dtype, bool back) -> (Tensor, Tensor)",
    "merge_attention(Tensor(a!) out, Tensor(b!) lse, Tensor other, Tensor other_lse, Tensor index) -> ()",
    "head_forward(Tensor z, Tensor targets, Tensor(a!) state, Tensor(b!) picked, int start, bool entropy, bool squares)"
    " -> ()",
    "head_backward(Tensor(a!) z, Tensor stats, Tensor targets, Tensor grad, Tensor? entropy, Tensor? squares, int start)"
    " -> ()",
)


def _product_dtype(*like: Tensor) -> torch.dtype:
    """What products take: results go there without another pass that rounds them."""
    kind = like[0].device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(like[0].dtype, like[-1].dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, dtype):  # type: ignore[no-untyped-def]
        y, inverse = ops.rms_norm(x, weight, eps, offset, dtype)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, inverse = ctx.saved_tensors
        dx, dw = ops.rms_norm_backward(grad, x, weight, ctx.offset, inverse)
        return dx, dw.to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None, None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, dtype):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        ctx.kind = q.dtype
        return ops.rotate(q, k, cos, sin, dtype, False)

    @staticmethod
    def backward(ctx, dq, dk):  # type: ignore[no-untyped-def]
        return *ops.rotate(dq, dk, *ctx.saved_tensors, ctx.kind, True), None, None, None


FUSED = FusedOperators(
    rms_norm=lambda x, weight, eps, offset: _Norm.apply(x, weight, eps, offset, _product_dtype(x, weight)),
    swiglu=ops.swiglu,
    rotate=lambda q, k, cos, sin: _Rotation.apply(q, k, cos, sin, _product_dtype(q, cos)),
    swiglu_backward=ops.swiglu_backward,
    merge_attention=ops.merge_attention,
    head=(ops.head_forward, ops.head_backward),
)
