"""The sampler's Triton kernels, and those of layers and of the head: interpreted here, and compiled to machine code of
a GPU (tests/gpu runs them on one).

Each in a process of its own: Triton reads when it is imported whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
HERE = Path(__file__)


def run(*arguments: str, **environment: str) -> None:
    variables = os.environ | {"PYTHONPATH": str(HERE.parents[4]), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


def test_kernels_give_what_torch_gives() -> None:
    files = (str(HERE.with_name("kernel_cases.py")), str(HERE.parents[3] / "gpu/test_kernels.py"))
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, TRITON_INTERPRET="1", VERL_TEST_DEVICE="cpu")


@pytest.mark.long
def test_kernels_compile_for_a_gpu() -> None:
    """To a cubin for compute capability 9.0, within the shared memory of smaller cards, 99 KiB a program."""
    run(str(HERE), TRITON_INTERPRET="0", TRITON_DEFAULT_FP_FUSION="1")


def compiled(kernel: Any, pointers: str, constants: dict[str, Any], warps: int = 4) -> None:
    """pointers: the element types of the kernel's first arguments; those after them are numbers."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names, types = kernel.arg_names, [f"*{kind}" for kind in pointers.split()]
    floats = ("scale", "softcap", "eps", "offset")
    signature = {name: "fp32" if name in floats else "i32" for name in names} | dict(zip(names, types, strict=False))
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 2})
    assert result.asm["cubin"] and result.metadata.shared <= 99 << 10, (kernel.__name__, result.metadata.shared)


if __name__ == "__main__":
    import torch
    import triton

    from verl.engine.rollout.native import paged_kernels, sampling_kernels
    from verl.platform import cuda_kernels

    heads = {"HEADS": 8, "D": 128, "DV": 128, "BD": 128, "BDV": 128, "COLS": 128}
    compiled(paged_kernels._inputs, "i32 i32 i32 i64 i64", {"COLS": 128})
    compiled(sampling_kernels._penalise, "fp32 i32 i32 fp32", {"COLS": 128})
    compiled(paged_kernels._store, "bf16 bf16 bf16 bf16 i32", heads | {"H": 8})
    for kind, prompts, per, width in (
        ("bf16", True, 20, 256),
        ("fp32", True, 16, 192),
        ("bf16", True, 2, 128),
        ("bf16", True, 8, 128),
        ("bf16", False, 5, 80),
        ("bf16", True, 8, 256),
        ("fp32", True, 8, 128),
    ):
        of_heads, itemsize = max(16, triton.next_power_of_2(width)), torch.bfloat16 if kind == "bf16" else torch.float32
        at_once = paged_kernels.queries_at_once(per, of_heads, itemsize)
        m = max(16, triton.next_power_of_2(at_once * (paged_kernels.TILE if prompts else 1)))
        n = paged_kernels.keys_at_once(128, (of_heads, of_heads), itemsize)
        sizes = {"D": width, "DV": width, "BD": of_heads, "BDV": of_heads, "M": m, "N": n, "SPLITS": 2, "PER": per}
        sizes["AT_ONCE"] = at_once
        kinds = {"PROMPTS": prompts, "WINDOW": width == 80, "SOFTCAP": width == 80}
        compiled(
            paged_kernels._partial, f"{kind} {kind} {kind} i32 fp32 fp32", heads | sizes | kinds, 8 if m > 64 else 4
        )
    merged = {"SINKS": True, "HEADS": 16, "DV": 128, "BDV": 128, "PARTS": 2}
    compiled(paged_kernels._merge, "fp32 fp32 i32 fp32 bf16", merged)
    compiled(sampling_kernels._threshold, "fp32 fp64 i32 i32", {"C": 1024})
    compiled(sampling_kernels._encode, "fp32 i32 i32 i32", {"C": 1024})
    compiled(sampling_kernels._chunk_sums, "fp32 i32 i32 fp32 fp32 i32", {"C": 1024})
    compiled(sampling_kernels._draw, "fp32 fp64 i32 i32 fp32 fp32 i32 i32", {"C": 1024, "N": 256})
    norm, block = {"ROWS": 16, "BLOCK": 128}, {"BLOCK": 1024}
    compiled(cuda_kernels._rms_norm, "bf16 fp32 bf16 fp32", norm)
    compiled(cuda_kernels._rms_norm_backward, "bf16 bf16 fp32 fp32 bf16 fp32", norm | {"ROWS": 1})
    compiled(cuda_kernels._rotate, "bf16 bf16 fp32 fp32 bf16 bf16", {"BACK": True, "H": 16, "KV": 8, "D": 64})
    compiled(cuda_kernels._swiglu, "bf16 bf16 bf16", block)
    compiled(cuda_kernels._swiglu_backward, "bf16 bf16 bf16 bf16 bf16 bf16", block)
    compiled(cuda_kernels._merge_attention, "bf16 fp32 bf16 fp32 i64", {"H": 16, "D": 128})
    kinds = {"ENTROPY": True, "SQUARES": True}
    compiled(cuda_kernels._head_forward, "bf16 i64 fp32 fp32", kinds | {"BLOCK": 4096})
    compiled(cuda_kernels._head_backward, "bf16 fp32 i64 fp32 fp32 fp32", kinds | block)
