"""Ascend devices through torch_npu, which adds `torch.npu` when it is imported. Written from the vendor's
documentation; never run."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from verl.errors import UserError
from verl.platform.device import Accelerator


class NpuPlatform(Accelerator):
    """torch's "npu" devices."""

    name = "npu"
    collectives = "hccl"
    ray_resource = "NPU"
    profiler_activity = "PrivateUse1"
    has_own_tracer = True
    packages = ("torch_npu",)

    @property
    def module(self) -> Any:
        if importlib.util.find_spec("torch_npu") is None:
            return None
        importlib.import_module("torch_npu")
        return torch.npu  # type: ignore[attr-defined]

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.bfloat16, torch.float16, torch.float32)

    def own_tracer(self, options: dict[str, Any]) -> Any:
        return _NpuTrace(options)


PLATFORM = NpuPlatform()


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
            key = f"profiler.tool_config.npu.level={self._options['level']}"
            raise UserError(f"{key} is not a level of torch_npu")
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
