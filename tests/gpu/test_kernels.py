"""The Triton kernels of training on a device against plain torch on the processor. Never run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.pretend import kernels as references
from verl.platform import cuda_fused

pytestmark = pytest.mark.needs_cuda


def cases() -> Iterator[tuple[str, list[Any]]]:
    torch.manual_seed(0)
    half, x, weight = torch.bfloat16, torch.randn(1, 300, 1024), torch.randn(1024)
    yield "rms_norm", [x, weight, 1e-6, half]
    inverse = references.rms_norm(x, weight, 1e-6, half)[1]
    yield "rms_norm_backward", [torch.randn(1, 300, 1024).to(half), x, weight, inverse]
    g, u, d = torch.randn(3, 200, 3072).to(half)
    yield "swiglu", [g, u]
    yield "swiglu_backward", [d, g, u]
    cos, sin = torch.randn(2, 1, 300, 128)
    for back in (False, True):
        yield "rotate", [torch.randn(1, 300, 16, 128).to(half).transpose(1, 2), cos, sin, half, back]
    index = torch.randperm(300)[:90]
    merged = torch.randn(300, 16, 128).to(half), torch.randn(16, 300), torch.randn(90, 16, 128).to(half)
    yield "merge_attention", [*merged, torch.randn(16, 90), index]
    z, targets = torch.randn(40, 16384).to(half), torch.randint(0, 30000, (40, 1))
    state = torch.tensor([[-torch.inf], [0], [0], [0]]).repeat(1, 40)
    yield "head_forward", [z, targets, state, torch.zeros(40, 1), 0, True, True]
    stats = torch.stack((torch.logsumexp(z.float(), 1), torch.randn(40), torch.rand(40)))
    yield "head_backward", [z.clone(), stats, targets, torch.randn(40, 1), torch.randn(40), torch.randn(40), 0]


def test_kernels_compute_what_their_references_do(platform: Any, record_property: Any) -> None:
    assert platform.fused_operators() is not None, "Triton is not installed, or finds no C compiler"
    for name, arguments in cases():
        there = [a.to(platform.device()) if isinstance(a, torch.Tensor) else a for a in arguments]
        ours = getattr(cuda_fused.ops, name)(*there)
        theirs = getattr(references, name)(*arguments)
        ours, theirs = (there[:4], arguments[:4]) if ours is None else (ours, theirs)
        pairs = zip(ours, theirs, strict=True) if isinstance(theirs, tuple | list) else [(ours, theirs)]
        for a, b in pairs:
            difference = (a.cpu().float() - b.float()).nan_to_num()
            record_property(name, float(difference.abs().max()))
            assert float(difference.norm()) <= (1e-5 if b.dtype == torch.float32 else 5e-3) * float(b.float().norm()), (
                name
            )
