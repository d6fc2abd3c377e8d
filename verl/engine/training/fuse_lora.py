"""A linear layer with an adapter as one operation, in place of peft's layer (see `fuse`).

    y = W·x + b + s·B·(A·x)      keeps x and A·x; the adapter is added in place, forward and backward

peft's own takes the same products and five more passes over memory, and casts the input to the adapter's type first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from verl.models.adapters import NAME, is_adapted


def forward_of(module: Any) -> Callable[..., Any] | None:
    """The replacement for an adapted torch.nn.Linear; None for anything else."""
    if (
        not is_adapted(module)
        or type(module.base_layer) is not nn.Linear
        or hasattr(module, "parameter_name")
    ):
        return None
    if list(module.lora_A) != [NAME] or getattr(module, "lora_variant", None):
        return None

    def forward(x: torch.Tensor) -> torch.Tensor:
        base = module.base_layer
        if module.disable_adapters:
            return base(x)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        a, b = module.lora_A[NAME].weight, module.lora_B[NAME].weight
        with torch.autocast(kind, enabled=False):
            return _Adapted.apply(x, base.weight, base.bias, a, b, float(module.scaling[NAME]), dtype)

    return forward


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scale, dtype):  # type: ignore[no-untyped-def]
        from verl.engine.training.fuse import unflattened

        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        weight_c, a_c, b_c = weight.to(dtype), a.to(dtype), b.to(dtype)
        inner = rows @ a_c.t()
        y = torch.nn.functional.linear(rows, weight_c, None if bias is None else bias.to(dtype))
        y.addmm_(inner, b_c.t(), alpha=scale)
        ctx.save_for_backward(rows, inner, weight_c, a_c, b_c, weight, bias, a, b)
        ctx.scale, ctx.shape, ctx.kind = scale, x.shape, x.dtype
        return unflattened(y, x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        from verl.engine.training.fuse import add_gradient

        rows, inner, weight_c, a_c, b_c, weight, bias, a, b = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1]).to(rows.dtype)
        outer = (grad @ b_c).mul_(ctx.scale)
        d_weight = add_gradient(weight, grad, rows) if needs[1] else None
        d_bias = grad.sum(0).to(bias.dtype) if needs[2] else None
        d_a = add_gradient(a, outer, rows) if needs[3] else None
        d_b = add_gradient(b, grad, inner.mul(ctx.scale)) if needs[4] else None
        dx = None
        if needs[0]:
            dx = (grad @ weight_c).addmm_(outer, a_c).to(ctx.kind).view(ctx.shape)
        return dx, d_weight, d_bias, d_a, d_b, None, None
