"""A layer's parts between its products in one kernel each, while the sampler runs on a device that Triton compiles for.

A kernel stands in only where a probe shows that it computes what the module computes; anything unusual keeps its own
code. Replaced are root-mean-square norms, gated MLPs, and the rotation of queries and keys, a function of the
architecture's module. All of it is in force inside `active()` only, and training never sees it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_ROTATION = "apply_rotary_pos_emb"


class FusedLayers:
    """The replacements that fit a model. Holds no tensors of its own."""

    def __init__(self, model: nn.Module):
        self.forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        self.rotations: dict[str, Callable[..., Any]] = {}
        for module in model.modules():
            if (forward := _norm_for(module) or _mlp_for(module)) is not None:
                self.forwards[module] = forward
            if rotation := _rotation_for(module):
                self.rotations[type(module).__module__] = rotation

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


def _norm_for(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    is_norm = type(module).__name__.endswith("RMSNorm") and isinstance(eps, float)
    if not is_norm or not isinstance(weight, Tensor) or weight.ndim != 1:
        return None
    for offset in (0.0, 1.0):

        def forward(x: Tensor, offset: float = offset) -> Tensor:
            if x.ndim not in (3, 4) or len(x) != 1 or x.stride(-1) != 1:
                return type(module).forward(module, x)
            return torch.ops.verl_sampler.rms_norm(x, module.weight, eps, offset)

        if _same(module, forward, weight.shape[0]):
            return forward
    return None


def _mlp_for(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if gate is None or up is None or down is None or not isinstance(getattr(gate, "in_features", None), int):
        return None

    def forward(x: Tensor) -> Tensor:
        if x.ndim != 3 or len(x) != 1:
            return type(module).forward(module, x)
        return down(torch.ops.verl_sampler.swiglu(gate(x), up(x)))

    return forward if _same(module, forward, gate.in_features) else None


def _rotation_for(module: nn.Module) -> Callable[..., Any] | None:
    original = getattr(sys.modules.get(type(module).__module__), _ROTATION, None)
    if original is None or not type(module).__name__.endswith("Attention"):
        return None

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        usual = not more and not named and q.ndim == 4 and cos.ndim == 3 and cos.shape[-1] == q.shape[-1]
        if not usual or not len(q) == len(cos) == 1 or any(x.stride(-1) != 1 for x in (q, k, cos, sin)):
            return original(q, k, cos, sin, *more, **named)
        return torch.ops.verl_sampler.rotate(q, k, cos, sin)

    q, k, cos, sin = torch.linspace(-2, 3, 96).view(4, 1, 1, 3, 8).to(next(module.parameters()).device)
    try:
        expected = original(q, k, cos[:, 0], sin[:, 0])
        same = all(map(torch.allclose, rotate(q, k, cos[:, 0], sin[:, 0]), expected))
    except (TypeError, ValueError, RuntimeError, IndexError):
        return None
    return rotate if same else None


@torch.no_grad()
def _same(module: nn.Module, forward: Callable[[Tensor], Tensor], width: int) -> bool:
    """True if the replacement gives what the module gives, on one input in the weights' own type."""
    like = next(module.parameters())
    x = torch.linspace(-2, 3, 3 * width, dtype=like.dtype).view(1, 3, -1).to(like.device)
    try:
        expected = module(x)
    except (TypeError, ValueError, RuntimeError):
        expected = None
    if not isinstance(expected, Tensor):
        return False
    # Measured by the output: beside a fixed number small weights hide which function it is, and zeros say nothing.
    size, tolerance = float(expected.abs().max()), 1e-5 if like.dtype == torch.float32 else 1e-2
    return size > 0 and torch.allclose(forward(x), expected, rtol=tolerance, atol=tolerance * size)
