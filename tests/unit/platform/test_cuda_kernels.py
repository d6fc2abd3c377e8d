"""Triton's kernels for training, by Triton's interpreter, against the references that the pretend device counts with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import environment

PROGRAM = """
import torch, triton
from triton.runtime import interpreter
from tests.pretend import kernels as references
from verl.platform import cuda_fused as fused

launched, run = [], interpreter.GridExecutor.__call__
interpreter.GridExecutor.__call__ = lambda self, *a, **k: (launched.append(0), run(self, *a, **k))[1]
torch.manual_seed(0)
half = torch.bfloat16


def random(*shape, dtype=half):
    return torch.randn(*shape).to(dtype)


def cases():
    for dtype in (half, torch.float32):
        for shape in ((1, 5, 48), (1, 3, 2, 16)):
            x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=torch.float32)
            yield "rms_norm", (x, weight, 1e-6, half)
            inverse = references.rms_norm(x, weight, 1e-6, half)[1]
            yield "rms_norm_backward", (random(*shape), x, weight, inverse)
        cos, sin = random(1, 7, 12, dtype=torch.float32), random(1, 7, 12, dtype=torch.float32)
        for back in (False, True):
            yield "rotate", (random(1, 7, 3, 12, dtype=dtype).transpose(1, 2), cos, sin, half, back)
            yield "rotate", (random(1, 3, 7, 12, dtype=dtype), cos, sin, torch.float32, back)
    g, u, d = random(3, 700), random(3, 700), random(3, 700)
    yield "swiglu", (g, u)
    yield "swiglu_backward", (d, g, u)
    z, targets, stats = random(5, 5000), torch.randint(0, 6000, (5, 2)), torch.randn(3, 9)[:, 2:7]
    for entropy in (False, True):
        for state in (torch.tensor([[-torch.inf], [0], [0], [0]]).repeat(1, 5), torch.rand(4, 5)):
            yield "head_forward", (z, targets, state, torch.zeros(5, 2), 700 * entropy, entropy, entropy)
        more = (torch.randn(5), torch.randn(5)) if entropy else (None, None)
        yield "head_backward", (z.float() - 6, stats, targets, torch.randn(5, 2), *more, 700 * entropy)
    index = torch.tensor([4, 1, 2])
    yield "merge_attention", (random(6, 3, 8), torch.randn(3, 6), random(3, 3, 8), torch.randn(3, 3), index)


for name, arguments in cases():
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    if name in ("rotate", "head_backward"):  # strides are part of the case, and a clone has none
        at = 0 if name == "rotate" else 1
        copies[at] = arguments[at]
    launched.clear()
    ours, theirs = getattr(fused, name)(*arguments), getattr(references, name)(*copies)
    extra = name == "rms_norm_backward"  # torch's sum
    assert len(launched) + extra == references.LAUNCHES.get(f"verl.{name}.default", 1), name
    if ours is None:
        written = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor) and a.dtype != torch.int64]
        ours, theirs = (tuple(x[i] for i in written) for x in (arguments, copies))
    for a, b in zip(ours if isinstance(ours, tuple) else [ours], theirs if isinstance(theirs, tuple) else [theirs]):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride(), (name, a.stride(), b.stride())
        exact = a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-5 if exact else 2e-2, atol=1e-5 if exact else 1e-2, msg=lambda m: f"{name}: {m}")
print("equal")
"""


def test_kernels_compute_what_their_references_do() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parents[3],
        env=environment(TRITON_INTERPRET="1"),
        check=False,
    )
    assert run.stdout.strip() == "equal", run.stderr[-3000:]
