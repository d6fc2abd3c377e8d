"""The Triton kernels of layers and of the head against plain torch: on a device, and by Triton's interpreter
(`tests/unit/engine/native/test_native_kernels.py`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import operator_references as references
from tests.gpu.conftest import KIND
from verl.platform.operators import ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else pytest.mark.needs_cuda
HALF = torch.bfloat16


def random(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(*shape).to(dtype)


def cases() -> Iterator[tuple[str, list[Any]]]:
    torch.manual_seed(0)
    joined = random(1, 30, 9 * 80)  # a product for several layers: rows and heads are not side by side
    heads = joined[..., 80:240].view(1, 30, 2, 80)
    for dtype, x in (
        (HALF, joined[..., :80]),
        (HALF, heads),
        (torch.float32, torch.randn(1, 30, 1100)),
        (HALF, random(1, 0, 16)),
    ):
        for offset in (0.0, 1.0):
            weight = torch.randn(x.shape[-1])
            yield "rms_norm", [x, weight, 1e-6, offset, dtype]
            inverse = references.rms_norm(x, weight, 1e-6, offset, dtype)[1]
            yield "rms_norm_backward", [random(*x.shape, dtype=dtype), x, weight, offset, inverse]
    yield "swiglu", [joined[..., :300], joined[..., 320:620]]
    yield "swiglu_backward", [random(3, 1100) for _ in range(3)]
    for many, few, width, dtype in ((4, 1, 80, HALF), (7, 7, 96, torch.float32), (28, 4, 128, HALF)):
        cos, sin = torch.randn(2, 1, 9, width)
        q, k = random(1, 9, many, width, dtype=dtype).transpose(1, 2), random(1, few, 9, width, dtype=dtype)
        for back in (False, True):
            yield "rotate", [q, k, cos, sin, HALF, back]
    merged = random(30, 5, 80), torch.randn(5, 30), random(9, 5, 80), torch.randn(5, 9)
    yield "merge_attention", [*merged, torch.randperm(30)[:9]]
    z, targets, stats = random(5, 5001), torch.randint(0, 6000, (5, 2)), torch.randn(3, 9)[:, 2:7]
    for entropy in (False, True):
        for state in (torch.tensor([[-torch.inf], [0], [0], [0]]).repeat(1, 5), torch.rand(4, 5)):
            yield "head_forward", [z, targets, state, torch.zeros(5, 2), 700 * entropy, entropy, entropy]
        more = [torch.randn(5) if entropy else None for _ in range(2)]
        yield "head_backward", [z.float() - 6, stats, targets, torch.randn(5, 2), *more, 700 * entropy]


def moved(x: Any, device: torch.device) -> Any:
    """With the strides that it has."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def test_kernels_compute_what_their_references_do(platform: Any, record_property: Any) -> None:
    assert INTERPRETED or platform.fused_operators() is not None, "Triton is not installed, or finds no C compiler"
    for name, arguments in cases():
        there = [moved(a, platform.device()) for a in arguments]
        if KIND == "cuda":
            ours = getattr(ops, name)(*there)
        else:
            from verl.platform import cuda_kernels

            ours = getattr(cuda_kernels, name)(*there)
        theirs = getattr(references, name)(*arguments)
        ours, theirs = (there[:4], arguments[:4]) if ours is None else (ours, theirs)
        pairs = zip(ours, theirs, strict=True) if isinstance(theirs, tuple | list) else [(ours, theirs)]
        for a, b in pairs:
            steps = [[step for step, n in zip(x.stride(), x.shape, strict=True) if n > 1] for x in (a, b)]
            assert a.shape == b.shape and a.dtype == b.dtype and (not a.numel() or steps[0] == steps[1]), (name, steps)
            difference = (a.cpu().float() - b.float()).nan_to_num()
            record_property(name, float(difference.abs().max() if a.numel() else 0.0))
            assert float(difference.norm()) <= (1e-5 if b.dtype == torch.float32 else 5e-3) * float(b.float().norm()), (
                name
            )
