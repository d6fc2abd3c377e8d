"""NVIDIA and AMD devices through torch.cuda."""

from __future__ import annotations

import os

import torch

from verl.platform.base import Platform
from verl.platform.peaks import half_precision_peak


class CudaPlatform(Platform):
    name = "cuda"
    collectives = "nccl"

    def count(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def memory(self, index: int = 0) -> tuple[int, int]:
        return torch.cuda.mem_get_info(index)

    def room(self, index: int = 0) -> int:
        return self.memory(index)[0] + torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)

    def peak_memory(self, index: int = 0) -> int:
        return torch.cuda.max_memory_allocated(index)

    @property
    def default_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.supports(torch.bfloat16) else torch.float32

    def supports(self, dtype: torch.dtype) -> bool:
        if dtype == torch.bfloat16:
            return torch.cuda.is_bf16_supported(including_emulation=False)
        return dtype in (torch.float32, torch.float16)

    def peak_flops(self, dtype: torch.dtype, index: int = 0) -> float | None:
        half = dtype in (torch.bfloat16, torch.float16)
        return half_precision_peak(torch.cuda.get_device_name(index)) if half else None

    def describe(self) -> str:
        return f"{self.count()} × {torch.cuda.get_device_name(0)}"

    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch.cuda.manual_seed_all(seed)

    def be_deterministic(self) -> None:
        # cuBLAS looks at it when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        super().be_deterministic()

    def select(self, index: int) -> None:
        torch.cuda.set_device(index)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()
