"""What a device kind offers. The defaults are those of a device without anything special: the host's processor."""

from __future__ import annotations

import importlib
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.errors import UserError

if TYPE_CHECKING:
    import torch

    from verl.platform.cuda_graphs import GraphRecorder

# Each is a module of this package with its PLATFORM; in the order in which "auto" looks for them.
KINDS = ("cuda", "npu", "cpu")
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variable with the devices of a kind that a process may see. Read without torch, too."""

# Dense matrix-product rates in bfloat16 and float16 from data sheets, in TFLOP/s. The first pattern found in the
# device's name counts.
_HALF_PRECISION_PEAKS = (
    (r"GB200|GB300", 2500),
    (r"B200|B300", 2250),
    (r"B100", 1750),
    (r"H100 PCIe", 756),
    (r"H100 NVL", 835),
    (r"GH200|H[128]00", 989),
    (r"H20\b", 148),
    (r"A[18]00", 312),
    (r"A40\b", 149.7),
    (r"RTX A6000", 154.8),
    (r"A30\b", 165),
    (r"A10G?\b", 125),
    (r"L40S", 362),
    (r"L40\b", 181),
    (r"L20\b", 119.5),
    (r"L4\b", 121),
    (r"RTX 5090", 209.5),
    (r"RTX 4090", 165.2),
    (r"RTX 3090", 71),
    (r"MI355", 2516),
    (r"MI32[05]|MI30[08]", 1307),
    (r"MI250X", 383),
    (r"MI250\b", 362),
    (r"910B|Ascend910", 354),
)


def half_precision_peak(name: str) -> float | None:
    """FLOP/s of one device by the name that its driver gives, or None for one that is not listed."""
    return next((tera * 1e12 for pattern, tera in _HALF_PRECISION_PEAKS if re.search(pattern, name)), None)


class LayerOperators(NamedTuple):
    """Operators without gradients for what lies between the products of a decoder layer."""

    add: Callable[..., torch.Tensor]
    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    norm_rotate: Callable[..., None]


@dataclass(frozen=True, slots=True)
class FusedOperators:
    """Operators of a device, with gradients, and results of the type that products take or the inputs' wider one.

    rms_norm  (x [..., D], weight [D], eps, offset) → (offset + weight)·x/√(mean x² + eps)
    swiglu    (gate, up [..., D]) → silu(gate)·up
    rotate    (q and k [1, H, S, D], cos, sin [1, S, D]) → of both ·cos + (−second half, first half)·sin

    Where swiglu has no gradient swiglu_backward (gradient, gate, up) → (silu(gate)·up, gradients of gate and up) is
    there. merge_attention and the two functions of `head` see `verl.platform.cuda_kernels`, decode_attention, draw and
    the functions of `pack_attention` and `layer` `verl.platform.cpu_kernels`.
    """

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]
    swiglu: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    swiglu_backward: Callable[..., Any] | None = None
    merge_attention: Callable[..., Any] | None = None
    head: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    decode_attention: Callable[..., torch.Tensor] | None = None
    draw: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    pack_attention: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    layer: LayerOperators | None = None


class Platform(ABC):
    """One kind of device. `name` is torch's device type."""

    name: str = ""
    #: The device computes in the host's memory: nothing to offload, to pin or to copy, no memory of its own to report.
    on_host: bool = False
    #: Least and most tokens of a micro-batch worth asking for, and the bytes of activations aimed at between
    #: them. None: as many as the configuration allows.
    preferred_tokens: tuple[int, int] | None = None
    preferred_activations: int = 1 << 29
    #: torch's backend for collectives between devices of this kind.
    collectives: str = "gloo"
    #: Ray's resource for one device; "" where there is none.
    ray_resource: str = ""
    #: What torch.profiler calls work of the device: a name of torch.profiler.ProfilerActivity.
    profiler_activity: str = "CPU"
    #: Distributions beside torch that its support for the device comes in.
    packages: tuple[str, ...] = ()
    #: The vendor has a profiler of its own (`own_tracer`).
    has_own_tracer: bool = False
    #: torch has deterministic running sums of floats.
    deterministic_cumsum: bool = True
    #: Its tensors may be float64.
    has_float64: bool = True
    #: The allocator keeps a history for `record_memory`.
    has_memory_history: bool = False

    @property
    def visible_devices(self) -> str:
        """The variable with the devices that a process may see; "" where there is none."""
        return VISIBLE_DEVICES.get(self.name, "")

    @abstractmethod
    def count(self) -> int:
        """Devices of this kind that this process can use."""

    @abstractmethod
    def memory(self, index: int = 0) -> tuple[int, int]:
        """(free, total) bytes of a device, as its driver counts them."""

    def room(self, index: int = 0) -> int:
        """Bytes of a device that this process can still take: those free, and those that it has freed and kept."""
        return self.memory(index)[0]

    def allocated(self, index: int = 0) -> int:
        """Bytes of a device in tensors of this process; 0 where they are not counted."""
        return 0

    @abstractmethod
    def peak_memory(self, index: int = 0, *, reserved: bool = False) -> int:
        """Most bytes in use by this process since the start; `reserved`: with those kept for later use."""

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """True if products in this data type run at full speed."""

    @property
    def default_dtype(self) -> torch.dtype:
        """The data type in which matrix products run unless the user says otherwise."""
        import torch

        return torch.bfloat16 if self.supports(torch.bfloat16) else torch.float32

    def device_name(self, index: int = 0) -> str:
        """What the driver calls a device."""
        return self.name

    def peak_flops(self, dtype: torch.dtype, index: int = 0) -> float | None:
        """FLOP/s that a device can do at most in products of this data type, or None where that is not known."""
        return half_precision_peak(self.device_name(index)) if dtype.itemsize == 2 else None

    def device(self, index: int = 0) -> torch.device:
        """torch's name for a device."""
        import torch

        return torch.device(self.name, index)

    def describe(self) -> str:
        """One line for people: what the device is."""
        return f"{self.count()} × {self.device_name()}"

    def seed(self, seed: int) -> None:
        """Seed python, numpy, torch and, through torch, every device."""
        import numpy as np
        import torch

        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def prepare(self) -> None:  # noqa: B027
        """Set what makes this device fast without changing results beyond rounding. Again is harmless."""

    def be_deterministic(self) -> None:
        """Kernels that give the same bits every time, from now on; an operation that has none raises RuntimeError."""
        import torch

        torch.use_deterministic_algorithms(True)
        # Memory that is written before it is read needs no filling.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def select(self, index: int) -> None:  # noqa: B027
        """Make a device the current one of this process, before anything is placed on it."""

    def synchronize(self, device: torch.device | None = None) -> None:  # noqa: B027
        """Wait for the device; None: the current one, which each thread has of its own."""

    def empty_cache(self) -> None:  # noqa: B027
        """Release the unused memory that the allocator keeps."""

    # -- kernels

    def key_dtype(self, compute: torch.dtype) -> torch.dtype:
        """The data type of a sampler's cached keys where it computes in `compute`."""
        return compute

    def large_tensor(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor that is read many times, in large pages where that is faster."""
        import torch

        return torch.empty(*shape, dtype=dtype, device=device)

    def has_packed_products(self, dtype: torch.dtype) -> bool:
        """Whether products by prepacked weights of this data type exist (`pack_weight`, `packed_product`)."""
        return False

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """A matrix [out, in] as `packed_product` takes it. ValueError where `has_packed_products` says no."""
        raise ValueError(f"there are no packed products on {self.name}")

    def unpack_weight(self, packed: torch.Tensor) -> torch.Tensor:
        """The matrix [out, in] that `pack_weight` was given."""
        raise ValueError(f"there are no packed products on {self.name}")

    def packed_product(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in] by a packed weight: [..., out]."""
        raise ValueError(f"there are no packed products on {self.name}")

    def has_grouped_attention(self, dtype: torch.dtype, causal: bool) -> bool:
        """Whether torch attends with several query heads per key head without writing out keys or scores."""
        return True

    def has_widening_product(self) -> bool:
        """Whether torch's products write float32 from half-precision factors."""
        return False

    def flash_kernel(self, device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        """(forward, backward) of a variable-length flash attention kernel, None where there is none: see
        `verl.models.flash_attention`."""
        return None

    def fused_operators(self) -> FusedOperators | None:
        """The device's own operators for parts of a model, None where it has none (`verl.models.fused_layers`)."""
        return None

    def compiled_kernels(self) -> str:
        """Whether kernels that a run may leave out compute here, for people and checkpoints; "" where it has no
        choice."""
        return ""

    def compiled_operators(self) -> FusedOperators | None:
        """Such operators by torch.compile, where the device has none of its own and can be compiled for."""
        return None

    def has_triton(self) -> bool:
        """Whether Triton compiles kernels for the device."""
        return False

    def pinned(self, count: int) -> torch.Tensor:
        """int32 [count] of host memory that the device copies from and to while the host goes on."""
        import torch

        return torch.empty(count, dtype=torch.int32)

    def marker(self) -> Callable[[], None]:
        """What waits for all that the device has been asked for until now, and for no more."""
        return self.synchronize

    def graph_recorder(self) -> GraphRecorder | None:
        """A new recorder of device graphs (see `verl.platform.cuda_graphs.GraphRecorder`), None where there are
        none."""
        return None

    # -- device memory shared between processes of a host

    def memory_id(self, device: torch.device) -> str:
        """What the whole machine calls a device whose memory other processes may open; "" where they may not."""
        return ""

    def share_memory(self, buffer: torch.Tensor) -> dict[str, Any]:
        """Handle, as plain data, of a uint8 tensor for ONE other process; the tensor must outlive its use there."""
        raise ValueError(f"memory of {self.name} devices has no handles for other processes")

    def open_memory(self, handle: dict[str, Any]) -> torch.Tensor:
        """The uint8 tensor of a handle. ValueError if its device is not among those that this process can see."""
        raise ValueError(f"memory of {self.name} devices has no handles for other processes")

    # -- profilers

    def require_nsys(self) -> None:
        """UserError unless this process runs under nsys and the device is one that nsys can see."""
        where = f"this process works on {self.name}: set it to torch"
        raise UserError(f"global_profiler.tool=nsys records CUDA devices; {where}")

    def own_tracer(self, options: dict[str, Any]) -> Any:
        """The vendor's profiler. UserError where there is none."""
        where = f"this process works on {self.name}: set it to torch"
        raise UserError(f"global_profiler.tool=npu needs an Ascend device and torch_npu; {where}")

    def record_memory(self, entries: int, depth: int) -> None:  # noqa: B027
        """Begin the allocator's history: at most `entries` allocations, `depth` stack frames each."""

    def write_memory(self, path: Path) -> None:  # noqa: B027
        """Write the history and end it."""

    def capture(self, on: bool) -> None:  # noqa: B027
        """Begin or end what an outside profiler records."""

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """A named range for an outside profiler."""
        yield


class Accelerator(Platform):
    """Devices with memory of their own, through the module that torch has for them (`torch.cuda`, `torch.npu`)."""

    has_memory_history = True

    @property
    @abstractmethod
    def module(self) -> Any:
        """torch's module of these devices, None where it is not installed."""

    def count(self) -> int:
        module = self.module
        return int(module.device_count()) if module is not None and module.is_available() else 0

    def memory(self, index: int = 0) -> tuple[int, int]:
        sizes: tuple[int, int] = self.module.mem_get_info(index)
        return sizes

    def room(self, index: int = 0) -> int:
        # What graphs take outside of the allocator the driver counts as taken. Idle memory of their pool counts as free
        # though only graphs can take it: the working memory of one decode step, little beside the shares callers take.
        cached = self.module.memory_reserved(index) - self.module.memory_allocated(index)
        return self.memory(index)[0] + int(cached)

    def allocated(self, index: int = 0) -> int:
        return int(self.module.memory_allocated(index))

    def peak_memory(self, index: int = 0, *, reserved: bool = False) -> int:
        module = self.module
        return int((module.max_memory_reserved if reserved else module.max_memory_allocated)(index))

    def device_name(self, index: int = 0) -> str:
        return str(self.module.get_device_name(index))

    def select(self, index: int) -> None:
        self.module.set_device(index)

    def synchronize(self, device: torch.device | None = None) -> None:
        self.module.synchronize(device)

    def empty_cache(self) -> None:
        self.module.empty_cache()

    def record_memory(self, entries: int, depth: int) -> None:
        """See Platform. The depth of stacks is torch's own."""
        self.module.memory._record_memory_history(max_entries=entries)

    def write_memory(self, path: Path) -> None:
        self.module.memory._dump_snapshot(str(path))
        self.module.memory._record_memory_history(enabled=None)


def platform_of(device: torch.device | str) -> Platform:
    """The platform of a torch device, or of a device type by its name; the processor's for one that is not of KINDS."""
    return _platform(device if isinstance(device, str) else device.type)


@cache
def _platform(kind: str) -> Platform:
    platform: Platform = importlib.import_module(f"verl.platform.{kind if kind in KINDS else 'cpu'}").PLATFORM
    return platform
