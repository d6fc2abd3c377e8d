"""The tools behind `global_profiler.tool`. Those of accelerators are written from the vendors' documentation and have
not run; `torch` and `torch_memory` run on every device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from verl.errors import UserError
from verl.platform import Platform


def build(tool: str, platform: Platform, options: dict[str, Any]) -> Any:
    """The tool of that name for a device. UserError for one that cannot work here."""
    if tool == "torch":
        return TorchTrace(platform, options)
    if tool == "torch_memory":
        if platform.has_memory_history:
            return DeviceMemory(platform, options)
        # A processor's allocator has no history.
        return TorchTrace(platform, {"contents": ["cpu", "memory", "shapes"]})
    if tool == "nsys":
        platform.require_nsys()
        return Captured(platform)
    if tool == "npu":
        return platform.own_tracer(options)
    raise UserError(f"global_profiler.tool={tool} is not known: torch, torch_memory, nsys or npu")


class TorchTrace:
    """torch.profiler: operators, shapes, stacks and device kernels as a Chrome trace (open it in ui.perfetto.dev).

    `contents`: what is recorded, of cpu, cuda, npu, memory, shapes, stack. Without it: processor and device. With
    memory only the thread that begins the profile is recorded, without it all threads are.
    """

    def __init__(self, platform: Platform, options: dict[str, Any]):
        names = {"cpu": "CPU", platform.name: platform.profiler_activity}
        contents = options.get("contents") or list(names)
        chosen = {names[name] for name in contents if name in names} or {"CPU"}
        self._activities = [getattr(torch.profiler.ProfilerActivity, name) for name in sorted(chosen)]
        flags = {"profile_memory": "memory", "record_shapes": "shapes", "with_stack": "stack"}
        self._flags: dict[str, Any] = {flag: name in contents for flag, name in flags.items()}
        self._profile: Any = None

    def start(self) -> None:
        """Begin."""
        # A sampler's event loop, a thread that copies weights: the work of a step is not all in one thread. torch
        # records allocations of the starting thread only, and none when it records all threads.
        whose = torch._C._profiler._ExperimentalConfig(profile_all_threads=not self._flags["profile_memory"])
        kinds: dict[str, Any] = {"activities": self._activities, "experimental_config": whose}
        self._profile = torch.profiler.profile(acc_events=True, **kinds, **self._flags)
        self._profile.start()

    def stop(self, base: Path) -> list[Path]:
        """End; a gzipped Chrome trace, and a table of the most expensive operators."""
        self._profile.stop()
        trace, table = Path(f"{base}.json.gz"), Path(f"{base}.txt")
        self._profile.export_chrome_trace(str(trace))
        averages = self._profile.key_averages()
        table.write_text(averages.table(sort_by="self_cpu_time_total", row_limit=40) + "\n", encoding="utf-8")
        self._profile = None
        return [trace, table]

    def span(self, name: str) -> AbstractContextManager[Any]:
        """A range of that name in the trace."""
        return torch.profiler.record_function(name)


class DeviceMemory:
    """The device allocator's history: a snapshot for pytorch.org/memory_viz (written by torch, in torch's format)."""

    def __init__(self, device: Platform, options: dict[str, Any]):
        self._device = device
        self._entries = int(options.get("trace_alloc_max_entries", 100_000))
        self._depth = int(options.get("stack_depth", 32))

    def start(self) -> None:
        """Begin to record allocations."""
        self._device.record_memory(self._entries, self._depth)

    def stop(self, base: Path) -> list[Path]:
        """Write the snapshot and record no more."""
        path = Path(f"{base}.pickle")
        self._device.write_memory(path)
        return [path]

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Nothing: the history has stacks."""
        return nullcontext()


class Captured:
    """A stretch that a profiler outside the process records: nsys with `--capture-range=cudaProfilerApi`."""

    def __init__(self, device: Platform):
        self._device = device

    def start(self) -> None:
        """Tell nsys to begin."""
        self._device.capture(True)

    def stop(self, base: Path) -> list[Path]:
        """Tell nsys to end. The report lies where `nsys profile -o` says."""
        self._device.capture(False)
        return []

    def span(self, name: str) -> AbstractContextManager[Any]:
        """An NVTX range."""
        return self._device.range(name)
