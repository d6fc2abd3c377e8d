"""Normalisation, gated MLP and layers with adapters with fewer passes over memory, in place of the model's own.

Written as single operations, a normalisation costs four times what it must backward, and a gated MLP keeps twice
what it must; peft's layer takes five more passes over memory than its products, and casts the input first. A
replacement is used only where a probe shows that it computes the same function as the module it replaces; anything
unusual keeps its own code. They are in force inside `active()` only, as `forward` of single modules, so a sampler that
shares the model sees it untouched.

    y = w·x/rms(x)                     keeps x and 1/rms
    y = (silu(xGᵀ) ∘ xUᵀ)Dᵀ            keeps x and the two products; the gate is computed again backward
    y = W·x + b + s·B·(A·x)            keeps x and A·x; the adapter is added in place, forward and backward

On a device with operators of its own for these (`Platform.fused_operators`) they compute the norm and the gate, and the
rotation of queries and keys in the attention's module. Where products write float32, those of weights' gradients are
added to the gradient by the product itself, of every linear layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from verl.models.adapters import NAME, is_adapted
from verl.models.attention import product_dtype
from verl.platform import platform_of
from verl.platform.device import FusedOperators


class FusedForwards:
    """The replacements that fit a model. Cheap to build; holds no tensors of its own."""

    def __init__(self, model: nn.Module | None = None):
        self.forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        self.rotations: dict[str, Callable[..., Any]] = {}
        self.add(() if model is None else model.modules())

    def add(self, modules: Iterable[nn.Module], *, gated: bool = True) -> None:
        """Look at modules one by one, while their weights are whole. gated=False leaves gated MLPs alone."""
        for module in modules:
            fused = _operators(module)
            forward = _norm_for(module, fused) or _adapted_for(module)
            forward = forward or ((_mlp_for(module, fused) or _linear_for(module)) if gated else None)
            if fused is not None and (rotation := _rotation_for(module, fused)):
                self.rotations[type(module).__module__] = rotation
            if forward is not None and "forward" not in module.__dict__:
                self.forwards.append((module, forward))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the replacements until the block ends."""
        for module, forward in self.forwards:
            module.__dict__["forward"] = forward
        own = {name: getattr(sys.modules[name], _ROTATION) for name in self.rotations}
        for name, rotation in self.rotations.items():
            setattr(sys.modules[name], _ROTATION, rotation)
        try:
            yield
        finally:
            for name, rotation in own.items():
                setattr(sys.modules[name], _ROTATION, rotation)
            for module, _ in self.forwards:
                module.__dict__.pop("forward", None)


# -- normalisation -----------------------------------------------------------------------------------------


def _norm_for(module: nn.Module, fused: FusedOperators | None) -> Callable[..., Any] | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    is_norm = type(module).__name__.endswith("RMSNorm") and isinstance(eps, float)
    if not is_norm or not isinstance(weight, torch.Tensor) or weight.ndim != 1:
        return None
    for offset in (0.0, 1.0):

        def forward(x: torch.Tensor, offset: float = offset) -> torch.Tensor:
            if fused is not None and (fused.mixes_types or x.dtype == module.weight.dtype):
                return fused.rms_norm(x, module.weight + offset if offset else module.weight, eps)
            with torch.autocast(x.device.type, enabled=False):
                return _RMSNorm.apply(x, module.weight, eps, offset)

        if _same(module, forward, torch.linspace(-2, 3, 3 * weight.shape[0]).view(3, -1)):
            return forward
    return None


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


def _mlp_for(module: nn.Module, fused: FusedOperators | None) -> Callable[..., Any] | None:
    layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if any(type(layer) is not nn.Linear or layer.bias is not None for layer in layers):
        return None

    def forward(x: torch.Tensor) -> torch.Tensor:
        gate, up, down = layers
        if fused is not None and fused.swiglu_backward is None:
            return down(fused.swiglu(gate(x), up(x)))  # type: ignore[misc]
        dtype = product_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            return _GatedMLP.apply(x, gate.weight, up.weight, down.weight, dtype, fused)  # type: ignore[union-attr]

    width = layers[0].in_features  # type: ignore[union-attr]
    return forward if _same(module, forward, torch.linspace(-2, 3, 3 * width).view(3, -1)) else None


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


# -- rotation of queries and keys --------------------------------------------------------------------------

_ROTATION = "apply_rotary_pos_emb"


def _rotation_for(module: nn.Module, fused: FusedOperators) -> Callable[..., Any] | None:
    """What stands in for the function of that name that an attention's code calls; None where it computes otherwise."""
    own = getattr(sys.modules.get(type(module).__module__), _ROTATION, None)
    if own is None or not type(module).__name__.endswith("Attention"):
        return None

    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **named: Any) -> Any:
        fits = q.ndim == 4 and cos.ndim == 3 and cos.shape[-1] == q.shape[-1]
        fits = fits and (len(q) == len(cos) == 1 if fused.mixes_types else cos.dtype == q.dtype)
        if more or named or not fits:
            return own(q, k, cos, sin, *more, **named)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return fused.rotate(q, cos, sin), fused.rotate(k, cos, sin)

    device = next(module.parameters()).device
    q, k, cos, sin = torch.linspace(-2, 3, 96).view(4, 1, 1, 3, 8).to(device)
    try:
        expected = own(q, k, cos[:, 0], sin[:, 0])
        pairs = zip(rotate(q, k, cos[:, 0], sin[:, 0]), expected, strict=True)
        same = all(torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5) for ours, theirs in pairs)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return None
    return rotate if same else None


# -- linear layers ------------------------------------------------------------------------


def _adapted_for(module: Any) -> Callable[..., Any] | None:
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


def _linear_for(module: nn.Module) -> Callable[..., Any] | None:
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


# -- probes ------------------------------------------------------------------------------------------------


def _operators(module: nn.Module) -> FusedOperators | None:
    """Of the device that a module's weights are on."""
    like = next(module.parameters(), None)
    return None if like is None else platform_of(like.device).fused_operators()


@torch.no_grad()
def _same(module: nn.Module, forward: Callable[..., Any], x: torch.Tensor) -> bool:
    """True if the replacement gives what the module gives, on one input in the weights' own type."""
    like = next(module.parameters())
    x = x.to(device=like.device, dtype=like.dtype)
    try:
        expected = module(x)
    except (TypeError, ValueError, RuntimeError):
        expected = None
    if not isinstance(expected, torch.Tensor):
        return False
    # Measured by the output: beside a fixed number small weights hide which function it is, and zeros say nothing.
    size = float(expected.abs().max())
    tolerance = 1e-5 if like.dtype == torch.float32 else 1e-2
    return size > 0 and torch.allclose(forward(x), expected, rtol=tolerance, atol=tolerance * size)
