"""Triton kernels of `verl.platform.cuda_fused`. Tested with Triton's interpreter; never run on a GPU.

Sums and factors are float32, whatever is read and written. Tensors are contiguous unless strides are among the arguments.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit
def rms_norm(x, weight, y, inverse, width, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(values * values) / width + eps)
    tl.store(inverse + row, factor)
    tl.store(y + row * width + at, (values * factor * scale).to(y.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward(grad, x, weight, inverse, dx, dw, rows, width, programs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """dw [programs, width]: each program's sum over its rows."""
    program, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < width
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, programs):
        g = tl.load(grad + row * width + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(inverse + row)
        normed = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32) * factor
        total += g * normed
        g = g * scale
        along = tl.sum(g * normed) / width
        tl.store(dx + row * width + at, ((g - normed * along) * factor).to(dx.dtype.element_ty), mask=inside)
    tl.store(dw + program * width + at, total, mask=inside)


@triton.jit
def swiglu(gate, up, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(grad, gate, up, out, dgate, dup, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
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
def rotate(x, cos, sin, y, heads, half, head_step, token_step, BACK: tl.constexpr, H: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """x of strides (head_step, token_step, 1), y [tokens, heads, 2·half]; cos and sin [tokens, 2·half]."""
    token = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, H)[:, None], tl.arange(0, D)[None, :]
    inside, column = (head < heads) & (at < half), at < half
    source, target = x + head * head_step + token * token_step + at, y + (token * heads + head) * 2 * half + at
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    c1 = tl.load(cos + token * 2 * half + at, mask=column, other=0.0).to(tl.float32)
    c2 = tl.load(cos + token * 2 * half + half + at, mask=column, other=0.0).to(tl.float32)
    s1 = tl.load(sin + token * 2 * half + at, mask=column, other=0.0).to(tl.float32)
    s2 = tl.load(sin + token * 2 * half + half + at, mask=column, other=0.0).to(tl.float32)
    first, second = (a * c1 + b * s2, b * c2 - a * s1) if BACK else (a * c1 - b * s1, b * c2 + a * s2)
    tl.store(target, first.to(y.dtype.element_ty), mask=inside)
    tl.store(target + half, second.to(y.dtype.element_ty), mask=inside)


@triton.jit
def merge_attention(out, lse, other, other_lse, index, heads, width, tokens, rows, H: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
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
def head_forward(  # type: ignore[no-untyped-def]
    z,
    targets,
    state,
    picked,
    rows,
    columns,
    start,
    wanted,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
def head_backward(  # type: ignore[no-untyped-def]
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
