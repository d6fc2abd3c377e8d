"""Triton kernels that draw tokens: `verl.engine.rollout.native.sampling` in a fixed shape, for rows of a step's matrix.

`threshold` finds the smallest logit that top-k, top-p and min-p leave, by its bit pattern, four bits in a pass.
`chunk_sums` and `draw` invert the cumulative distribution in two levels, as `sampling` does. Log-probs and draws are
those of `sampling`, to rounding. `encode` writes the sets that tokens are drawn from as `verl.models.sampling_mask` has
them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.engine.rollout.native import step as step_rows

_TEMPERATURE = tl.constexpr(step_rows.TEMPERATURE)
_LOG_MIN_P = tl.constexpr(step_rows.LOG_MIN_P)
_PENALTY = tl.constexpr(step_rows.PENALTY)
_TOP_K = tl.constexpr(step_rows.TOP_K)
_LENGTH = tl.constexpr(step_rows.LENGTH)
_PROMPT_LENGTH = tl.constexpr(step_rows.PROMPT_LENGTH)
_ORDER = tl.constexpr(step_rows.ORDER)
_START = tl.constexpr(step_rows.START)
_COUNT = tl.constexpr(step_rows.COUNT)
_TABLES = tl.constexpr(step_rows.TABLES)
_LOWEST = tl.constexpr(-(2**31))
_CHUNK = 1024


@triton.jit
def _scaled(logits, at, mask, temperature):
    """The logits by a row's temperature; 0 is that of a greedy row, which divides by nothing."""
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    return tl.load(logits + at, mask=mask, other=-float("inf")).to(tl.float32) / divisor


@triton.jit
def _key(x):
    """Integers in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _lowest_key(logits, vocab, temperature, least, largest, target, MASS: tl.constexpr, C: tl.constexpr):
    """The largest key such that the logits from it on (of those from the key `least` on) have the mass, or count."""
    bound = tl.full((), _LOWEST, tl.int64)
    c, sixteenth = tl.arange(0, C), tl.arange(0, 16)
    for digit in range(8):
        width = tl.full((), 1, tl.int64) << (28 - 4 * digit)
        bounds = bound + sixteenth * width
        reached = tl.zeros((16,), tl.float64)
        for at in range(0, vocab, C):
            x = _scaled(logits, at + c, at + c < vocab, temperature)
            key = _key(x).to(tl.int64)
            weight = tl.exp(x - largest) if MASS else tl.where(at + c < vocab, 1.0, 0.0)
            weight = tl.where(key >= least, weight, 0.0)
            sums = tl.sum(tl.where(key[None, :] >= bounds[:, None], weight[None, :], 0.0), 1)
            reached += sums.to(tl.float64)
        # the first of the sixteen is below or at the wanted one always
        bound += tl.maximum(tl.sum((reached >= target).to(tl.int64)) - 1, 0) * width
    return bound


@triton.jit
def _penalise(logits, seen, step, out, rows, vocab, COLS: tl.constexpr):
    """Tokens that come twice are written twice, the same each time: `logits` stays as it is."""
    tile, prompts, c = tl.program_id(0), tl.program_id(1), tl.arange(0, COLS)
    start = tl.load(step + _START * rows + tile)
    count = tl.load(step + _COUNT * rows + tile) if prompts == 1 else 1
    for number in range(count):
        row = tl.load(step + _ORDER * rows + start + number) if prompts == 1 else tile
        length = tl.load(step + (_PROMPT_LENGTH if prompts == 1 else _LENGTH) * rows + row)
        penalty = tl.load(step + _PENALTY * rows + row).to(tl.float32, bitcast=True)
        for at in range(0, length if penalty != 1.0 else 0, COLS):
            block = tl.load(step + (_TABLES + prompts + 2 * (at // COLS)) * rows + tile).to(tl.int64)
            token = tl.load(seen + block * COLS + c, mask=at + c < length, other=vocab)
            place, inside = row.to(tl.int64) * vocab + token, token < vocab
            value = tl.load(logits + place, mask=inside, other=0.0)
            tl.store(out + place, tl.where(value > 0, value / penalty, value * penalty), mask=inside)


@triton.jit
def _threshold(logits, top_p, step, lowest, rows, vocab, C: tl.constexpr):
    row = tl.program_id(0)
    temperature = tl.load(step + _TEMPERATURE * rows + row).to(tl.float32, bitcast=True)
    min_p = tl.load(step + _LOG_MIN_P * rows + row).to(tl.float32, bitcast=True)
    top_k, mass = tl.load(step + _TOP_K * rows + row), tl.load(top_p + row)
    logits += row.to(tl.int64) * vocab
    least = tl.full((), _LOWEST, tl.int64)
    c = tl.arange(0, C)
    if temperature > 0.0:
        largest = tl.full((), -float("inf"), tl.float32)
        if (mass < 1.0) | (min_p > -float("inf")):
            for at in range(0, vocab, C):
                largest = tl.maximum(largest, tl.max(_scaled(logits, at + c, at + c < vocab, temperature)))
        if (top_k > 0) & (top_k < vocab):
            least = _lowest_key(logits, vocab, temperature, least, largest, top_k.to(tl.float64), False, C)
        if mass < 1.0:
            total = tl.zeros((), tl.float64)
            for at in range(0, vocab, C):
                x = _scaled(logits, at + c, at + c < vocab, temperature)
                total += tl.sum(tl.where(_key(x).to(tl.int64) >= least, tl.exp(x - largest), 0.0)).to(tl.float64)
            least = tl.maximum(least, _lowest_key(logits, vocab, temperature, least, largest, mass * total, True, C))
        if min_p > -float("inf"):
            least = tl.maximum(least, _key(largest + min_p).to(tl.int64))
    tl.store(lowest + row, least.to(tl.int32))


@triton.jit
def _chunk_sums(logits, lowest, step, largest, sums, best, rows, vocab, chunks, C: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    c = chunk * C + tl.arange(0, C)
    temperature = tl.load(step + _TEMPERATURE * rows + row).to(tl.float32, bitcast=True)
    x = _scaled(logits + row.to(tl.int64) * vocab, c, c < vocab, temperature)
    allowed = (_key(x) >= tl.load(lowest + row)) | (x != x)
    x = tl.where(allowed, x, -float("inf"))
    top = tl.max(x)
    total = tl.sum(tl.where(x > -float("inf"), tl.exp(x - top), tl.where(x != x, x, 0.0)))
    tl.store(largest + row * chunks + chunk, top)
    tl.store(sums + row * chunks + chunk, total)
    tl.store(best + row * chunks + chunk, tl.min(tl.where(x == top, c, vocab - 1)))


@triton.jit
def _draw(
    logits, uniform, lowest, step, largest, sums, best, tokens, rows, stride, vocab, chunks,
    C: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    n = tl.arange(0, N)
    there = n < chunks
    tops = tl.load(largest + row * chunks + n, mask=there, other=-float("inf"))
    top = tl.max(tops)
    weights = tl.load(sums + row * chunks + n, mask=there, other=0.0)
    # a chunk without a token has no weight, whatever its largest; not a number stays one
    weights = tl.where(tops > -float("inf"), weights * tl.exp(tops - top), weights).to(tl.float64)
    running = tl.cumsum(weights, 0)
    total = tl.sum(weights)
    target = tl.load(uniform + row) * total
    chunk = tl.minimum(tl.sum((there & (running <= target)).to(tl.int32)), chunks - 1)
    before = tl.sum(tl.where(n < chunk, weights, 0.0))
    c = chunk * C + tl.arange(0, C)
    temperature = tl.load(step + _TEMPERATURE * rows + row).to(tl.float32, bitcast=True)
    row_logits = logits + row.to(tl.int64) * vocab
    x = _scaled(row_logits, c, c < vocab, temperature)
    share = tl.where((c < vocab) & (_key(x) >= tl.load(lowest + row)), tl.exp(x - top), 0.0).to(tl.float64)
    inside = tl.cumsum(share, 0)
    # the chunk's own sum may differ by rounding: stay below the last step
    offset = tl.minimum(target - before, tl.sum(share) * (1.0 - 2.0**-40))
    drawn = chunk * C + tl.sum((inside <= offset).to(tl.int32))
    first = tl.min(tl.where(tops == top, n, chunks - 1))
    token = tl.where(temperature == 0.0, tl.load(best + row * chunks + first), drawn)
    token = tl.minimum(token, vocab - 1)
    x = _scaled(row_logits, token, token >= 0, temperature)
    log_prob = (x - top) - tl.log(total).to(tl.float32)
    tl.store(tokens + row, token)
    tl.store(tokens + stride + row, log_prob.to(tl.int32, bitcast=True))


@triton.jit
def _encode(logits, lowest, step, sets, rows, vocab, words, C: tl.constexpr):
    row, c, word = tl.program_id(0), tl.arange(0, C), tl.arange(0, C // 32)
    temperature = tl.load(step + _TEMPERATURE * rows + row).to(tl.float32, bitcast=True)
    least = tl.load(lowest + row)
    logits += row.to(tl.int64) * vocab
    sets += row.to(tl.int64) * (words + 1)
    count = tl.full((), 0, tl.int32)
    for at in range(0, vocab, C):
        x = _scaled(logits, at + c, at + c < vocab, temperature)
        count += tl.sum(((_key(x) >= least) & (x > -float("inf"))).to(tl.int32))
    tl.store(sets, count)
    written = tl.full((), 0, tl.int32)
    for at in range(0, vocab if count < vocab else 0, C):
        x = _scaled(logits, at + c, at + c < vocab, temperature)
        allowed = ((_key(x) >= least) & (x > -float("inf"))).to(tl.int32)
        if 32 * count <= vocab:
            place = written + tl.cumsum(allowed, 0)  # the count stands before the ids
            tl.store(sets + place, at + c, mask=allowed > 0)
            written += tl.sum(allowed)
        else:
            bits = tl.reshape(allowed, (C // 32, 32)) << tl.arange(0, 32)[None, :]
            tl.store(sets + 1 + at // 32 + word, tl.sum(bits, 1), mask=at // 32 + word < words)


def penalise(logits: Tensor, seen: Tensor, step: Tensor) -> Tensor:
    """Logits [rows, V], those of tokens of a row's prompt and response by its penalty; seen int32 [blocks, cols]: the
    tokens whose keys the blocks of the cache hold."""
    out, rows = logits.clone(), step.shape[1]
    _penalise[(rows, 2)](logits, seen, step, out, rows, logits.shape[1], seen.shape[1])
    return out


def threshold(logits: Tensor, top_p: Tensor, step: Tensor) -> Tensor:
    """The key (see `_key`) of the smallest logit that may be drawn, int32 [rows]; top_p float64 [rows]."""
    lowest = torch.empty(step.shape[1], dtype=torch.int32, device=logits.device)
    _threshold[(step.shape[1],)](logits, top_p, step, lowest, step.shape[1], logits.shape[1], C=_CHUNK)
    return lowest


def encode(logits: Tensor, lowest: Tensor, step: Tensor, sets: Tensor) -> None:
    """The sets of tokens that may be drawn into int32 [rows, 1 + ceil(V / 32)]: how many they are, then nothing for the
    whole vocabulary, their ids where these are not longer than a bit for each token of it, else these bits."""
    rows, words = step.shape[1], sets.shape[1] - 1
    _encode[(rows,)](logits, lowest, step, sets, rows, logits.shape[1], words, C=_CHUNK)


def chunk_sums(logits: Tensor, lowest: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logit of each chunk of the vocabulary, the sum of exp(logit - largest), both float32, and the first
    token with it, int32; [rows, chunks] each."""
    rows, chunks = step.shape[1], triton.cdiv(logits.shape[1], _CHUNK)
    largest, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    _chunk_sums[(rows, chunks)](logits, lowest, step, largest, sums, best, rows, logits.shape[1], chunks, C=_CHUNK)
    return largest, sums, best


def draw(
    logits: Tensor, uniform: Tensor, lowest: Tensor, step: Tensor, largest: Tensor, sums: Tensor, best: Tensor,
    tokens: Tensor,
) -> None:  # fmt: skip
    """Draw by uniform numbers, float64 [rows], into tokens, int32 [2, at least rows]: tokens and the bits of their
    float32 log-probs, nan where a row's logits are not finite."""
    rows, chunks = sums.shape
    sizes = rows, tokens.stride(0), logits.shape[1], chunks
    at_once = triton.next_power_of_2(chunks)
    _draw[(rows,)](logits, uniform, lowest, step, largest, sums, best, tokens, *sizes, C=_CHUNK, N=at_once)
