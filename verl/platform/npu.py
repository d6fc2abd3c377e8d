"""Ascend devices through torch_npu, which adds `torch.npu` when it is imported. Written from the vendor's
documentation; never run."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.errors import UserError
from verl.platform.device import Accelerator, FusedOperators


class NpuPlatform(Accelerator):
    """torch's "npu" devices."""

    name = "npu"
    collectives = "hccl"
    ray_resource = "NPU"
    profiler_activity = "PrivateUse1"
    has_own_tracer = True
    has_float64 = False
    packages = ("torch_npu",)

    @property
    def module(self) -> Any:
        if importlib.util.find_spec("torch_npu") is None:
            return None
        importlib.import_module("torch_npu")
        _register_grouped_product()
        return torch.npu  # type: ignore[attr-defined]

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.bfloat16, torch.float16, torch.float32)

    def flash_kernel(self, device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        return _flash_forward, _flash_backward

    def fused_operators(self) -> FusedOperators:
        npu: Any = importlib.import_module("torch_npu")

        def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
            x, weight = _of_one_type(x, weight + offset if offset else weight)
            y: Tensor = npu.npu_rms_norm(x, weight, eps)[0]
            return y

        def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            q, k, cos, sin = _of_one_type(q, k, cos[:, None], sin[:, None])
            return npu.npu_rotary_mul(q, cos, sin), npu.npu_rotary_mul(k, cos, sin)

        return FusedOperators(rms_norm, lambda gate, up: npu.npu_swiglu(torch.cat((gate, up), -1), -1), rotate)

    def own_tracer(self, options: dict[str, Any]) -> Any:
        return _NpuTrace(options)


PLATFORM = NpuPlatform()


def _of_one_type(*tensors: Tensor) -> list[Tensor]:
    """In the widest of their types: the operators take one."""
    return [x.to(reduce(torch.promote_types, (x.dtype for x in tensors))) for x in tensors]


_GROUPED = torch.ops.aten._grouped_mm.default
_ROWS, _OVER_ROWS, _ONE_OUTPUT = 0, 2, 3  # group types; the operator returns one tensor, not one per group


@cache
def _register_grouped_product() -> torch.library.Library | None:
    """Compute `aten::_grouped_mm`, which layers of experts call, by `npu_grouped_matmul`, unless torch_npu has a kernel
    for it. torch's own formula of its gradient calls it again."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", "PrivateUse1"):
        return None
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    library.impl("_grouped_mm", _grouped_product)
    return library


def _grouped_product(
    x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """x [T, K], weight [E, K, N] → [T, N]; x [K, T], weight [T, N] → [E, K, N]. offs [E]: where each group of T ends.

    The operator takes bfloat16 and float16; other calls go to torch's loop over groups.
    """
    if offs is None or bias is not None or x.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float16):
        return _GROUPED._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, x, weight, offs, bias, out_dtype)
    groups = {"group_list": offs.long(), "group_list_type": 0}  # running totals
    kind = _ROWS if weight.ndim == 3 else _OVER_ROWS
    npu: Any = importlib.import_module("torch_npu")
    product: Tensor = npu.npu_grouped_matmul([x], [weight], split_item=_ONE_OUTPUT, group_type=kind, **groups)[0]
    return product if out_dtype is None else product.to(out_dtype)


# Of a causal call: the kernel cuts its mask out of one of this size (sparse mode 3, from the lower right corner).
_MASK_SIZE, _CAUSAL = 2048, 3
_STATISTICS = 8  # it writes the maximum and the sum of each row of scores so often


@cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device).triu_(1)


def _options(q: Tensor, part: Any) -> dict[str, Any]:
    options = {"actual_seq_qlen": part.query_ends, "actual_seq_kvlen": part.key_ends}
    return options | ({"atten_mask": _causal_mask(q.device), "sparse_mode": _CAUSAL} if part.causal else {})


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, part: Any, scale: float) -> tuple[Tensor, Tensor, dict[str, Any]]:
    npu, options = importlib.import_module("torch_npu"), _options(q, part)
    out, maxima, sums, *_ = npu.npu_fusion_attention(q, k, v, q.shape[1], "TND", scale=scale, **options)
    return out, (maxima[..., 0] + sums[..., 0].log()).t().contiguous(), options


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: Any,
    state: dict[str, Any],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # exp(score − maximum) / sum, which it makes again, is exp(score − lse) with the lse as maximum and a sum of 1.
    npu, maxima = importlib.import_module("torch_npu"), lse.t()[..., None].repeat(1, 1, _STATISTICS)
    statistics = {"softmax_max": maxima, "softmax_sum": torch.ones_like(maxima), "attention_in": out}
    dq, dk, dv, *_ = npu.npu_fusion_attention_grad(
        q, k, v, grad, q.shape[1], "TND", scale_value=scale, **statistics, **state
    )
    return dq, dk, dv


class _NpuTrace:
    """torch_npu.profiler: operators, kernels and communication, a folder per profile."""

    def __init__(self, options: dict[str, Any]):
        self._npu: Any = importlib.import_module("torch_npu").profiler
        self._options = options
        self._profile: Any = None
        self._folder: Path | None = None

    def start(self) -> None:
        """Begin."""
        npu, contents = self._npu, self._options.get("contents") or ["npu", "cpu"]
        level = getattr(npu.ProfilerLevel, str(self._options.get("level", "level0")).title(), None)
        if level is None:
            key = f"profiler.tool_config.npu.level={self._options['level']}"
            raise UserError(f"{key} is not a level of torch_npu")
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
