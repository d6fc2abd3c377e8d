"""A device's operators (`Platform.fused_operators`) in place of what modules compute: norms, gated MLPs, rotations.

What a module computes is found by trying: an operator stands in only where a probe shows that it gives what the module
gives; anything unusual keeps its own code. Replacements are the `forward` of single modules, and of rotations a
function of the architecture's Python module, in force inside `active()` only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verl.platform import platform_of
from verl.platform.device import FusedOperators, Platform

Forward = Callable[..., Any]
_ROTATION = "apply_rotary_pos_emb"


class FusedLayers:
    """The replacements that fit a model. Holds no tensors of its own. `forward_for` says which modules have one.

    compiles: by torch.compile where the device has no operators of its own (`Platform.compiled_operators`).
    """

    def __init__(self, model: nn.Module | None = None, *, compiles: bool = False):
        self._compiles = compiles
        self.forwards: dict[nn.Module, Forward] = {}
        self.rotations: dict[str, Forward] = {}
        self.add(() if model is None else model.modules())

    def add(self, modules: Iterable[nn.Module], **options: Any) -> None:
        """Look at modules one by one, while their weights are whole. options: of `forward_for`."""
        for module in modules:
            like = next(module.parameters(), None)
            wide = like is None or like.dtype.itemsize > 4  # kernels compute in float32
            operators = None if wide or like is None else self._operators(platform_of(like.device))
            forward = self.forward_for(module, operators, **options)
            name = type(module).__module__
            if (
                operators is not None
                and name not in self.rotations
                and (turn := rotation_for(module, operators.rotate))
            ):
                self.rotations[name] = turn
            if forward is not None and "forward" not in module.__dict__:
                self.forwards[module] = forward

    def _operators(self, platform: Platform) -> FusedOperators | None:
        return platform.fused_operators() or (platform.compiled_operators() if self._compiles else None)

    def forward_for(self, module: nn.Module, operators: FusedOperators | None) -> Forward | None:
        """The replacement for a module's forward, None for its own."""
        if operators is None:
            return None
        return norm_for(module, operators.rms_norm) or mlp_for(module, partial(gated_product, operators.swiglu))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the replacements until the block ends."""
        originals = {name: getattr(sys.modules[name], _ROTATION) for name in self.rotations}
        try:
            for module, forward in self.forwards.items():
                module.__dict__["forward"] = forward
            for name, rotation in self.rotations.items():
                setattr(sys.modules[name], _ROTATION, rotation)
            yield
        finally:
            for name, rotation in originals.items():
                setattr(sys.modules[name], _ROTATION, rotation)
            for module in self.forwards:
                module.__dict__.pop("forward", None)


def gated_product(swiglu: Forward, x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """down(silu(gate(x))·up(x)) by a device's operator."""
    product: Tensor = down(swiglu(gate(x), up(x)))
    return product


def norm_for(module: nn.Module, compute: Forward) -> Forward | None:
    """compute(x, weight, eps, offset), if the module is (weight + offset)·x/√(mean x² + eps)."""
    constants = norm_constants(module, compute)
    return None if constants is None else lambda x: compute(x, module.weight, *constants)


def norm_constants(module: nn.Module, compute: Forward) -> tuple[float, float] | None:
    """eps and offset of a norm that `compute` gives, None for any other module."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    is_norm = type(module).__name__.endswith("RMSNorm") and isinstance(eps, float)
    if not is_norm or not isinstance(weight, Tensor) or weight.ndim != 1:
        return None
    for offset in (0.0, 1.0):
        if _gives(module, lambda x, offset=offset: compute(x, module.weight, eps, offset), weight.shape[0]):
            return eps, offset
    return None


def mlp_for(module: nn.Module, compute: Forward) -> Forward | None:
    """compute(x, gate, up, down) with the three layers, if the module is down(silu(gate(x))·up(x))."""
    layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if any(not isinstance(getattr(layer, "in_features", None), int) for layer in layers):
        return None

    def forward(x: Tensor) -> Any:
        return compute(x, *layers)

    return forward if _gives(module, forward, layers[0].in_features) else None  # type: ignore[union-attr, arg-type]


def rotation_for(module: nn.Module, compute: Forward) -> Forward | None:
    """What stands in for the function of that name that an attention's code calls; None where it computes otherwise."""
    original = getattr(sys.modules.get(type(module).__module__), _ROTATION, None)
    if original is None or not type(module).__name__.endswith("Attention"):
        return None

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        fits = q.ndim == 4 and cos.ndim == 3 and cos.shape[-1] == q.shape[-1] == k.shape[-1]
        if more or named or not fits or not len(q) == len(cos) == 1 or q.dtype != k.dtype:
            return original(q, k, cos, sin, *more, **named)
        return compute(q, k, cos, sin)

    q, k, cos, sin = torch.linspace(-2, 3, 96).view(4, 1, 1, 3, 8).to(next(module.parameters()).device)
    try:
        pairs = zip(rotate(q, k, cos[:, 0], sin[:, 0]), original(q, k, cos[:, 0], sin[:, 0]), strict=True)
        same = all(torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5) for ours, theirs in pairs)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return None
    return rotate if same else None


@torch.no_grad()
def _gives(module: nn.Module, forward: Forward, width: int) -> bool:
    """Whether the replacement gives what the module gives, on one input in the weights' own type."""
    x = probe_rows(next(module.parameters()), width)
    try:
        expected = module(x)
    except (TypeError, ValueError, RuntimeError):
        return False
    return isinstance(expected, Tensor) and same(forward(x), expected)


def probe_rows(like: Tensor, width: int) -> Tensor:
    """Three rows [1, 3, width] to try a module on, of the type and on the device of `like`."""
    return torch.linspace(-2, 3, 3 * width).view(1, 3, -1).to(like.device, like.dtype)


def same(ours: Tensor, expected: Tensor) -> bool:
    """Whether two results of a probe are the same to rounding.

    Measured by the output: beside a fixed number small weights hide which function it is, and zeros say nothing.
    """
    size, tolerance = float(expected.abs().max()), 1e-5 if expected.dtype == torch.float32 else 1e-2
    return size > 0 and torch.allclose(ours, expected, rtol=tolerance, atol=tolerance * size)
