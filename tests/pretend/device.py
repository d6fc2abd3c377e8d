"""The device's tensors, and what stands in for torch.cuda."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import weakref
from typing import Any

import torch

from tests import operator_references
from tests.pretend import counts, kernels, tensors
from verl.config import devices

aten = torch.ops.aten
CUDA, TOTAL = torch.device("cuda", 0), 80 << 30
# What waits for the device; what launches nothing.
_WAITS = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default}
_WAITS |= {aten._unique2.default, aten.unique_consecutive.default, aten.repeat_interleave.Tensor}
_NOTHING = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.detach", "aten._local_scalar_dense", "c10d")
_live: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
_state = types.SimpleNamespace(recording=None, peak=0)


class CudaTensor(tensors.DeviceTensor):
    """A tensor on cuda:0."""

    place = CUDA

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> Any:
        self = tensors.DeviceTensor.__new__(cls, host)
        _live.add(self.host)
        return self

    def tolist(self) -> Any:
        _wait("tolist")
        return super().tolist()

    @classmethod
    def attention_kernel(cls, args: Any) -> int:
        plain = len(args) < 4 or args[3] is None
        return int(plain and args[0].dtype in (torch.bfloat16, torch.float16) and args[0].shape[-1] <= 256)

    @classmethod
    def look(cls, func: Any, args: Any, kwargs: Any, on_host: list[torch.Tensor], to_host: bool) -> None:
        """Raise where a CUDA device would, and count the host's waits."""
        later = kwargs.get("non_blocking", len(args) > 2 and func is aten.copy_.default and args[2])
        if func in _WAITS or (to_host and not later):
            _wait(str(func) if func in _WAITS else "copy to the host")
        if func is aten.copy_.default and on_host:
            counts.COUNTS[-1].uploads += on_host[0] is not args[0]
            if not (later and on_host[0].is_pinned()):
                _wait(f"copy {'to' if on_host[0] is args[0] else 'from'} the host's memory")
        if func in tensors.MIXES and "index" in str(func):
            indices = [i for i in args[1] or () if isinstance(i, torch.Tensor)]
            if any(x.dim() for x in on_host) or any(i.dtype == torch.bool for i in indices):
                _wait("index on the host or of booleans")
        if func is aten.cumsum.default and torch.are_deterministic_algorithms_enabled() and args[0].is_floating_point():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")

    @classmethod
    def run(cls, func: Any, args: Any, kwargs: Any, called_with: list[torch.Tensor]) -> Any:
        name, is_view, launches = _facts(func)
        run = kernels.REFERENCES.get(func, func)
        result = run(*args, **kwargs)
        given = {id(x) for x in tensors.flat(args, *kwargs.values())}
        results = [] if is_view else [x for x in tensors.flat(result) if id(x) not in given]
        if launches:
            counts.COUNTS[-1].launches[name] += launches
            moved = [*called_with, *(results or called_with[:1])]
            counts.COUNTS[-1].bytes += sum(x.numel() * x.element_size() for x in moved)
        if _state.recording is not None and not is_view:
            _state.recording.append((run, args, kwargs, results))
        return result


def _wait(name: str) -> None:
    counts.wait(name)
    if _state.recording is not None:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({name})")


@functools.cache
def _facts(func: Any) -> tuple[str, bool, int]:
    """Name, whether its result is a view, kernels that it launches."""
    aliases = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
    name, is_view = str(func), bool(aliases) and not any(alias.is_write for alias in aliases)
    return name, is_view, 0 if name.startswith(_NOTHING) or is_view else 1 + (name == "verl.rms_norm_backward.default")


class Graph:
    """`torch.cuda.CUDAGraph`: what ran, with the memory that it read and wrote."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert _state.recording is None
        self.recorded = _state.recording = []
        counts.COUNTS[-1].captures += 1

    def capture_end(self) -> None:
        _state.recording = None

    def replay(self) -> None:
        counts.COUNTS[-1].replays += 1
        for run, args, kwargs, results in self.recorded:
            again = run(*args, **kwargs)
            for old, new in zip(results, tensors.flat(again), strict=True) if results else ():
                old.copy_(new)


class Stream(tensors.Stream):
    cuda_stream = 0
    device = CUDA  # type: ignore[assignment]

    def synchronize(self) -> None:
        _wait("stream")


class Event(tensors.Event):
    def synchronize(self) -> None:
        _wait("event")

    def elapsed_time(self, _: Any) -> float:
        return 1.0


def _taken(*_: Any) -> int:
    """Bytes of the storages that live."""
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in list(_live))}
    _state.peak = max(_state.peak, taken := sum(storages.values()))
    return taken


def _stand_ins() -> dict[str, Any]:
    """What torch.cuda has and the processor's build lacks, by name."""
    properties = {"name": "NVIDIA H100 80GB HBM3", "uuid": "pretend", "total_memory": TOTAL, "major": 9, "minor": 0}
    device = types.SimpleNamespace(**properties, multi_processor_count=132)
    generator = types.SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda _: None)
    default, current = Stream(), threading.local()
    nothing = ("_lazy_init", "set_device", "manual_seed", "manual_seed_all", "empty_cache", "ipc_collect")
    taken: Any = {"memory_reserved": _taken, "memory_allocated": _taken}
    for name in ("max_memory_allocated", "max_memory_reserved"):
        taken[name] = lambda *_: max(_taken(), _state.peak)
    return {name: lambda *_: None for name in nothing} | taken | {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "_is_in_bad_fork": lambda: False, "default_generators": [generator],
        "is_bf16_supported": lambda including_emulation=True: True, "synchronize": lambda *_: _wait("synchronize"),
        "get_device_properties": lambda *_: device, "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: device.name, "mem_get_info": lambda *_: (TOTAL - _taken(), TOTAL),
        "memory_stats": lambda *_: {}, "reset_peak_memory_stats": lambda *_: setattr(_state, "peak", 0),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16], "Stream": Stream, "Event": Event,
        "default_stream": lambda *_: default, "current_stream": lambda *_: getattr(current, "stream", default),
        "set_stream": lambda stream: setattr(current, "stream", stream), "CUDAGraph": Graph,
        "stream": lambda _: contextlib.nullcontext(), "device": lambda _: contextlib.nullcontext(),
        "graph_pool_handle": lambda: (0, 1), "is_current_stream_capturing": lambda: _state.recording is not None,
        "get_rng_state": lambda *_: torch.get_rng_state(), "set_rng_state": lambda *_: None,
    }  # fmt: skip


def install() -> None:
    """Give this process the device. Once, after `tests.pretend.load`."""
    from verl.platform import cuda, cuda_fused

    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
    library = install.library = tensors.install(CudaTensor, "CUDA")  # type: ignore[attr-defined]  # kernels live as long

    def arange(*ends: Any, dtype: Any = None, **_: Any) -> Any:  # torch's own begins with no elements
        start, end, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
        size = torch.empty_like(torch.arange(start, end, step, dtype=dtype))
        return aten.arange.start_out(start, end, step, out=CudaTensor(size))

    for name in ("arange", "arange.start", "arange.start_step"):
        library.impl(name, arange)
    for name, stand_in in _stand_ins().items():
        setattr(torch.cuda, name, stand_in)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool", "_cuda_clearCublasWorkspaces"):
        setattr(torch._C, name, lambda *_: setattr(_state, "recording", None))
    cuda.CudaPlatform.collectives = "gloo"
    cuda._fused_operators = lambda: cuda_fused.FUSED  # with or without Triton: their references run
    devices._nodes = lambda name: ["nvidia0"] if name == "nvidia" else []
    devices.torch_build = lambda: "cuda"  # type: ignore[assignment]
    operator_references.install()
