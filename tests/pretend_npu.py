"""A pretend Ascend device in pure Python: tensors that say "npu:0" and compute on the processor
(`tests.device_tensors`).

    python -m tests.pretend_npu verl.trainer.main_ppo trainer.device=npu …

A float64 tensor on the device raises. `torch_npu` is `tests.torch_npu_reference`; collectives called "hccl" go over
gloo. It finds no kernel limits, asynchrony or speed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests import device_tensors, torch_npu_reference
from verl.config import devices

aten = torch.ops.aten
_GROUPED = aten._grouped_mm.default


class NpuTensor(device_tensors.DeviceTensor):
    """A tensor on npu:0."""

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> Any:
        if host.dtype in (torch.float64, torch.complex128):
            raise RuntimeError(f"{host.dtype} is not supported on npu")
        return device_tensors.DeviceTensor.__new__(cls, host)

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The platform may have registered a kernel of its own.
        if func is _GROUPED and torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", "PrivateUse1"):
            return func._op_dk(torch._C.DispatchKey.PrivateUse1, *args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def run(cls, func: Any, args: Any, kwargs: Any, _: Any) -> Any:
        if func is aten.histc.default:  # the processor counts no integers
            args = (args[0].float(), *args[1:])
        return func(*args, **kwargs)


class Stream(device_tensors.Stream):
    @property
    def device(self) -> torch.device:
        return NpuTensor.place


class Backend(device_tensors.Backend):
    """`torch.npu`."""

    Stream, Event = Stream, device_tensors.Stream
    _stream = Stream()
    synchronize = staticmethod(lambda *_: None)
    get_device_name = staticmethod(lambda index=0: "Ascend910B")
    current_stream = default_stream = staticmethod(lambda device=None: Backend._stream)


def installed() -> bool:
    return hasattr(install, "libraries")


def install() -> None:
    """Give this process the device. Once."""
    _setup_privateuseone_for_python_backend("npu", backend_module=Backend)
    NpuTensor.place = torch.device("npu", 0)
    library = device_tensors.install(NpuTensor, "PrivateUse1")
    install.libraries = library, *_autocast()  # type: ignore[attr-defined]  # kernels live as long as they

    def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        device_tensors.host_of(target).copy_(device_tensors.host_of(source))
        return target

    def hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return torch.distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)

    library.impl("_copy_from", copy_from)
    library.impl("_copy_from_and_resize", copy_from)
    sys.modules["torch_npu"] = torch_npu_reference
    devices._nodes = lambda name: ["davinci0"] if name == "davinci" else []
    torch.distributed.Backend.register_backend("hccl", hccl, devices=["npu"])


def _autocast() -> tuple[torch.library.Library, torch.library.Library]:
    """Matrix products in autocast's data type, everything else as it comes."""
    every = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    every.fallback(torch.library.fallthrough_kernel)
    products = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def lower(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.get_autocast_dtype("npu")) if x.is_floating_point() else x

    for name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm"):

        def product(*args: Any, _op: Any = getattr(aten, name), **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(key):
                return _op(
                    *device_tensors.over(lower, args), **{k: device_tensors.over(lower, v) for k, v in kwargs.items()}
                )

        products.impl(name, product)
    return every, products


def main() -> None:
    """Run the module that the first word names, in a process that has the device."""
    install()
    device_tensors.run_module()


if __name__ == "__main__":
    main()
