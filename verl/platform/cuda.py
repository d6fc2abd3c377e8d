"""NVIDIA and AMD devices through torch.cuda: memory, attention, handles between processes, profilers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from verl.errors import UserError
from verl.platform.cuda_graphs import GraphRecorder
from verl.platform.device import Accelerator, FusedOperators

_FLASH_CAPABILITY = (8, 0)
# Of the arguments of torch's rebuild_cuda_tensor: the storage's handle, sizes and counters, after the device's index.
_STORAGE_AT = 7
_NSYS = (
    "global_profiler.tool=nsys: this process does not run under nsys. Start the command as `nsys profile "
    "-t cuda,nvtx,cublas --capture-range=cudaProfilerApi --capture-range-end=repeat -o REPORT python -m …`, "
    "or set global_profiler.tool=torch"
)


class CudaPlatform(Accelerator):
    """torch's "cuda" devices; AMD's builds of torch use the same name."""

    name = "cuda"
    collectives = "nccl"
    ray_resource = "GPU"
    profiler_activity = "CUDA"
    deterministic_cumsum = False

    @property
    def module(self) -> Any:
        return torch.cuda

    def supports(self, dtype: torch.dtype) -> bool:
        if dtype == torch.bfloat16:
            return torch.cuda.is_bf16_supported(including_emulation=False)
        return dtype in (torch.float32, torch.float16)

    def be_deterministic(self) -> None:
        # cuBLAS looks at it when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        super().be_deterministic()

    def empty_cache(self) -> None:
        # Buckets that other processes read stay allocated after the last reader let go, until they are looked for.
        torch.cuda.ipc_collect()
        super().empty_cache()

    def has_grouped_attention(self, dtype: torch.dtype, causal: bool) -> bool:
        # The only one of torch's kernels that knows grouped heads knows neither masks nor float32; without it torch
        # writes out all scores.
        return causal and dtype != torch.float32

    def has_widening_product(self) -> bool:
        return torch.version.hip is None and _has_widening_product()

    def flash_kernel(self, device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        return (_flash_forward, _flash_backward) if _has_flash(device) else None

    def has_triton(self) -> bool:
        return importlib.util.find_spec("triton") is not None

    def pinned(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, pin_memory=True)

    def marker(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    def fused_operators(self) -> FusedOperators | None:
        return _fused_operators()

    def compiled_operators(self) -> FusedOperators | None:
        return _compiled_operators() if self.has_triton() and _fused_operators() is None else None

    def graph_recorder(self) -> GraphRecorder:
        return GraphRecorder()

    def memory_id(self, device: torch.device) -> str:
        return _uuid(torch.cuda.current_device() if device.index is None else device.index)

    def share_memory(self, buffer: torch.Tensor) -> dict[str, Any]:
        """See Platform. torch means its handles to be pickled, with the function that opens them; here only the
        arguments travel, and nothing is unpickled."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

        rebuild, arguments = reduce_tensor(buffer)
        if rebuild is not rebuild_cuda_tensor or buffer.dtype != torch.uint8:
            raise ValueError(f"only uint8 CUDA tensors have handles, not {buffer.dtype} on {buffer.device}")
        storage = [x.hex() if isinstance(x, bytes) else x for x in arguments[_STORAGE_AT:]]
        place = {"uuid": _uuid(arguments[_STORAGE_AT - 1]), "size": buffer.numel(), "offset": arguments[3]}
        return place | {"storage": storage}

    def open_memory(self, handle: dict[str, Any]) -> torch.Tensor:
        """See Platform."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        storage = [bytes.fromhex(x) if isinstance(x, str) else x for x in handle["storage"]]
        visible = [_uuid(index) for index in range(self.count())]
        if handle["uuid"] not in visible:
            raise ValueError(
                f"the weights are on device {handle['uuid']}, which this process cannot see: place sampler and "
                "trainer on the same devices, or send through shared memory"
            )
        size, index = (handle["size"],), visible.index(handle["uuid"])
        kinds = torch.storage.TypedStorage, torch.uint8
        return rebuild_cuda_tensor(torch.Tensor, size, (1,), handle["offset"], *kinds, index, *storage)

    def require_nsys(self) -> None:
        import psutil

        if not any("nsys" in parent.name() for parent in psutil.Process().parents()):
            raise UserError(_NSYS)

    def record_memory(self, entries: int, depth: int) -> None:
        torch.cuda.memory._record_memory_history(max_entries=entries, stacks="all" if depth else "python")

    def capture(self, on: bool) -> None:
        torch.cuda.synchronize()
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaProfilerStart() if on else runtime.cudaProfilerStop())

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


PLATFORM = CudaPlatform()


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


@cache
def _fused_operators() -> FusedOperators | None:
    """None without Triton, or where its kernels cannot be built: it wants a C compiler."""
    if torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return None
    from verl.platform.cuda_fused import FUSED

    return _that_work(FUSED)


@cache
def _compiled_operators() -> FusedOperators | None:
    from verl.platform.compiled import compiled_operators

    return _that_work(compiled_operators())


def _that_work(operators: FusedOperators) -> FusedOperators | None:
    try:
        x = torch.ones(2, 8, device="cuda")
        operators.rms_norm(x, x[0], 1e-6, 0.0)
    except Exception as error:  # Triton's stages have errors of their own
        text = "training and sampling are slower: Triton's kernels cannot be built here, which takes a C compiler (gcc)"
        warnings.warn(f"{text}: {error}", RuntimeWarning, stacklevel=3)
        return None
    return operators


@cache
def _has_widening_product() -> bool:
    """Tried: versions of torch differ in the sums that the overload takes (its first ones refuse float32 sums)."""
    try:
        a, total = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda"), torch.ones(16, 16, device="cuda")
        torch.addmm(total, a, torch.mm(a, a), out_dtype=torch.float32, out=total)
        torch.bmm(a[None], a[None], out_dtype=torch.float32, out=total[None])
        torch.mm(a, a, out_dtype=torch.float32)
    except (RuntimeError, AssertionError):  # the latter from a build without CUDA
        return False
    return True


@cache
def _has_flash(device: torch.device) -> bool:
    # AMD's devices have another kernel, with capabilities of its own.
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= _FLASH_CAPABILITY


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, part: Any, scale: float) -> tuple[Tensor, Tensor, tuple[Any, Any]]:
    lengths = part.queries, part.keys, part.max_queries, part.max_keys
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, part.causal, False, scale=scale
    )
    return out, lse, (state, unused)


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: Any,
    state: Any,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = part.queries, part.keys, part.max_queries, part.max_keys
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, part.causal, *state, scale=scale
    )
