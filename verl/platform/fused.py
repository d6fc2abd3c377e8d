"""The table of a device's operators from its kernels: functions as those of `cuda_kernels`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.platform.device import FusedOperators


def _product_dtype(*like: Tensor) -> torch.dtype:
    """What products take: results go there without another pass that rounds them."""
    kind = like[0].device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(like[0].dtype, like[-1].dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, x, weight, eps, offset, dtype):  # type: ignore[no-untyped-def]
        y, inverse = kernels.rms_norm(x, weight, eps, offset, dtype)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset, ctx.kernels = offset, kernels
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, inverse = ctx.saved_tensors
        dx, dw = ctx.kernels.rms_norm_backward(grad, x, weight, ctx.offset, inverse)
        return None, dx, dw.to(weight.dtype) if ctx.needs_input_grad[2] else None, None, None, None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, q, k, cos, sin, dtype):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        ctx.kind, ctx.kernels = q.dtype, kernels
        return kernels.rotate(q, k, cos, sin, dtype, False)

    @staticmethod
    def backward(ctx, dq, dk):  # type: ignore[no-untyped-def]
        return None, *ctx.kernels.rotate(dq, dk, *ctx.saved_tensors, ctx.kind, True), None, None, None


def fused_operators(kernels: Any, **more: Any) -> FusedOperators:
    """more: operators that only some devices have."""

    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Any:
        arguments = x, weight, eps, offset, _product_dtype(x, weight)
        return _Norm.apply(kernels, *arguments) if torch.is_grad_enabled() else kernels.rms_norm(*arguments)[0]

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        arguments = q, k, cos, sin, _product_dtype(q, cos)
        return _Rotation.apply(kernels, *arguments) if torch.is_grad_enabled() else kernels.rotate(*arguments, False)

    return FusedOperators(
        rms_norm=rms_norm,
        swiglu=kernels.swiglu,
        rotate=rotate,
        swiglu_backward=kernels.swiglu_backward,
        head=(kernels.head_forward, kernels.head_backward),
        **more,
    )
