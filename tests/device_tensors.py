"""What the pretend devices share: tensors that say they are on a device and compute on the processor.

An operation that mixes device and host tensors raises. torch takes one such device per process and keeps it.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, ClassVar

import torch

aten = torch.ops.aten
# What takes tensors of both kinds.
MIXES = {aten.copy_.default, aten._to_copy.default, aten.set_.source_Tensor, aten.index.Tensor}
MIXES |= {aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
_LIVE: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
_MEMORY = 80 << 30


class DeviceTensor(torch.Tensor):
    """A tensor on `place`; `host` has the values."""

    place: ClassVar[torch.device]
    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> Any:
        where = {"strides": host.stride(), "storage_offset": host.storage_offset(), "device": cls.place}
        self = torch.Tensor._make_wrapper_subclass(cls, host.shape, dtype=host.dtype, layout=host.layout, **where)
        self.host = host.detach()
        _LIVE.add(self.host)
        return self

    def __repr__(self) -> str:
        return f"{self.place.type}({self.host})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.place} device type tensor to numpy. Use Tensor.cpu() first")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy: torch.Tensor = type(self)(self.host.clone()).requires_grad_(self.requires_grad)
        memo[id(self)] = copy = torch.nn.Parameter(copy, self.requires_grad) if is_parameter(self) else copy
        return copy

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._fused_sdp_choice.default:
            return cls.attention_kernel(args)
        tensors = flat(args, *kwargs.values())
        wrapped = {id(x.host): x for x in tensors if isinstance(x, DeviceTensor)}
        on_host = [x for x in tensors if not isinstance(x, DeviceTensor)]
        device = kwargs.get("device")
        to_host = device is not None and torch.device(device).type == "cpu"
        if wrapped and "c10d" not in str(func):
            shapes = [tuple(x.shape) for x in on_host if x.dim()]
            if shapes and func not in MIXES:
                both = f"{cls.place} and cpu {shapes}"
                raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {both}")
            cls.look(func, args, kwargs, on_host, to_host)
        moved = {key: over(host_of, value) for key, value in kwargs.items() if key != "pin_memory"}
        moved |= {} if device is None else {"device": torch.device("cpu")}
        result = cls.run(func, over(host_of, args), moved, tensors)
        if to_host or not (wrapped or device is not None) or func is aten._local_scalar_dense.default:
            return result
        known = {id(x): x for x in on_host} | wrapped
        return over(lambda x: known[id(x)] if id(x) in known else cls(x), result)

    @classmethod
    def attention_kernel(cls, args: Any) -> int:
        """torch's choice for scaled_dot_product_attention: 1 flash, 0 scores written out."""
        return 0

    @classmethod
    def look(cls, func: Any, args: Any, kwargs: Any, on_host: list[torch.Tensor], to_host: bool) -> None:
        """Before a call with tensors of the device."""

    @classmethod
    def run(cls, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """A call on the host's tensors; `tensors`: those that it was called with."""
        return func(*args, **kwargs)


def is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def over(function: Any, x: Any) -> Any:
    """Of the tensors in arguments or results; several times as fast as torch's tree_map."""
    if type(x) is list or type(x) is tuple:
        return type(x)([over(function, y) for y in x])
    return function(x) if isinstance(x, torch.Tensor) else x


def host_of(x: torch.Tensor) -> torch.Tensor:
    return x.host if isinstance(x, DeviceTensor) else x


def flat(*values: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    over(tensors.append, list(values))
    return tensors


class Stream:
    """A stream, or an event, whose work is done when it is asked for."""

    def __init__(self, *_: Any, **__: Any): ...
    def _nothing(self, *_: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = __exit__ = _nothing

    def __enter__(self) -> Any:
        return self

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()


def taken() -> int:
    """Bytes of the storages of tensors on the device."""
    storages = (tensor.untyped_storage() for tensor in list(_LIVE))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Backend:
    """What `torch.cuda` or `torch.npu` says of one device."""

    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)
    _lazy_init = set_device = manual_seed = manual_seed_all = staticmethod(lambda *_: None)
    empty_cache = reset_peak_memory_stats = staticmethod(lambda *_: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: None)
    mem_get_info = staticmethod(lambda device=None: (_MEMORY - taken(), _MEMORY))
    memory_reserved = memory_allocated = staticmethod(lambda device=None: taken())
    max_memory_reserved = max_memory_allocated = staticmethod(lambda device=None: taken())
    stream = device = staticmethod(lambda _: contextlib.nullcontext())


def install(kind: type[DeviceTensor], key: str) -> torch.library.Library:
    """Give this process the device, whose dispatch key is `key`. The library must be kept."""
    os.environ |= {"VERL_TEST_DEVICE": kind.place.type, "VERL_TEST_SHORTER": "3"}
    torch.autograd.set_multithreading_enabled(False)
    # Parameters keep their identity when a module moves, as on a device whose tensors are of torch's own class.
    torch.__future__.set_swap_module_params_on_conversion(True)
    library = torch.library.Library("aten", "IMPL", key)

    def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> DeviceTensor:
        return kind(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> DeviceTensor:
        return kind(torch.empty_strided(size, stride, dtype=dtype))

    # torch's own begins without elements and is resized, which a tensor of this class does not see.
    def arange(*bounds: Any, dtype: Any = None, **_: Any) -> DeviceTensor:
        made: DeviceTensor = kind(torch.empty_like(torch.arange(*bounds, dtype=dtype)))
        return torch.arange(*bounds, out=made)  # type: ignore[return-value]

    for name in ("arange", "arange.start", "arange.start_step"):
        library.impl(name, arange)
    library.impl("empty.memory_format", empty)
    library.impl("empty_strided", empty_strided)
    _shard_without_storages(kind)
    return library


def _shard_without_storages(kind: type[DeviceTensor]) -> None:
    """FSDP2 with tensors of a class whose sharded weights have no storages to free."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init, _fsdp_param, _fully_shard
    from torch.distributed.tensor import DTensor

    def move(parameters: Any, buffers: Any, device: torch.device) -> None:
        for tensor in [*parameters, *buffers]:
            if tensor.device == device or tensor.device.type == "meta" or isinstance(tensor, DTensor):
                continue
            moved: torch.Tensor = kind(tensor.detach())
            moved = torch.nn.Parameter(moved, tensor.requires_grad) if is_parameter(tensor) else moved
            torch.utils.swap_tensors(tensor, moved)

    stand_ins = {"_move_states_to_device": move, "alloc_storage": lambda _: None, "free_storage": lambda _: None}
    for module in (_fsdp_init, _fully_shard, _fsdp_param, _fsdp_common):
        for name in filter(module.__dict__.__contains__, stand_ins):
            setattr(module, name, stand_ins[name])


def run_module() -> None:
    """Run the module that the first word names, as `python -m` does."""
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def run_tests(module: str, *words: str) -> None:
    """Run pytest with these words in a process of its own, which has the device of this module."""
    from tests.runs import environment

    command = [sys.executable, "-m", module, "pytest", "-p", "no:cacheprovider", *words]
    options: Any = {
        "cwd": Path(__file__).parents[1],
        "env": environment(),
        "timeout": 580,
    }  # a processor without bfloat16 emulates it
    run = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-6000:] + run.stderr[-1000:]
