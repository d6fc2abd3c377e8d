"""Normalisation, gated MLP and layers with adapters with fewer passes over memory, in place of the model's own.

Written as single operations, a normalisation costs four times what it must backward, and a gated MLP keeps twice
what it must; peft's layer takes five more passes over memory than its products, and casts the input first. A sampler
that shares the model sees it untouched.

    y = w·x/rms(x)                     keeps x and 1/rms
    y = (silu(xGᵀ) ∘ xUᵀ)Dᵀ            keeps x and the two products; the gate is computed again backward
    y = W·x + b + s·B·(A·x)            keeps x and A·x; the adapter is added in place, forward and backward
    y = W[ids]                         adds to the rows of the gradient that the ids name, on a CPU

On a device with operators of its own for these (`verl.models.fused_layers`) they compute the norm and the gate, and the
rotation of queries and keys. Where products write float32, those of weights' gradients are added to the gradient by the
product itself, of every linear layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from verl.models.adapters import NAME, is_adapted
from verl.models.attention import product_dtype
from verl.models.fused_layers import Forward, FusedLayers, gated_product, mlp_for, norm_for
from verl.platform import platform_of
from verl.platform.device import FusedOperators


class FusedForwards(FusedLayers):
    """The replacements that fit a model in training."""

    def forward_for(
        self, module: nn.Module, operators: FusedOperators | None, *, gated: bool = True
    ) -> Forward | None:  # fmt: skip
        """See `FusedLayers`. gated=False leaves gated MLPs, plain linear layers and embeddings alone."""
        forward = norm_for(module, _norm if operators is None else operators.rms_norm) or _adapted_for(module)
        if forward is not None or not gated:
            return forward
        return _mlp_for(module, operators) or _linear_for(module) or _embedding_for(module)


# -- normalisation -----------------------------------------------------------------------------------------


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> Any:
    with torch.autocast(x.device.type, enabled=False):
        return _RMSNorm.apply(x, weight, eps, offset)


class _RMSNorm(torch.autograd.Function):
    """(w + offset)·x/√(mean x² + ε), in float32, returned in the wider type of x and w (1910.07467)."""

    @staticmethod
    def forward(ctx, x, weight, eps, offset):  # type: ignore[no-untyped-def]
        wide = x.float()
        inverse = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_()[..., None]
        scale = weight.float() if offset == 0.0 else weight.float() + offset
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return torch.mul(wide, inverse).mul_(scale).to(torch.promote_types(x.dtype, weight.dtype))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, inverse = ctx.saved_tensors
        width = x.shape[-1]
        grad, wide = grad.float(), x.float()
        product = grad * wide
        dw = None
        if ctx.needs_input_grad[1]:
            flat = product.reshape(-1, width)
            dw = torch.mv(flat.t(), inverse.reshape(-1)).to(weight.dtype)
        scale = weight.float() if ctx.offset == 0.0 else weight.float() + ctx.offset
        # d/dx of x/rms: the part of the gradient along x is taken out.
        along = torch.mv(product.reshape(-1, width), scale).view(inverse.shape)
        along.mul_(inverse).mul_(inverse).mul_(inverse).div_(-width)
        dx = torch.mul(grad, scale).mul_(inverse).addcmul_(wide, along)
        return dx.to(x.dtype), dw, None, None


# -- gated MLP ---------------------------------------------------------------------------------------------


def _mlp_for(module: nn.Module, fused: FusedOperators | None) -> Forward | None:
    layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if any(type(layer) is not nn.Linear or layer.bias is not None for layer in layers):
        return None
    if fused is not None and fused.swiglu_backward is None:
        return mlp_for(module, partial(gated_product, fused.swiglu))

    def compute(x: torch.Tensor, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> Any:
        dtype = product_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            return _GatedMLP.apply(x, gate.weight, up.weight, down.weight, dtype, fused)

    return mlp_for(module, compute)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down, dtype, fused):  # type: ignore[no-untyped-def]
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        gate_c, up_c, down_c = gate.to(dtype), up.to(dtype), down.to(dtype)
        g, u = rows @ gate_c.t(), rows @ up_c.t()
        out = (torch.nn.functional.silu(g).mul_(u) if fused is None else fused.swiglu(g, u)) @ down_c.t()
        ctx.save_for_backward(rows, g, u, gate_c, up_c, down_c, gate, up, down)
        ctx.shape, ctx.kind, ctx.fused = x.shape, x.dtype, fused
        return _unflattened(out, x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        rows, g, u, gate_c, up_c, down_c, gate, up, down = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1]).to(rows.dtype)
        needs = ctx.needs_input_grad
        dh = grad @ down_c
        if ctx.fused is not None:
            h, dg, du = ctx.fused.swiglu_backward(dh, g, u)
        else:
            s = torch.nn.functional.silu(g)
            du = dh * s
            h = s.mul_(u)
            dg = torch.ops.aten.silu_backward(dh.mul_(u), g)
        d_down = _add_gradient(down, grad, h) if needs[3] else None
        d_gate = _add_gradient(gate, dg, rows) if needs[1] else None
        d_up = _add_gradient(up, du, rows) if needs[2] else None
        dx = None
        if needs[0] and ctx.fused is not None and ctx.kind == rows.dtype:
            dx = (dg @ gate_c).addmm_(du, up_c).view(ctx.shape)
        elif needs[0]:
            dx = (dg @ gate_c).to(ctx.kind).add_(du @ up_c).view(ctx.shape)
        return dx, d_gate, d_up, d_down, None, None


# -- linear layers ------------------------------------------------------------------------


def _adapted_for(module: Any) -> Forward | None:
    """The replacement for an adapted torch.nn.Linear; None for anything else."""
    if not is_adapted(module) or type(module.base_layer) is not nn.Linear or list(module.lora_A) != [NAME]:
        return None
    if hasattr(module, "parameter_name") or getattr(module, "lora_variant", None):
        return None

    def forward(x: torch.Tensor) -> torch.Tensor:
        base = module.base_layer
        if module.disable_adapters:
            return base(x)
        dtype = product_dtype(x)
        a, b = module.lora_A[NAME].weight, module.lora_B[NAME].weight
        with torch.autocast(x.device.type, enabled=False):
            return _Adapted.apply(x, base.weight, base.bias, a, b, float(module.scaling[NAME]), dtype)

    return forward


def _linear_for(module: nn.Module) -> Forward | None:
    """Of a torch.nn.Linear, where a product adds itself to a float32 gradient of its weight in one pass."""
    if type(module) is not nn.Linear or not platform_of(module.weight.device).has_widening_product():
        return None

    def forward(x: torch.Tensor) -> torch.Tensor:
        dtype = product_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            return _Linear.apply(x, module.weight, module.bias, dtype)

    return forward


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, dtype):  # type: ignore[no-untyped-def]
        rows, weight_c = x.reshape(-1, x.shape[-1]).to(dtype), weight.to(dtype)
        ctx.save_for_backward(rows, weight_c, weight, bias)
        ctx.shape, ctx.kind = x.shape, x.dtype
        return _unflattened(torch.nn.functional.linear(rows, weight_c, None if bias is None else bias.to(dtype)), x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (rows, weight_c, weight, bias), needs = ctx.saved_tensors, ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1]).to(rows.dtype)
        d_weight = _add_gradient(weight, grad, rows) if needs[1] else None
        dx = (grad @ weight_c).to(ctx.kind).view(ctx.shape) if needs[0] else None
        return dx, d_weight, grad.sum(0).to(bias.dtype) if bias is not None and needs[2] else None, None


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scale, dtype):  # type: ignore[no-untyped-def]
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        weight_c, a_c, b_c = weight.to(dtype), a.to(dtype), b.to(dtype)
        inner = rows @ a_c.t()
        y = torch.nn.functional.linear(rows, weight_c, None if bias is None else bias.to(dtype))
        y.addmm_(inner, b_c.t(), alpha=scale)
        ctx.save_for_backward(rows, inner, weight_c, a_c, b_c, weight, bias, a, b)
        ctx.scale, ctx.shape, ctx.kind = scale, x.shape, x.dtype
        return _unflattened(y, x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        rows, inner, weight_c, a_c, b_c, weight, bias, a, b = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1]).to(rows.dtype)
        outer = (grad @ b_c).mul_(ctx.scale)
        d_weight = _add_gradient(weight, grad, rows) if needs[1] else None
        d_bias = grad.sum(0).to(bias.dtype) if needs[2] else None
        d_a = _add_gradient(a, outer, rows) if needs[3] else None
        d_b = _add_gradient(b, grad, inner.mul(ctx.scale)) if needs[4] else None
        dx = (grad @ weight_c).addmm_(outer, a_c).to(ctx.kind).view(ctx.shape) if needs[0] else None
        return dx, d_weight, d_bias, d_a, d_b, None, None


# -- embeddings --------------------------------------------------------------------------------------------


def _embedding_for(module: nn.Module) -> Forward | None:
    """Of a torch.nn.Embedding on the host. On other devices adding rows in place has no fixed order of the sums."""
    if type(module) is not nn.Embedding or not platform_of(module.weight.device).on_host:
        return None
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return None

    def forward(ids: torch.Tensor) -> Any:
        return _Embedding.apply(ids, module.weight, module.padding_idx)

    return forward


class _Embedding(torch.autograd.Function):
    """weight[ids]. Backward, the rows that the batch reads are added to an existing gradient, where torch makes a
    gradient of the whole vocabulary and adds that: 0.5 GiB for 151,936 tokens of width 896. The sums are the same."""

    @staticmethod
    def forward(ctx, ids, weight, padding):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(ids, weight)
        ctx.padding = -1 if padding is None else padding
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ids, weight = ctx.saved_tensors
        if not weight.is_leaf or weight.grad is None:
            return None, torch.ops.aten.embedding_dense_backward(grad, ids, weight.shape[0], ctx.padding, False), None
        rows, places = ids.flatten().unique(return_inverse=True)
        sums = grad.new_zeros((len(rows), grad.shape[-1]))
        sums.index_add_(0, places, grad.reshape(-1, grad.shape[-1]))
        if ctx.padding >= 0:
            sums[rows == ctx.padding] = 0
        weight.grad.index_add_(0, rows, sums.to(weight.grad.dtype))
        return None, None, None


# -- products ----------------------------------------------------------------------------------------------


def _unflattened(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[n, width] with the leading dimensions of `like`, no view to autograd: an architecture may change it in place."""
    return torch.ops.aten._unsafe_view(rows, [*like.shape[:-1], rows.shape[-1]])


def _add_gradient(weight: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """gradᵀ·rows as the gradient of a linear layer's weight: added to a leaf's existing .grad (then None is
    returned, there is nothing left for autograd to add), else returned in the weight's type."""
    widens = weight.dtype == torch.float32 != grad.dtype and platform_of(weight.device).has_widening_product()
    if weight.is_leaf and widens:
        if weight.grad is None:
            weight.grad = torch.mm(grad.t(), rows, out_dtype=torch.float32)
        else:
            torch.addmm(weight.grad, grad.t(), rows, out_dtype=torch.float32, out=weight.grad)
        return None
    if weight.is_leaf and weight.grad is not None:
        if weight.grad.dtype == grad.dtype:
            weight.grad.addmm_(grad.t(), rows)
        else:
            weight.grad.add_(grad.t() @ rows)
        return None
    return (grad.t() @ rows).to(weight.dtype)
