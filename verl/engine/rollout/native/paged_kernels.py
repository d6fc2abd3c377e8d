"""Triton kernels of a decode step's attention: keys and values written to and read from blocks of the cache.

A step is an int32 matrix with a column for each row of the batch (`verl.engine.rollout.native.step`); kernels read
lengths and blocks from it, so that one captured graph serves every layout of the cache. Attention has two parts, each a
launch: `partial` over the prompts, where the responses of a group (at most TILE of them) are the queries of one
program, which reads their prompt once, and over the responses. Long sequences are cut into `splits`. `merge` weighs the
parts by their log-sum-exp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.engine.rollout.native import step as step_rows

TILE = step_rows.TILE
_TILE_BYTES = 16 << 10
_MASKED = tl.constexpr(-1e30)  # finite: a part without a visible key has a tiny weight, and no NaN
_LENGTH = tl.constexpr(step_rows.LENGTH)
_PROMPT_LENGTH = tl.constexpr(step_rows.PROMPT_LENGTH)
_TOKEN = tl.constexpr(step_rows.TOKEN)
_POSITION = tl.constexpr(step_rows.POSITION)
_ORDER = tl.constexpr(step_rows.ORDER)
_START = tl.constexpr(step_rows.START)
_COUNT = tl.constexpr(step_rows.COUNT)
_TABLES = tl.constexpr(step_rows.TABLES)


@triton.jit
def _inputs(step, tokens, seen, ids, positions, rows, COLS: tl.constexpr):
    row = tl.program_id(0)
    token = tl.load(step + _TOKEN * rows + row)
    earlier = tl.load(tokens + tl.maximum(-1 - token, 0))
    token = tl.where(token < 0, earlier, token)
    tl.store(ids + row, token.to(tl.int64))
    at = tl.load(step + _LENGTH * rows + row) - 1
    if at >= 0:
        block = tl.load(step + (_TABLES + 2 * (at // COLS)) * rows + row).to(tl.int64)
        tl.store(seen + block * COLS + at % COLS, token)
    tl.store(positions + row, tl.load(step + _POSITION * rows + row).to(tl.int64))


@triton.jit
def _store(
    key, value, keys, values, step, rows, key_row, key_head, value_row, value_head,
    HEADS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, H: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.load(step + _LENGTH * rows + row) - 1
    if at >= 0:
        block = tl.load(step + (_TABLES + 2 * (at // COLS)) * rows + row).to(tl.int64)
        head = tl.arange(0, H)[:, None]
        place = (block * HEADS + head) * COLS + at % COLS
        d, dv = tl.arange(0, BD)[None, :], tl.arange(0, BDV)[None, :]
        wanted, wanted_v = (head < HEADS) & (d < D), (head < HEADS) & (dv < DV)
        k = tl.load(key + row * key_row + head * key_head + d, mask=wanted)
        v = tl.load(value + row * value_row + head * value_head + dv, mask=wanted_v)
        tl.store(keys + place * D + d, k.to(keys.dtype.element_ty), mask=wanted)
        tl.store(values + place * DV + dv, v.to(values.dtype.element_ty), mask=wanted_v)


@triton.jit
def _partial(
    query, keys, values, step, out, lse, rows, query_row, query_head, scale, softcap, window,
    PROMPTS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HEADS: tl.constexpr, PER: tl.constexpr,
    AT_ONCE: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    tile, head, split = tl.program_id(0), tl.program_id(1) % HEADS, tl.program_id(2)
    m, n, d, dv = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BD), tl.arange(0, BDV)
    number = m // AT_ONCE  # of the response in the tile
    of_head = tl.program_id(1) // HEADS * AT_ONCE + m % AT_ONCE  # which of the queries of the head
    if PROMPTS:
        count = tl.load(step + _COUNT * rows + tile)
        row = tl.load(
            step + _ORDER * rows + tl.load(step + _START * rows + tile) + number, mask=number < count, other=0
        )
        first_row = tl.load(step + _ORDER * rows + tl.load(step + _START * rows + tile))
        length = tl.load(step + _PROMPT_LENGTH * rows + first_row)
        before = 0
    else:
        length = tl.load(step + _LENGTH * rows + tile)
        count = tl.minimum(length, 1)
        row = tile + number * 0
        before = tl.load(step + _PROMPT_LENGTH * rows + tile)
    if count > 0:
        valid = (number < count) & (of_head < PER)
        lanes = row * query_row + (head * PER + of_head) * query_head
        q = tl.load(query + lanes[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
        q = q.to(keys.dtype.element_ty)
        each = tl.cdiv(tl.cdiv(length, N), SPLITS) * N
        begin, end = split * each, tl.minimum(length, (split + 1) * each)
        oldest = tl.zeros((M,), tl.int32)  # the first key that each query sees
        if WINDOW:
            newest = tl.load(step + _PROMPT_LENGTH * rows + row) + tl.load(step + _LENGTH * rows + row) - 1
            oldest = newest - window + 1 - before
            least = tl.min(tl.where(valid, oldest, length))
            begin = tl.maximum(begin, tl.maximum(least, 0) // N * N)
        largest = tl.full((M,), _MASKED, tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, BDV), tl.float32)
        table = step + (_TABLES + (1 if PROMPTS else 0)) * rows + tile
        for at in range(begin, end, N):
            block = tl.load(table + 2 * (at // COLS) * rows).to(tl.int64)
            place = (block * HEADS + head) * COLS + at % COLS + n
            there = at + n < length
            k = tl.load(keys + place[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if SOFTCAP:
                score = softcap * (2.0 / (1.0 + tl.exp(-2.0 * score / softcap)) - 1.0)
            visible = there[None, :] & (at + n[None, :] >= oldest[:, None])
            score = tl.where(visible, score, _MASKED)
            top = tl.maximum(largest, tl.max(score, 1))
            weight = tl.exp(score - top[:, None])
            fade = tl.exp(largest - top)
            total = total * fade + tl.sum(weight, 1)
            v = tl.load(values + place[:, None] * DV + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0)
            acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
            largest = top
        total = tl.where(total > 0, total, 1.0)
        part = (row * HEADS * PER + head * PER + of_head) * (2 * SPLITS) + split * 2 + (1 if PROMPTS else 0)
        tl.store(lse + part, largest + tl.log(total), mask=valid)
        wanted = valid[:, None] & (dv < DV)[None, :]
        tl.store(out + part[:, None] * DV + dv[None, :], acc / total[:, None], mask=wanted)


@triton.jit
def _merge(
    parts, lse, step, sinks, out, rows,
    SINKS: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    dv, part = tl.arange(0, BDV), tl.arange(0, PARTS)
    at = (row * HEADS + head) * PARTS + part
    live = tl.load(step + _LENGTH * rows + row + part * 0) > 0
    weight = tl.load(lse + at, mask=live, other=0.0)
    largest = tl.max(weight)
    weight = tl.exp(weight - largest)
    total = tl.sum(weight)
    wanted = (dv < DV)[None, :] & live[:, None]
    x = tl.load(parts + at[:, None] * DV + dv[None, :], mask=wanted, other=0.0)
    if SINKS:
        total += tl.exp(tl.load(sinks + head).to(tl.float32) - largest)
    merged = tl.sum(x * weight[:, None], 0) / total
    tl.store(out + (row * HEADS + head) * DV + dv, merged.to(out.dtype.element_ty), mask=dv < DV)


def inputs(step: Tensor, tokens: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and positions int64 [rows] of a step; the ids go into `seen`, int32 [blocks, cols], too. tokens int32: those
    that the step before drew."""
    ids, positions = (torch.empty(step.shape[1], dtype=torch.int64, device=step.device) for _ in range(2))
    _inputs[(step.shape[1],)](step, tokens, seen, ids, positions, step.shape[1], seen.shape[1])
    return ids, positions


def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, step: Tensor) -> None:
    """key and value [1, Hkv, rows, D] to the newest place of each row's response."""
    heads, cols = keys.shape[2:4]
    d, dv = key.shape[-1], value.shape[-1]
    strides = key.stride(2), key.stride(1), value.stride(2), value.stride(1)
    sizes = heads, cols, d, dv, *map(triton.next_power_of_2, (heads, d, dv))
    _store[(step.shape[1],)](key, value, keys, values, step, step.shape[1], *strides, *sizes)


def keys_at_once(cols: int, widths: tuple[int, int], dtype: torch.dtype) -> int:
    """How many keys and values a program of `partial` holds at a time: as many as leave shared memory for two turns."""
    return max(16, min(64, cols, _TILE_BYTES // (max(widths) * dtype.itemsize)))


def queries_at_once(per: int, width: int, dtype: torch.dtype) -> int:
    """How many queries of a response and a key head a program of `partial` takes."""
    return min(per, max(1, 2 * _TILE_BYTES // (TILE * width * dtype.itemsize)))


def partial(
    query: Tensor, keys: Tensor, values: Tensor, step: Tensor, out: Tensor, lse: Tensor,
    prompts: bool, scale: float, softcap: float, window: int,
) -> None:  # fmt: skip
    """One part of the attention: query [1, Hq, rows, D] over the prompts or the responses → `out` and `lse`, float32
    [rows, Hq, splits, 2, Dv] and [rows, Hq, splits, 2], at 1 of the last but one for prompts. 0: no softcap, no
    window."""
    rows, heads, splits = step.shape[1], keys.shape[2], lse.shape[2]
    per, d, dv = query.shape[1] // heads, query.shape[-1], values.shape[-1]
    widths = max(16, triton.next_power_of_2(d)), max(16, triton.next_power_of_2(dv))
    at_once = queries_at_once(per, max(widths), keys.dtype)
    m = max(16, triton.next_power_of_2(at_once * (TILE if prompts else 1)))
    sizes = (
        heads,
        per,
        at_once,
        keys.shape[3],
        d,
        dv,
        m,
        keys_at_once(keys.shape[3], widths, keys.dtype),
        *widths,
        splits,
    )
    strides, numbers = (query.stride(2), query.stride(1)), (scale, softcap, window)
    kinds = prompts, window > 0, softcap > 0.0
    _partial[(rows, heads * triton.cdiv(per, at_once), splits)](
        query, keys, values, step, out, lse, rows, *strides, *numbers, *kinds, *sizes,
        num_warps=8 if m > 64 else 4, num_stages=2,
    )  # fmt: skip


def merge(parts: Tensor, lse: Tensor, step: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What `partial` made of all parts → [1, rows, Hq, Dv]; zeros for rows without a response."""
    rows, heads, splits, _, dv = parts.shape
    out = torch.empty(1, rows, heads, dv, dtype=dtype, device=parts.device)
    sizes = sinks is not None, heads, dv, triton.next_power_of_2(dv), 2 * splits
    _merge[(rows, heads)](parts, lse, step, lse if sinks is None else sinks, out, rows, *sizes)
    return out
