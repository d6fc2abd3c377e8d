"""The host's processor as a training device."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Sequence
from functools import cache

import torch

from verl.platform import cpu_kernels, huge_pages
from verl.platform.device import FusedOperators, LayerOperators, Platform
from verl.platform.fused import fused_operators
from verl.platform.host_resources import processor, thread_limit

# Above this many rows per call oneDNN's choice of layout no longer depends on the hint.
_ROWS_HINT = 256
_FUSED = fused_operators(
    cpu_kernels,
    decode_attention=cpu_kernels.decode_attention,
    draw=cpu_kernels.draw,
    pack_attention=(cpu_kernels.pack_attention, cpu_kernels.pack_attention_backward),
    layer=LayerOperators(cpu_kernels.add, cpu_kernels.add_norm, cpu_kernels.norm_rotate),
)


class CpuPlatform(Platform):
    """Counts as one device however many cores it has."""

    name = "cpu"
    on_host = True
    # Measured on 26 M parameters: packs of 2048 tokens are as fast as larger ones, take a third less memory, and
    # their activations lie in buffers that the next pack uses again. Below 1024 the weights' own traffic counts.
    preferred_tokens = (1024, 4096)

    def count(self) -> int:
        return 1

    def device(self, index: int = 0) -> torch.device:
        return torch.device("cpu")

    def memory(self, index: int = 0) -> tuple[int, int]:
        import psutil

        state = psutil.virtual_memory()
        return int(state.available), int(state.total)

    def peak_memory(self, index: int = 0, *, reserved: bool = False) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def supports(self, dtype: torch.dtype) -> bool:
        """bfloat16 where the processor multiplies it (AVX512-BF16, AMX, Arm BF16) and oneDNN makes use of that."""
        if dtype == torch.bfloat16:
            return bool(processor()[1] & {"avx512_bf16", "amx_bf16", "bf16"}) and has_packed_products(dtype)
        return dtype == torch.float32

    def key_dtype(self, compute: torch.dtype) -> torch.dtype:
        """See Platform: torch's products round scores to the type of their factors, the kernels do not."""
        return torch.float32 if self.fused_operators() is None else compute

    def large_tensor(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See Platform."""
        return huge_pages.empty(shape, dtype)

    def has_packed_products(self, dtype: torch.dtype) -> bool:
        return has_packed_products(dtype)

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """See Platform: the compiled kernels' layout where they are faster, else oneDNN's. RuntimeError for a data type
        that it has no packed product of here."""
        if cpu_kernels.packs(weight):
            return cpu_kernels.pack_weight(weight)
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        return packed

    def packed_product(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not packed.is_mkldnn:
            return cpu_kernels.packed_product(x, packed, bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
        return out

    def unpack_weight(self, packed: torch.Tensor) -> torch.Tensor:
        """See Platform."""
        return packed.to_dense() if packed.is_mkldnn else cpu_kernels.unpack_weight(packed)

    def fused_operators(self) -> FusedOperators | None:
        """See Platform: compiled kernels (`verl.platform.cpu_kernels`), where there are."""
        return _FUSED if cpu_kernels.state().library is not None else None

    def compiled_kernels(self) -> str:
        """See Platform."""
        return cpu_kernels.state().text

    def bfloat16_products(self) -> str:
        """How bfloat16 products are computed on this processor, for people."""
        if self.supports(torch.bfloat16):
            return "in hardware, packed weights: several times faster than fp32"
        if has_packed_products(torch.bfloat16):
            return "emulated, packed weights: fp32 is the default"
        return "no packed products here: sampling in bf16 rounds to it and multiplies in fp32; fp32 is the default"

    def empty_cache(self) -> None:
        """The C library's heap, which `tune_allocator` lets grow, gives its free pages back, where it can (glibc)."""
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)

    def prepare(self) -> None:
        """No more threads than the container's quota; float32 products to oneDNN where that is exact."""
        limit = thread_limit()
        if limit is not None and limit < torch.get_num_threads():
            torch.set_num_threads(limit)
        onednn_float32()

    def describe(self) -> str:
        kind = "bfloat16 and float32" if self.supports(torch.bfloat16) else "float32"
        number = torch.get_num_threads()
        threads = f"{number} thread{'s' * (number != 1)}"
        return f"{os.cpu_count()} cores, {threads}, {kind} products, {self.compiled_kernels()}"


PLATFORM = CpuPlatform()


@cache
def has_packed_products(dtype: torch.dtype) -> bool:
    """True if oneDNN multiplies by prepacked weights of this data type here; found by trying a tiny product.

    In bfloat16 it needs AVX512 or AVX-NE-CONVERT, whether or not the processor has bfloat16 instructions. oneDNN's
    environment variable ONEDNN_MAX_CPU_ISA=AVX2 makes it behave as on a processor with AVX2 alone.
    """
    weight = torch.zeros(15, 16, dtype=dtype)  # of a shape that the compiled kernels leave to oneDNN
    try:
        PLATFORM.packed_product(torch.zeros(1, 16, dtype=dtype), PLATFORM.pack_weight(weight))
    except (AttributeError, RuntimeError):
        return False
    return True


@cache
def onednn_float32() -> bool:
    """Let oneDNN compute float32 matrix products in this process; True if it does.

    torch gives them to MKL, whose AVX2 code runs on AMD at less than half the speed of oneDNN's AVX-512 code
    (measured on Zen 5: 105 against 235 GFLOP/s). The only switch for it is named after bfloat16, because a
    processor with AMX may then round the factors; without AMX oneDNN has no such kernel and multiplies in
    float32. So: only without AMX, and only if a probe finds float32's accuracy; else the switch goes back.
    """
    has_amx = any(flag.startswith("amx") for flag in processor()[1])
    if "avx512_bf16" not in processor()[1] or has_amx or not has_packed_products(torch.bfloat16):
        return False
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    if _float32_error() < 1e-5:
        return True
    matmul.fp32_precision = before
    return False


def _float32_error() -> float:
    """Largest error of float32 products in a few shapes, relative to the mean size of the result. Rounding to
    bfloat16 would give about 1e-2, float32 gives about 1e-6."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for rows, inner, columns in ((64, 256, 128), (257, 96, 33), (1024, 512, 64)):
        a = torch.randn(rows, inner, generator=generator)
        b = torch.randn(columns, inner, generator=generator)
        exact = a.double() @ b.double().t()
        for product in (a @ b.t(), torch.bmm(a[None], b.t()[None])[0], torch.nn.functional.linear(a, b)):
            worst = max(worst, float((product.double() - exact).abs().max() / exact.abs().mean()))
    return worst
