"""Operators of NVIDIA devices that read and write each number once, where Triton is installed (torch's CUDA builds bring it).

Each is an operator `torch.ops.verl.*` of one launch (`rms_norm_backward`: two), with the kernels of `cuda_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.platform.device import FusedOperators

_SCHEMAS = (
    "rms_norm(Tensor x, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)",
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor inverse) -> (Tensor, Tensor)",
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor, Tensor)",
    "rotate(Tensor x, Tensor cos, Tensor sin, ScalarType dtype, bool back) -> Tensor",
    "merge_attention(Tensor(a!) out, Tensor(b!) lse, Tensor other, Tensor other_lse, Tensor index) -> ()",
    "head_forward(Tensor z, Tensor targets, Tensor(a!) state, Tensor(b!) picked, int start, bool entropy, bool squares)"
    " -> ()",
    "head_backward(Tensor(a!) z, Tensor stats, Tensor targets, Tensor grad, Tensor? entropy, Tensor? squares, int start)"
    " -> ()",
)
_BLOCK, _PROGRAMS = 1024, 512
ops: Any = torch.ops.verl


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(weight·x/√(mean x² + eps) in `dtype`, 1/√(mean x² + eps) float32 [rows]) of contiguous x [..., width]."""
    kernels, width = _kernels(), x.shape[-1]
    y, rows = torch.empty_like(x, dtype=dtype), x.numel() // width
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    kernels.rms_norm[rows,](x, weight, y, inverse, width, eps, BLOCK=_power(width))
    return y, inverse


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and, float32, of weight."""
    kernels, width, rows = _kernels(), x.shape[-1], inverse.numel()
    dx, programs = torch.empty_like(x), min(rows, _PROGRAMS)
    dw = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    sizes = rows, width, programs
    kernels.rms_norm_backward[programs,](grad, x, weight, inverse, dx, dw, *sizes, BLOCK=_power(width))
    return dx, dw.sum(0)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate)·up, of contiguous tensors."""
    kernels, out = _kernels(), torch.empty_like(gate)
    kernels.swiglu[-(-out.numel() // _BLOCK),](gate, up, out, out.numel(), BLOCK=_BLOCK)
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate)·up again, and the gradients of gate and up."""
    kernels, size = _kernels(), gate.numel()
    made = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(gate)
    kernels.swiglu_backward[-(-size // _BLOCK),](grad, gate, up, *made, size, BLOCK=_BLOCK)
    return made


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, back: bool) -> Tensor:
    """x [1, H, S, D], D contiguous, rotated by cos and sin [1, S, D]; its memory is that of [S, H, D]."""
    kernels, (_, heads, tokens, width) = _kernels(), x.shape
    y = torch.empty(tokens, heads, width, dtype=dtype, device=x.device)
    sizes, blocks = (heads, width // 2, x.stride(1), x.stride(2)), {"H": _power(heads), "D": _power(width // 2)}
    kernels.rotate[tokens,](x, cos, sin, y, *sizes, BACK=back, **blocks)
    return y.transpose(0, 1)[None]


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, index: Tensor) -> None:
    """Join `other` [R, H, D], with log-normalisers [H, R], to out [S, H, D] and lse [H, S] at `index`, in place."""
    kernels, (tokens, heads, width), rows = _kernels(), out.shape, len(index)
    blocks = {"H": _power(heads), "D": _power(width)}
    kernels.merge_attention[rows,](out, lse, other, other_lse, index, heads, width, tokens, rows, **blocks)


def head_forward(
    z: Tensor, targets: Tensor, state: Tensor, picked: Tensor, start: int, entropy: bool, squares: bool
) -> None:
    """A block of scaled logits [R, C], from column `start`, into float32 `state` [4, R] (maximum, and relative to it Σe,
    Σe·z, Σe²) and into `picked` [R, n] at `targets` int64 [R, n]."""
    kernels, (rows, columns) = _kernels(), z.shape
    options = {"ENTROPY": entropy, "SQUARES": squares, "BLOCK": min(4096, _power(columns))}
    kernels.head_forward[rows,](z, targets, state, picked, rows, columns, start, targets.shape[1], **options)


def head_backward(
    z: Tensor,
    stats: Tensor,
    targets: Tensor,
    grad: Tensor,
    entropy: Tensor | None,
    squares: Tensor | None,
    start: int,
) -> None:
    """A block of scaled logits [R, C] to its gradient, in place: `stats` [3, R] are log-normaliser, entropy and Σπ²,
    `grad` [R, n], `entropy` and `squares` [R] the gradients of log-probs, entropy and Σπ², float32."""
    kernels, (rows, columns) = _kernels(), z.shape
    options = {"ENTROPY": entropy is not None, "SQUARES": squares is not None, "BLOCK": min(1024, _power(columns))}
    tensors = z, stats, targets, grad, grad if entropy is None else entropy, grad if squares is None else squares
    grid, sizes = (rows, -(-columns // options["BLOCK"])), (columns, start, targets.shape[1], stats.stride(0))
    kernels.head_backward[grid](*tensors, *sizes, **options)


def _kernels() -> Any:
    from verl.platform import cuda_kernels

    return cuda_kernels


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


LIBRARY = torch.library.Library("verl", "DEF")
for _schema in _SCHEMAS:
    LIBRARY.define(_schema)
    LIBRARY.impl(_schema.partition("(")[0], globals()[_schema.partition("(")[0]], "CUDA")


def _product_dtype(*like: Tensor) -> torch.dtype:
    """What products take: results go there without another pass that rounds them."""
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return torch.promote_types(like[0].dtype, like[-1].dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, dtype):  # type: ignore[no-untyped-def]
        x = x.contiguous()
        y, inverse = ops.rms_norm(x, weight, eps, dtype)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, inverse = ctx.saved_tensors
        dx, dw = ops.rms_norm_backward(grad.contiguous(), x, weight, inverse)
        return dx, dw.to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, dtype):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        ctx.kind = x.dtype
        return ops.rotate(x if x.stride(-1) == 1 else x.contiguous(), cos, sin, dtype, False)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        return ops.rotate(grad, *ctx.saved_tensors, ctx.kind, True), None, None, None


FUSED = FusedOperators(
    rms_norm=lambda x, weight, eps: _Norm.apply(x, weight, eps, _product_dtype(x, weight)),
    swiglu=ops.swiglu,
    rotate=lambda x, cos, sin: _Rotation.apply(x, cos[:, 0].contiguous(), sin[:, 0].contiguous(), _product_dtype(x)),
    swiglu_backward=ops.swiglu_backward,
    merge_attention=ops.merge_attention,
    head=(ops.head_forward, ops.head_backward),
    mixes_types=True,
)
