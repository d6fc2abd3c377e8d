"""Triton kernels of training and sampling. They are tested with Triton's interpreter, and on devices by tests/gpu.

Sums and factors are float32, whatever is read and written. Norms and gates take rows of any stride, heads any stride of
heads and tokens: parts of one product for several layers are read where they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _PROGRAMS = 1024, 512


@triton.jit
def _rms_norm(
    x, weight, y, inverse, rows, parts, row_step, part_step, width, eps, offset, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (at < width)
    place = (row // parts).to(tl.int64) * row_step + (row % parts).to(tl.int64) * part_step
    values = tl.load(x + place[:, None] + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32) + offset
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 1) / width + eps)
    tl.store(inverse + row, factor, mask=row < rows)
    target = y + row.to(tl.int64)[:, None] * width + at
    tl.store(target, (values * factor[:, None] * scale).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward(
    grad, x, weight, inverse, dx, dw, rows, parts, row_step, part_step, width, offset, programs,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dw [programs, width]: each program's sum over its rows."""
    program, at = tl.program_id(0), tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32) + offset
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(program * ROWS, rows, programs * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (at < width)
        place = (row // parts).to(tl.int64) * row_step + (row % parts).to(tl.int64) * part_step
        own = row.to(tl.int64)[:, None] * width + at
        g = tl.load(grad + own, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + place[:, None] + at, mask=inside, other=0.0).to(tl.float32) * factor
        total += g * normed
        g = g * scale
        along = tl.sum(g * normed, 1)[:, None] / width
        tl.store(dx + own, ((g - normed * along) * factor).to(dx.dtype.element_ty), mask=inside)
    tl.store(
        dw + program.to(tl.int64) * width + tl.arange(0, BLOCK), tl.sum(total, 0), mask=tl.arange(0, BLOCK) < width
    )


@triton.jit
def _swiglu(gate, up, out, gate_step, up_step, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    g = tl.load(gate + row * gate_step + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_step + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(grad, gate, up, out, dgate, dup, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    tl.store(out + at, (silu * u).to(out.dtype.element_ty), mask=inside)
    tl.store(dgate + at, (d * u * (sigmoid + silu * (1.0 - sigmoid))).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + at, (d * silu).to(dup.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(source, target, head, heads, d, half, c1, s1, c2, s2, BACK: tl.constexpr):
    """A token's heads from `source` to `target`, pointers [H, D] to the first half of each."""
    inside = (head < heads) & (d < half)
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    first, second = (a * c1 + b * s2, b * c2 - a * s1) if BACK else (a * c1 - b * s1, b * c2 + a * s2)
    tl.store(target, first.to(target.dtype.element_ty), mask=inside)
    tl.store(target + half, second.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    q, k, cos, sin, q_out, k_out, q_head, q_token, k_head, k_token, heads, kv_heads, half,
    BACK: tl.constexpr, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """q and k of strides (head, token, 1), q_out and k_out [tokens, heads, 2·half]; cos and sin [tokens, 2·half]."""
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, D)[None, :]
    at, column = token * 2 * half + d, d < half
    c1 = tl.load(cos + at, mask=column, other=0.0).to(tl.float32)
    s1 = tl.load(sin + at, mask=column, other=0.0).to(tl.float32)
    c2 = tl.load(cos + at + half, mask=column, other=0.0).to(tl.float32)
    s2 = tl.load(sin + at + half, mask=column, other=0.0).to(tl.float32)
    head = tl.arange(0, H).to(tl.int64)[:, None]
    source, target = q + token * q_token + head * q_head + d, q_out + (token * heads + head) * 2 * half + d
    _rotated(source, target, head, heads, d, half, c1, s1, c2, s2, BACK)
    head = tl.arange(0, KV).to(tl.int64)[:, None]
    source, target = k + token * k_token + head * k_head + d, k_out + (token * kv_heads + head) * 2 * half + d
    _rotated(source, target, head, kv_heads, d, half, c1, s1, c2, s2, BACK)


@triton.jit
def _merge_attention(out, lse, other, other_lse, index, heads, width, tokens, rows, H: tl.constexpr, D: tl.constexpr):
    """out [tokens, heads, width] and lse [heads, tokens] at `index` [rows], in place, with those of the other call."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(index + row).to(tl.int64)
    head, at = tl.arange(0, H), tl.arange(0, D)
    present = head < heads
    a = tl.load(lse + head * tokens + token, mask=present, other=0.0)
    b = tl.load(other_lse + head * rows + row, mask=present, other=0.0)
    most = tl.maximum(a, b)
    joint = most + tl.log(tl.exp(a - most) + tl.exp(b - most))
    inside = present[:, None] & (at < width)[None, :]
    mine = out + (token * heads + head[:, None]) * width + at[None, :]
    theirs = other + (row * heads + head[:, None]) * width + at[None, :]
    value = tl.load(mine, mask=inside, other=0.0).to(tl.float32) * tl.exp(a - joint)[:, None]
    value += tl.load(theirs, mask=inside, other=0.0).to(tl.float32) * tl.exp(b - joint)[:, None]
    tl.store(mine, value.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + head * tokens + token, joint, mask=present)


@triton.jit
def _head_forward(
    z, targets, state, picked, rows, columns, start, wanted,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of z [rows, columns] into its running maximum, Σe, Σe·(z − maximum) and Σe² in state [4, rows], e = exp(z −
    maximum), and into picked [rows, wanted] where a target (less `start`) is one of its columns."""
    row = tl.program_id(0).to(tl.int64)
    top, total = tl.load(state + row), tl.load(state + rows + row)
    weighted, squares = tl.load(state + 2 * rows + row), tl.load(state + 3 * rows + row)
    for column in range(0, columns, BLOCK):
        at = column + tl.arange(0, BLOCK)
        inside = at < columns
        values = tl.load(z + row * columns + at, mask=inside, other=float("-inf")).to(tl.float32)
        most = tl.maximum(top, tl.max(values))
        shrink, e = tl.exp(top - most), tl.exp(values - most)
        if ENTROPY:
            moved = tl.where(total > 0, (top - most) * total, 0.0)
            weighted = (weighted + moved) * shrink + tl.sum(e * tl.where(inside, values - most, 0.0))
        if SQUARES:
            squares = squares * shrink * shrink + tl.sum(e * e)
        total = total * shrink + tl.sum(e)
        top = most
    tl.store(state + row, top)
    tl.store(state + rows + row, total)
    tl.store(state + 2 * rows + row, weighted)
    tl.store(state + 3 * rows + row, squares)
    for number in range(wanted):
        target = tl.load(targets + row * wanted + number) - start
        inside_block = (target >= 0) & (target < columns)
        value = tl.load(z + row * columns + target, mask=inside_block, other=0.0).to(tl.float32)
        tl.store(picked + row * wanted + number, value, mask=inside_block)


@triton.jit
def _head_backward(
    z, stats, targets, grad, g_entropy, g_squares, columns, start, wanted, stats_step,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z in place to the gradient of z; stats: log-normaliser, entropy, Σπ², `stats_step` apart; grad [rows, wanted]."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    log_pi = tl.load(z + row * columns + at, mask=inside, other=float("-inf")).to(tl.float32) - tl.load(stats + row)
    pi = tl.exp(log_pi)
    factor, chosen = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for number in range(wanted):
        g = tl.load(grad + row * wanted + number).to(tl.float32)
        factor -= g
        chosen += tl.where(at == tl.load(targets + row * wanted + number) - start, g, 0.0)
    if ENTROPY:
        factor -= tl.load(g_entropy + row) * (tl.where(inside, log_pi, 0.0) + tl.load(stats + stats_step + row))
    if SQUARES:
        factor += 2.0 * tl.load(g_squares + row) * (pi - tl.load(stats + 2 * stats_step + row))
    tl.store(z + row * columns + at, (pi * factor + chosen).to(z.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """((offset + weight)·x/√(mean x² + eps) in `dtype`, 1/√(mean x² + eps) float32 [rows]) of x [..., width]."""
    rows = _rows(x)
    y, inverse = torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty(rows.shape[:2], dtype=torch.float32)
    sizes, options = (rows.shape[1], *rows.stride()[:2], x.shape[-1], eps, offset), _whole_rows(x.shape[-1], 2048)
    grid = (triton.cdiv(inverse.numel(), options["ROWS"]),)
    _rms_norm[grid](rows, weight, y, inverse, inverse.numel(), *sizes, **options)
    return y, inverse.view(-1)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offset: float, inverse: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and, float32, of weight."""
    # One row at a time: sixteen took a fifth longer (246,400 rows of 128 on an H100).
    rows, width, options = _rows(x), x.shape[-1], _whole_rows(x.shape[-1], 1)
    programs = min(len(inverse), _PROGRAMS * max(1, 2048 // options["BLOCK"]))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    sizes = len(inverse), rows.shape[1], *rows.stride()[:2], width, offset, programs
    _rms_norm_backward[(programs,)](grad.contiguous(), rows, weight, inverse, dx, dw, *sizes, **options)
    return dx, dw.sum(0)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate)·up of [..., width]."""
    (gates, ups), width = (x if x.stride(-1) == 1 else x.contiguous() for x in (gate, up)), gate.shape[-1]
    gates, ups = gates.reshape(-1, width), ups.reshape(-1, width)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grid = len(gates), triton.cdiv(width, _BLOCK)
    _swiglu[grid](gates, ups, out, gates.stride(0), ups.stride(0), width, BLOCK=_BLOCK)
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate)·up again, and the gradients of gate and up."""
    given, size = [x.contiguous() for x in (grad, gate, up)], gate.numel()
    out, dgate, dup = (torch.empty_like(given[1]) for _ in range(3))
    _swiglu_backward[(triton.cdiv(size, _BLOCK),)](*given, out, dgate, dup, size, BLOCK=_BLOCK)
    return out, dgate, dup


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, back: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q and k [1, heads, tokens, D] rotated by cos and sin [1, tokens, D]; their memory is that of [tokens, heads,
    D]."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    tokens, width = q.shape[2:]
    heads = q.shape[1], k.shape[1]
    out = [torch.empty(tokens, n, width, dtype=dtype, device=q.device) for n in heads]
    sizes = q.stride(1), q.stride(2), k.stride(1), k.stride(2), *heads, width // 2
    blocks = {"H": _power(heads[0]), "KV": _power(heads[1]), "D": _power(width // 2)}
    _rotate[(tokens,)](q, k, cos.contiguous(), sin.contiguous(), *out, *sizes, BACK=back, **blocks)
    return out[0].transpose(0, 1)[None], out[1].transpose(0, 1)[None]


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, index: Tensor) -> None:
    """Join `other` [R, H, D], with log-normalisers [H, R], to out [S, H, D] and lse [H, S] at `index`, in place."""
    (tokens, heads, width), rows = out.shape, len(index)
    blocks = {"H": _power(heads), "D": _power(width)}
    _merge_attention[(rows,)](out, lse, other, other_lse, index, heads, width, tokens, rows, **blocks)


def head_forward(
    z: Tensor, targets: Tensor, state: Tensor, picked: Tensor, start: int, entropy: bool, squares: bool
) -> None:
    """A block of scaled logits [R, C], from column `start`, into float32 `state` [4, R] (maximum, and relative to it
    Σe, Σe·z, Σe²) and into `picked` [R, n] at `targets` int64 [R, n]."""
    rows, columns = z.shape
    options = {"ENTROPY": entropy, "SQUARES": squares, "BLOCK": min(4096, _power(columns))}
    _head_forward[(rows,)](z, targets, state, picked, rows, columns, start, targets.shape[1], **options)


def head_backward(
    z: Tensor, stats: Tensor, targets: Tensor, grad: Tensor, entropy: Tensor | None, squares: Tensor | None, start: int
) -> None:
    """A block of scaled logits [R, C] to its gradient, in place: `stats` [3, R] are log-normaliser, entropy and Σπ²,
    `grad` [R, n], `entropy` and `squares` [R] the gradients of log-probs, entropy and Σπ², float32."""
    rows, columns = z.shape
    options = {"ENTROPY": entropy is not None, "SQUARES": squares is not None, "BLOCK": min(1024, _power(columns))}
    tensors = z, stats, targets, grad, grad if entropy is None else entropy, grad if squares is None else squares
    grid, sizes = (rows, triton.cdiv(columns, options["BLOCK"])), (columns, start, targets.shape[1], stats.stride(0))
    _head_backward[grid](*tensors, *sizes, **options)


def _rows(x: Tensor) -> Tensor:
    """[..., width] as [n, parts, width]: a view where x is rows of any stride, heads side by side."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-2] if x.ndim > 3 else 1, x.shape[-1])


def _whole_rows(width: int, elements: int) -> dict[str, int]:
    """Rows, block and warps of a program that holds whole rows: short ones as many as make up the elements."""
    block = _power(width)
    rows = max(1, elements // block) if block < 1024 else 1
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(1, rows * block // 512))}


def _power(size: int) -> int:
    power: int = triton.next_power_of_2(size)
    return power
