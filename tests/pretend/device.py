"""The device's tensors, and what stands in for torch.cuda."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import types
import weakref
from typing import Any

import torch

from tests import operator_references, pretend_npu
from tests.pretend import counts, kernels
from verl.config import devices

aten = torch.ops.aten
CUDA, TOTAL = torch.device("cuda", 0), 80 << 30
# What takes tensors of both kinds; what waits for the device; what launches nothing.
_MIXES = {aten.copy_.default, aten._to_copy.default, aten.set_.source_Tensor, aten.index.Tensor}
_MIXES |= {aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
_WAITS = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default}
_WAITS |= {aten._unique2.default, aten.unique_consecutive.default, aten.repeat_interleave.Tensor}
_NOTHING = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.detach", "aten._local_scalar_dense", "c10d")
_live: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
_state = types.SimpleNamespace(recording=None, peak=0)


class CudaTensor(torch.Tensor):
    """A tensor on cuda:0; `host` has the values."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> CudaTensor:
        place = {"strides": host.stride(), "storage_offset": host.storage_offset(), "device": CUDA}
        self = torch.Tensor._make_wrapper_subclass(cls, host.shape, dtype=host.dtype, layout=host.layout, **place)
        self.host = host.detach()
        _live.add(self.host)
        return self

    def __repr__(self) -> str:
        return f"cuda({self.host})"

    def tolist(self) -> Any:
        _wait("tolist")
        return self.host.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy: torch.Tensor = CudaTensor(self.host.clone()).requires_grad_(self.requires_grad)
        is_parameter = isinstance(self, torch.nn.Parameter)
        memo[id(self)] = copy = torch.nn.Parameter(copy, self.requires_grad) if is_parameter else copy
        return copy

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _wait(name: str) -> None:
    counts.wait(name)
    if _state.recording is not None:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({name})")


def _map(function: Any, x: Any) -> Any:
    """Of the tensors in arguments or results; several times as fast as torch's tree_map."""
    if isinstance(x, torch.Tensor):
        return function(x)
    return type(x)(_map(function, y) for y in x) if type(x) in (list, tuple) else x


def _host(x: torch.Tensor) -> torch.Tensor:
    return x.host if isinstance(x, CudaTensor) else x


def _flat(*values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map(found.append, list(values))
    return found


@functools.cache
def _facts(func: Any) -> tuple[str, bool, bool, int]:
    """Name, whether its result is a view, whether it writes to an argument, kernels that it launches."""
    aliases = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
    writes, name = any(alias.is_write for alias in aliases), str(func)
    nothing = name.startswith(_NOTHING) or bool(aliases and not writes)
    return name, bool(aliases and not writes), writes, 0 if nothing else 1 + (name == "verl.rms_norm_backward.default")


def _check(func: Any, args: Any, kwargs: Any, on_host: list[torch.Tensor], to_host: bool) -> None:
    """Raise where a CUDA device would, and count the host's waits."""
    shapes = [tuple(x.shape) for x in on_host if x.dim()]
    if shapes and func not in _MIXES:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got cuda:0 and cpu {shapes}")
    later = kwargs.get("non_blocking", len(args) > 2 and func is aten.copy_.default and args[2])
    if func in _WAITS or (to_host and not later):
        _wait(str(func) if func in _WAITS else "copy to the host")
    if func is aten.copy_.default and on_host:
        counts.COUNTS[-1].uploads += on_host[0] is not args[0]
        if not (later and on_host[0].is_pinned()):
            _wait(f"copy {'to' if on_host[0] is args[0] else 'from'} the host's memory")
    if func in _MIXES and "index" in str(func):
        indices = [i for i in args[1] or () if isinstance(i, torch.Tensor)]
        if shapes or any(i.dtype == torch.bool for i in indices):
            _wait("index on the host" if shapes else "index of booleans")
    if func is aten.cumsum.default and torch.are_deterministic_algorithms_enabled() and args[0].is_floating_point():
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is aten._fused_sdp_choice.default:  # 1: flash; 0: scores written out
        plain = len(args) < 4 or args[3] is None
        return int(plain and args[0].dtype in (torch.bfloat16, torch.float16) and args[0].shape[-1] <= 256)
    tensors = _flat(args, *kwargs.values())
    wrapped = {id(x.host): x for x in tensors if isinstance(x, CudaTensor)}
    on_host = [x for x in tensors if not isinstance(x, CudaTensor)]
    device = kwargs.get("device")
    to_host = device is not None and torch.device(device).type == "cpu"
    name, is_view, writes, launches = _facts(func)
    if wrapped and not name.startswith("c10d"):
        _check(func, args, kwargs, on_host, to_host)
    moved = {key: _map(_host, value) for key, value in kwargs.items() if key != "pin_memory"}
    moved |= {} if device is None else {"device": torch.device("cpu")}
    run, host_args = kernels.REFERENCES.get(func, func), _map(_host, args)
    result = run(*host_args, **moved)
    results = [] if writes or is_view else _flat(result)
    if launches:
        counts.COUNTS[-1].launches[name] += launches
        counts.COUNTS[-1].bytes += sum(x.numel() * x.element_size() for x in [*tensors, *(results or tensors[:1])])
    if _state.recording is not None and not is_view:
        _state.recording.append((run, host_args, moved, results))
    if to_host or not (wrapped or device is not None) or func is aten._local_scalar_dense.default:
        return result
    known = {id(x): x for x in on_host} | wrapped
    return _map(lambda x: known[id(x)] if id(x) in known else CudaTensor(x), result)


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
            for old, new in zip(results, _flat(again), strict=True) if results else ():
                old.copy_(new)


class Stream(pretend_npu.Stream):
    cuda_stream = 0
    device = CUDA  # type: ignore[assignment]

    def synchronize(self) -> None:
        _wait("stream")


class Event(pretend_npu.Event):
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

    os.environ["VERL_TEST_DEVICE"] = "cuda"
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
    torch.autograd.set_multithreading_enabled(False)
    library = torch.library.Library("aten", "IMPL", "CUDA")
    install.library = library  # type: ignore[attr-defined]  # kernels live as long as it

    def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> CudaTensor:
        return CudaTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> CudaTensor:
        return CudaTensor(torch.empty_strided(size, stride, dtype=dtype))

    def arange(*ends: Any, dtype: Any = None, **_: Any) -> Any:  # torch's own begins with no elements
        start, end, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
        size = torch.empty_like(torch.arange(start, end, step, dtype=dtype))
        return aten.arange.start_out(start, end, step, out=CudaTensor(size))

    for name in ("arange", "arange.start", "arange.start_step"):
        library.impl(name, arange)
    library.impl("empty.memory_format", empty)
    library.impl("empty_strided", empty_strided)
    for name, stand_in in _stand_ins().items():
        setattr(torch.cuda, name, stand_in)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool", "_cuda_clearCublasWorkspaces"):
        setattr(torch._C, name, lambda *_: setattr(_state, "recording", None))
    torch.nn.Module._apply = pretend_npu.apply_in_place  # type: ignore[method-assign]
    cuda.CudaPlatform.collectives = "gloo"
    cuda._fused_operators = lambda: cuda_fused.FUSED  # with or without Triton: their references run
    pretend_npu.shard_without_storages(CudaTensor)
    devices._nodes = lambda name: ["nvidia0"] if name == "nvidia" else []
    devices.torch_build = lambda: "cuda"  # type: ignore[assignment]
    operator_references.install()
