"""The host's processor as a training device."""

from __future__ import annotations

import os
import resource
import sys
from functools import cache

import torch

from verl.platform.base import Platform


@cache
def _flags() -> frozenset[str]:
    """Feature names of the first processor; empty where the system does not list them."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        return frozenset()
    return frozenset()


class CpuPlatform(Platform):
    """Counts as one device however many cores it has."""

    name = "cpu"
    # Measured on 26 M parameters: packs of 4096 tokens are as fast as larger ones and keep the activations in
    # buffers that are used again for the next pack.
    preferred_tokens = 4096

    def count(self) -> int:
        return 1

    def device(self, index: int = 0) -> torch.device:
        return torch.device("cpu")

    def memory(self, index: int = 0) -> tuple[int, int]:
        import psutil

        state = psutil.virtual_memory()
        return int(state.available), int(state.total)

    def peak_memory(self, index: int = 0) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    @property
    def default_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.supports(torch.bfloat16) else torch.float32

    def supports(self, dtype: torch.dtype) -> bool:
        """bfloat16 where the processor multiplies it (AVX512-BF16, AMX, Arm BF16)."""
        if dtype == torch.bfloat16:
            return bool(_flags() & {"avx512_bf16", "amx_bf16", "bf16"})
        return dtype == torch.float32

    def describe(self) -> str:
        kind = "bfloat16 and float32" if self.supports(torch.bfloat16) else "float32"
        return f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {kind} products"
