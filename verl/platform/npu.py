"""Ascend devices through torch_npu, which adds `torch.npu` when it is imported. Written from the vendor's
documentation; never run."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from verl.errors import UserError
from verl.platform.base import Platform


def _npu() -> Any:
    """The torch.npu module, or None where torch_npu is not installed."""
    if importlib.util.find_spec("torch_npu") is None:
        return None
    importlib.import_module("torch_npu")
    return torch.npu  # type: ignore[attr-defined]


class NpuPlatform(Platform):
    """torch's "npu" devices."""

    name = "npu"
    collectives = "hccl"
    ray_resource = "NPU"
    visible_devices = "ASCEND_RT_VISIBLE_DEVICES"
    has_memory_history = True

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

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.bfloat16, torch.float16, torch.float32)

    def device_name(self, index: int = 0) -> str:
        return str(_npu().get_device_name(index))

    def select(self, index: int) -> None:
        _npu().set_device(index)

    def synchronize(self) -> None:
        _npu().synchronize()

    def empty_cache(self) -> None:
        _npu().empty_cache()

    def reset_peak_memory(self) -> None:
        _npu().reset_peak_memory_stats()

    def own_tracer(self, options: dict[str, Any]) -> Any:
        return _NpuTrace(options)

    def record_memory(self, entries: int, depth: int) -> None:
        _npu().memory._record_memory_history(max_entries=entries)

    def write_memory(self, path: Path) -> None:
        _npu().memory._dump_snapshot(str(path))
        _npu().memory._record_memory_history(enabled=None)


class _NpuTrace:
    """torch_npu.profiler: operators, kernels and communication, a folder per profile."""

    def __init__(self, options: dict[str, Any]):
        self._npu: Any = importlib.import_module("torch_npu").profiler
        self._options = options
        self._profile: Any = None
        self._folder: Path | None = None

    def start(self) -> None:
        """Begin."""
        npu, contents = self._npu, self._options.get("contents") or ["npu", "cpu"]
        level = getattr(npu.ProfilerLevel, str(self._options.get("level", "level0")).title(), None)
        if level is None:
            raise UserError(
                f"profiler.tool_config.npu.level={self._options['level']} is not a level of torch_npu"
            )
        chosen = [npu.ProfilerActivity.NPU] + ([npu.ProfilerActivity.CPU] if "cpu" in contents else [])
        self._profile = npu.profile(
            activities=chosen,
            with_stack="stack" in contents,
            record_shapes="shapes" in contents,
            profile_memory="memory" in contents,
            experimental_config=npu._ExperimentalConfig(profiler_level=level),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def stop(self, base: Path) -> list[Path]:
        """End; a folder for MindStudio Insight."""
        self._folder = Path(f"{base}.npu")
        self._profile.stop()
        return [self._folder]

    def _write(self, profile: Any) -> None:
        analyse = bool(self._options.get("analysis", True))
        self._npu.tensorboard_trace_handler(str(self._folder), analyse_flag=analyse)(profile)

    def span(self, name: str) -> Any:
        """A range of that name in the trace."""
        return torch.profiler.record_function(name)
