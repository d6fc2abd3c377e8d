"""The device's tensors, what stands in for torch.cuda, and what is counted."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests import device_tensors, operator_references
from verl.config import devices

aten, HALF = torch.ops.aten, (torch.bfloat16, torch.float16)
# What waits for the device; what launches nothing.
_WAITS = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default}
_WAITS |= {aten._unique2.default, aten.unique_consecutive.default, aten.repeat_interleave.Tensor}
_NOTHING = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.detach", "aten._local_scalar_dense", "c10d")
_state = types.SimpleNamespace(recording=None, pinned=set())


@dataclass(slots=True)
class Counts:
    """launches and waits: by operation, of a wait also by the line of verl that waited. bytes: read and written by
    launches. uploads: copies from the host. replays: of graphs; what a replay runs is not counted again."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    uploads: int = 0
    replays: int = 0


_COUNTS = [Counts()]


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Counts of the block alone."""
    _COUNTS.append(counts := Counts())
    try:
        yield counts
    finally:
        _COUNTS.remove(counts)


def _wait(name: str) -> None:
    """The host waits for the device."""
    frame: Any = sys._getframe(1)
    while frame is not None and "/verl/" not in frame.f_code.co_filename:
        frame = frame.f_back
    place = "?" if frame is None else f"{frame.f_code.co_filename.rpartition('/verl/')[2]}:{frame.f_lineno}"
    _COUNTS[-1].waits[f"{name} at {place}"] += 1
    if _state.recording is not None:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({name})")


class CudaTensor(device_tensors.DeviceTensor):
    """A tensor on cuda:0."""

    place = torch.device("cuda", 0)

    @classmethod
    def attention_kernel(cls, args: Any) -> int:
        plain = len(args) < 4 or args[3] is None
        return int(plain and args[0].dtype in HALF and args[0].shape[-1] <= 256)

    @classmethod
    def look(cls, func: Any, args: Any, kwargs: Any, on_host: list[Tensor], to_host: bool) -> None:
        """Raise where a CUDA device would, and count the host's waits."""
        later = kwargs.get("non_blocking", len(args) > 2 and func is aten.copy_.default and args[2])
        if func in _WAITS or (to_host and not later):
            _wait(str(func) if func in _WAITS else "copy to the host")
        if func is aten.copy_.default and on_host:
            _COUNTS[-1].uploads += on_host[0] is not args[0]
            if not (later and on_host[0].untyped_storage().data_ptr() in _state.pinned):
                _wait(f"copy {'to' if on_host[0] is args[0] else 'from'} the host's memory")
        if func in device_tensors.MIXES and "index" in str(func):
            indices = [i for i in args[1] or () if isinstance(i, Tensor)]
            if any(x.dim() for x in on_host) or any(i.dtype == torch.bool for i in indices):
                _wait("index on the host or of booleans")
        if func is aten.cumsum.default and torch.are_deterministic_algorithms_enabled() and args[0].is_floating_point():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")

    @classmethod
    def run(cls, func: Any, args: Any, kwargs: Any, called_with: list[Tensor]) -> Any:
        name, is_view, launches = _facts(func)
        run = operator_references.OF_CUDA.get(func, func)
        result = run(*args, **kwargs)
        given = {id(x) for x in device_tensors.flat(args, *kwargs.values())}
        results = [] if is_view else [x for x in device_tensors.flat(result) if id(x) not in given]
        if launches:
            _COUNTS[-1].launches[name] += launches
            moved = [*called_with, *(results or called_with[:1])]
            _COUNTS[-1].bytes += sum(x.numel() * x.element_size() for x in moved)
        if _state.recording is not None and not is_view:
            _state.recording.append((run, args, kwargs, results))
        return result


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

    def capture_end(self) -> None:
        _state.recording = None

    def replay(self) -> None:
        _COUNTS[-1].replays += 1
        for run, args, kwargs, results in self.recorded:
            again = run(*args, **kwargs)
            for old, new in zip(results, device_tensors.flat(again), strict=True) if results else ():
                old.copy_(new)


class Stream(device_tensors.Stream):
    cuda_stream, device = 0, CudaTensor.place

    def synchronize(self) -> None:
        _wait("stream or event")


class Backend(device_tensors.Backend):
    """`torch.cuda`."""

    Stream = Event = Stream
    CUDAGraph = Graph
    _now = _default = Stream()
    _properties = types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", uuid="pretend", total_memory=80 << 30, multi_processor_count=132, major=9, minor=0
    )
    default_generators = (types.SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda _: None),)
    is_bf16_supported = staticmethod(lambda including_emulation=True: True)
    ipc_collect = staticmethod(lambda: None)
    synchronize = staticmethod(lambda device=None: _wait("synchronize"))
    get_device_properties = staticmethod(lambda device=None: Backend._properties)
    default_stream = staticmethod(lambda device=None: Backend._default)
    current_stream = staticmethod(lambda device=None: Backend._now)
    set_stream = staticmethod(lambda stream: setattr(Backend, "_now", stream))
    graph_pool_handle = staticmethod(lambda: (0, 1))
    is_current_stream_capturing = staticmethod(lambda: _state.recording is not None)


def install() -> None:
    """Give this process the device. Once, in a process that has loaded the hooks."""
    from verl.platform import cuda, cuda_fused

    torch._C._set_only_lift_cpu_tensors(True)
    install.library = device_tensors.install(CudaTensor, "CUDA")  # kernels live as long as it
    empty = torch.empty

    def empty_or_pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        _state.pinned |= {tensor.untyped_storage().data_ptr()} if pin_memory else set()
        return tensor

    torch.empty = empty_or_pinned
    for name in filter(lambda name: not name.startswith("__"), dir(Backend)):
        stand_in = getattr(Backend, name)  # each function another object, by which torch.compile knows it
        setattr(torch.cuda, name, functools.partial(stand_in) if isinstance(stand_in, types.FunctionType) else stand_in)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool", "_cuda_clearCublasWorkspaces"):
        setattr(torch._C, name, lambda *_: setattr(_state, "recording", None))
    cuda.CudaPlatform.collectives = "gloo"
    cuda._fused_operators = lambda: cuda_fused.FUSED  # with or without Triton: their references run
    devices._nodes = lambda name: ["nvidia0"] if name == "nvidia" else []
    devices.torch_build = lambda: "cuda"
    operator_references.install()
