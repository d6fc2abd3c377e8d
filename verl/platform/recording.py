"""What devices offer to profilers. The calls of CUDA and of NPU are from the vendors' documentation and never ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from verl.errors import UserError

_NSYS = (
    "global_profiler.tool=nsys: this process does not run under nsys. Start the command as `nsys profile -t cuda,nvtx,cublas "
    "--capture-range=cudaProfilerApi --capture-range-end=repeat -o REPORT python -m …`, or set global_profiler.tool=torch"
)


class DeviceRecording:
    """A device without anything of its own for profilers: a processor."""

    has_memory = False

    def __init__(self, name: str):
        self.name = name

    def require_nsys(self) -> None:
        """UserError unless this process runs under nsys and the device is one that nsys can see."""
        raise UserError(
            f"global_profiler.tool=nsys records CUDA devices; this process works on {self.name}: set it to torch"
        )

    def own_tracer(self, options: dict[str, Any]) -> Any:
        """The vendor's profiler. UserError where there is none."""
        raise UserError(
            f"global_profiler.tool=npu needs an Ascend device and torch_npu; this process works on {self.name}: set it to torch"
        )

    def record_memory(self, entries: int, depth: int) -> None:
        """Begin the allocator's history: at most `entries` allocations, `depth` stack frames each."""

    def write_memory(self, path: Path) -> None:
        """Write the history and end it."""

    def capture(self, on: bool) -> None:
        """Begin or end what an outside profiler records."""

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """A named range for an outside profiler."""
        yield


class CudaRecording(DeviceRecording):
    """torch.cuda's memory history, the CUDA profiler's switch, NVTX."""

    has_memory = True

    def require_nsys(self) -> None:
        """See DeviceRecording."""
        import psutil

        if not any("nsys" in parent.name() for parent in psutil.Process().parents()):
            raise UserError(_NSYS)

    def record_memory(self, entries: int, depth: int) -> None:
        """See DeviceRecording. The depth of stacks is torch's own."""
        torch.cuda.memory._record_memory_history(max_entries=entries, stacks="all" if depth else "python")

    def write_memory(self, path: Path) -> None:
        """See DeviceRecording."""
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)

    def capture(self, on: bool) -> None:
        """See DeviceRecording."""
        torch.cuda.synchronize()
        runtime = torch.cuda.cudart()
        code = runtime.cudaProfilerStart() if on else runtime.cudaProfilerStop()
        torch.cuda.check_error(code)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """See DeviceRecording."""
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


class NpuRecording(DeviceRecording):
    """torch_npu's profiler and its allocator's history."""

    has_memory = True

    def own_tracer(self, options: dict[str, Any]) -> Any:
        """See DeviceRecording."""
        return _NpuTrace(options)

    def record_memory(self, entries: int, depth: int) -> None:
        """See DeviceRecording."""
        torch.npu.memory._record_memory_history(max_entries=entries)  # type: ignore[attr-defined]

    def write_memory(self, path: Path) -> None:
        """See DeviceRecording."""
        torch.npu.memory._dump_snapshot(str(path))  # type: ignore[attr-defined]
        torch.npu.memory._record_memory_history(enabled=None)  # type: ignore[attr-defined]


class _NpuTrace:
    """torch_npu.profiler: operators, kernels and communication, a folder per profile."""

    def __init__(self, options: dict[str, Any]):
        import importlib

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


def recording(device: str) -> DeviceRecording:
    """What the device of that type offers."""
    kinds = {"cuda": CudaRecording, "npu": NpuRecording}
    return kinds.get(device, DeviceRecording)(device)
