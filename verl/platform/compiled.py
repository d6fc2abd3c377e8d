"""`FusedOperators` by torch.compile, for devices that Triton compiles for and that have none of their own here
(AMD's)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from verl.platform.device import FusedOperators


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.float() + offset)
    return normed.to(torch.promote_types(x.dtype, weight.dtype))


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    return turned(q), turned(k)


@cache
def compiled_operators() -> FusedOperators:
    """Each function is compiled when it is first called, for all sizes, and again for other types."""
    norm, swiglu, rotate = (torch.compile(function, dynamic=True) for function in (_rms_norm, _swiglu, _rotate))
    return FusedOperators(rms_norm=norm, swiglu=swiglu, rotate=rotate)
