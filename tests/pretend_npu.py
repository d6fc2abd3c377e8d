"""A pretend Ascend device in pure Python: tensors that say "npu:0" and compute on the processor.

    python -m tests.pretend_npu verl.trainer.main_ppo trainer.device=npu …

torch takes one such device per process and keeps it until the process ends, so `install` belongs into a process of its
own. An operation that mixes device and host tensors raises, as does a float64 tensor on the device. `torch_npu` is
`tests.torch_npu_reference`; collectives called "hccl" go over gloo. It finds no kernel limits, asynchrony or speed.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests import torch_npu_reference
from verl.config import devices

MEMORY = 64 << 30
aten = torch.ops.aten
_MIXES = {aten.copy_.default, aten._to_copy.default, aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
_MIXES |= {aten._index_put_impl_.default, aten.set_.source_Tensor}


class NpuTensor(torch.Tensor):
    """A tensor on npu:0; `host` has the values."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> NpuTensor:
        if host.dtype in (torch.float64, torch.complex128):
            raise RuntimeError(f"{host.dtype} is not supported on npu")
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=torch.device("npu", 0),
        )
        self.host = host.detach()
        return self

    def __repr__(self) -> str:
        return f"npu({self.host})"

    def tolist(self) -> Any:
        return self.host.tolist()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert npu:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy: torch.Tensor = NpuTensor(self.host.clone()).requires_grad_(self.requires_grad)
        memo[id(self)] = copy = torch.nn.Parameter(copy, self.requires_grad) if is_parameter(self) else copy
        return copy

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def on_device(func: Any) -> bool:
    """Whether the platform has registered a kernel of its own."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func._schema.name, "PrivateUse1"))


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    wrapped = {id(x.host): x for x in tensors if isinstance(x, NpuTensor)}
    on_host = [x for x in tensors if not isinstance(x, NpuTensor)]
    collective = "c10d" in str(func)
    if wrapped and not collective and func not in _MIXES and any(x.dim() for x in on_host):
        shapes = [tuple(x.shape) for x in on_host]
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got npu:0 and cpu {shapes}")
    device = kwargs.get("device")
    kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    if func is aten._fused_sdp_choice.default:
        return 0
    if func is aten._grouped_mm.default and on_device(func):
        return func._op_dk(torch._C.DispatchKey.PrivateUse1, *args, **kwargs)
    host_args = tree_map(_host, args)
    if func is aten.histc.default:  # the processor counts no integers
        host_args = (host_args[0].float(), *host_args[1:])
    result = func(*host_args, **tree_map(_host, kwargs))
    if device is not None and torch.device(device).type == "cpu":
        return result
    if not wrapped and device is None:
        return result
    host_ids = {id(x) for x in on_host}

    def wrap(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or id(x) in host_ids:
            return x
        return wrapped[id(x)] if id(x) in wrapped else NpuTensor(x)

    return tree_map(wrap, result)


def _host(x: Any) -> Any:
    return x.host if isinstance(x, NpuTensor) else x


class Stream:
    def __init__(self, *_: Any, **__: Any): ...
    @property
    def device(self) -> torch.device:
        return torch.device("npu", 0)

    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    def __init__(self, *_: Any, **__: Any): ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class Backend:
    """`torch.npu`."""

    Stream, Event = Stream, Event
    _stream = Stream()
    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)
    set_device = synchronize = manual_seed = manual_seed_all = staticmethod(lambda *_: None)
    empty_cache = _lazy_init = staticmethod(lambda: None)
    mem_get_info = staticmethod(lambda index=0: (MEMORY, MEMORY))
    memory_reserved = memory_allocated = staticmethod(lambda index=0: 2 << 30)
    max_memory_reserved = max_memory_allocated = staticmethod(lambda index=0: 2 << 30)
    get_device_name = staticmethod(lambda index=0: "Ascend910B")
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: None)
    current_stream = default_stream = staticmethod(lambda device=None: Backend._stream)
    stream = device = staticmethod(lambda _: contextlib.nullcontext())


def installed() -> bool:
    return hasattr(install, "library")


def install() -> None:
    """Give this process the device. Once."""
    os.environ["VERL_TEST_DEVICE"] = "npu"
    _setup_privateuseone_for_python_backend("npu", backend_module=Backend)
    torch.autograd.set_multithreading_enabled(False)
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    install.library = library  # type: ignore[attr-defined]  # kernels live as long as it

    def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> NpuTensor:
        return NpuTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> NpuTensor:
        return NpuTensor(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        _host(target).copy_(_host(source))
        return target

    library.impl("_copy_from", copy_from)
    library.impl("_copy_from_and_resize", copy_from)
    library.impl("empty.memory_format", empty)
    library.impl("empty_strided", empty_strided)
    _autocast()
    sys.modules["torch_npu"] = torch_npu_reference
    devices._nodes = lambda name: ["davinci0"] if name == "davinci" else []
    torch.nn.Module._apply = apply_in_place  # type: ignore[method-assign]
    _join_over_gloo()


def _autocast() -> None:
    """Matrix products in autocast's data type, everything else as it comes."""
    every = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    every.fallback(torch.library.fallthrough_kernel)
    products = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    install.autocast = every, products  # type: ignore[attr-defined]
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def lower(x: Any) -> Any:
        floating = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.to(torch.get_autocast_dtype("npu")) if floating else x

    for name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm"):

        def product(*args: Any, _op: Any = getattr(aten, name), **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(key):
                return _op(*tree_map(lower, args), **kwargs)

        products.impl(name, product)


def apply_in_place(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """Module._apply: parameters keep their identity, as on a device whose tensors are of torch's own class."""
    for child in self.children():
        child._apply(fn)
    for parameter in [p for p in self._parameters.values() if p is not None]:
        with torch.no_grad():
            moved = fn(parameter.detach())
        if moved.device != parameter.device or moved.dtype != parameter.dtype:
            gradient, parameter.grad = parameter.grad, None
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(moved.detach(), parameter.requires_grad))
            parameter.grad = None if gradient is None else fn(gradient)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _join_over_gloo() -> None:
    """A collective on such tensors is one on the host's."""
    import torch.distributed as dist

    def hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    dist.Backend.register_backend("hccl", hccl, devices=["npu"])
    shard_without_storages(NpuTensor)


def shard_without_storages(kind: type[torch.Tensor]) -> None:
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

    for module in (_fsdp_init, _fully_shard, _fsdp_param, _fsdp_common):
        for name, stand_in in {
            "_move_states_to_device": move,
            "alloc_storage": lambda _: None,
            "free_storage": lambda _: None,
        }.items():
            if hasattr(module, name):
                setattr(module, name, stand_in)


def main() -> None:
    """Run the module that the first word names, as `python -m` does, in a process that has the device."""
    install()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
