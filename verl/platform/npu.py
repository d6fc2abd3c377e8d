"""Ascend devices through torch_npu, which adds `torch.npu` when it is imported."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from verl.platform.base import Platform
from verl.platform.peaks import half_precision_peak


def _npu() -> Any:
    """The torch.npu module, or None where torch_npu is not installed."""
    if importlib.util.find_spec("torch_npu") is None:
        return None
    importlib.import_module("torch_npu")
    return torch.npu  # type: ignore[attr-defined]


class NpuPlatform(Platform):
    name = "npu"
    collectives = "hccl"

    def count(self) -> int:
        npu = _npu()
        return int(npu.device_count()) if npu is not None and npu.is_available() else 0

    def memory(self, index: int = 0) -> tuple[int, int]:
        free, total = _npu().mem_get_info(index)
        return int(free), int(total)

    def room(self, index: int = 0) -> int:
        npu = _npu()
        return self.memory(index)[0] + int(npu.memory_reserved(index) - npu.memory_allocated(index))

    def peak_memory(self, index: int = 0) -> int:
        return int(_npu().max_memory_allocated(index))

    @property
    def default_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.bfloat16, torch.float16, torch.float32)

    def peak_flops(self, dtype: torch.dtype, index: int = 0) -> float | None:
        half = dtype in (torch.bfloat16, torch.float16)
        return half_precision_peak(str(_npu().get_device_name(index))) if half else None

    def describe(self) -> str:
        return f"{self.count()} × {_npu().get_device_name(0)}"

    def seed(self, seed: int) -> None:
        super().seed(seed)
        _npu().manual_seed_all(seed)

    def select(self, index: int) -> None:
        _npu().set_device(index)

    def synchronize(self) -> None:
        _npu().synchronize()

    def empty_cache(self) -> None:
        _npu().empty_cache()

    def reset_peak_memory(self) -> None:
        _npu().reset_peak_memory_stats()
