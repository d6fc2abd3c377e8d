"""Drawing tokens: a whole batch at once, each row by its own settings, seed and position.

The order is that of Hugging Face's warpers: forbidden tokens (those that a grammar does not allow, too), repetition
penalty, temperature, top-k, top-p (on what top-k left), min-p. Log-probs are of the distribution that is drawn from; a
greedy row (temperature 0) reports them at temperature 1, without truncation. Ties at the border of top-k and top-p are
kept, all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.engine.rollout.base import SamplingParams
from verl.models.sampling_mask import encode_sets, truncate
from verl.platform import platform_of

_CHUNK = 64


def uniforms(seeds: np.ndarray, calls: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), float64 [N], from seeds, numbers of calls and positions (uint64 [N]) alone.

    A counter-based generator: the finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom
    number generators, 2014) applied to the seed, then to the seed's hash plus the position. A call after the first
    hashes the seed's hash once more.
    """

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        state = mix(seeds.astype(np.uint64) + golden)
        state = np.where(calls > 0, mix(state + calls.astype(np.uint64) * golden), state)
        bits = mix(state + (positions.astype(np.uint64) + np.uint64(1)) * golden)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(slots=True)
class Rows:
    """Settings of a batch, one entry per row (float64, int64 or bool arrays of length N)."""

    temperature: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    penalty: np.ndarray
    top_k: np.ndarray
    constrained: np.ndarray
    record_mask: np.ndarray
    seed: np.ndarray
    call: np.ndarray
    position: np.ndarray

    @classmethod
    def of(cls, params: Sequence[SamplingParams], positions: Sequence[int]) -> Rows:
        floats = [(p.temperature, p.top_p, p.min_p, p.repetition_penalty) for p in params]
        temperature, top_p, min_p, penalty = np.array(floats, np.float64).T
        seeds = [(p.seed & 0xFFFFFFFFFFFFFFFF, p.call, at) for p, at in zip(params, positions, strict=True)]
        top_k = np.array([p.top_k for p in params], np.int64)
        constrained = np.array([p.grammar != "" for p in params], bool)
        record = np.array([p.record_mask for p in params], bool) | constrained
        return cls(temperature, top_p, min_p, penalty, top_k, constrained, record, *np.array(seeds, np.uint64).T)


def sample(logits: Tensor, rows: Rows, *, seen: dict[int, Tensor] | None = None) -> tuple[Tensor, Tensor, list[bytes]]:
    """Draw one token per row. logits float32 [N, V] (overwritten) → tokens int64 [N], log-probs float32 [N], and the
    sets that they were drawn from (`verl.models.sampling_mask`), [] where no row records one.

    Tokens that a grammar does not allow (`constrained`) have −inf already. seen: for each row with a repetition
    penalty, the ids (int64) of its prompt and response so far. A row whose logits are not finite gets some token with
    log-prob nan.
    """
    for row, ids in (seen or {}).items():
        penalty = float(rows.penalty[row])
        values = logits[row, ids]
        logits[row, ids] = torch.where(values > 0, values / penalty, values * penalty)

    greedy = rows.temperature == 0.0
    divisor = np.where(greedy, 1.0, rows.temperature)
    if (divisor != 1.0).any():
        logits.div_(_column(divisor, logits))
    filtered = ~greedy & ((rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0) | rows.constrained)
    sets = _truncate(logits, rows, np.flatnonzero(filtered)) if filtered.any() else []

    fused = platform_of(logits.device).fused_operators()
    if fused is not None and fused.draw is not None:
        uniform = np.where(greedy, -1.0, uniforms(rows.seed, rows.call, rows.position))
        return *fused.draw(logits, torch.from_numpy(uniform)), sets
    probs = logits.softmax(-1)
    if greedy.all():
        tokens = probs.argmax(-1)
    else:
        tokens = _draw(probs, torch.from_numpy(uniforms(rows.seed, rows.call, rows.position)))
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(logits.device), probs.argmax(-1), tokens)
    return tokens, probs.gather(1, tokens[:, None])[:, 0].log(), sets


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).float().to(like.device)[:, None]


def _draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse of the cumulative distribution, in two levels (chunks, then inside one), summed in float64: on the host
    where the device has none."""
    vocab = probs.shape[1]
    place = probs.device if platform_of(probs.device).has_float64 else torch.device("cpu")
    whole = vocab // _CHUNK * _CHUNK
    sums = probs[:, :whole].unflatten(1, (-1, _CHUNK)).sum(-1)
    if whole < vocab:
        sums = torch.cat((sums, probs[:, whole:].sum(-1, keepdim=True)), 1)
    cumulative = _running(sums.to(place).double())
    target = (uniform.to(place) * cumulative[:, -1])[:, None]
    # searchsorted(right) finds the first sum above the target, so a chunk or token of probability 0 is never taken
    chunk = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    before = torch.where(chunk > 0, cumulative.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    ids = chunk * _CHUNK + torch.arange(_CHUNK, device=place)
    inside = probs.gather(1, ids.clamp(max=vocab - 1).to(probs.device)).to(place)
    inside = _running(inside.masked_fill_(ids >= vocab, 0.0).double())
    # the chunk's float32 sum and this float64 one may differ by rounding: stay below the last step
    offset = torch.minimum(target - before, inside[:, -1:] * (1.0 - 2.0**-40))
    # not a number anywhere finds no step at all: the log-prob then says so
    tokens = (chunk * _CHUNK + torch.searchsorted(inside, offset, right=True))[:, 0].clamp_(max=vocab - 1)
    return tokens.to(probs.device)


def _running(x: Tensor) -> Tensor:
    """Running sums of each row [N, K]. In deterministic mode torch refuses them on CUDA, because a single row is summed
    in an order that may vary. Only that case varies, so a single row gets a second one."""
    if platform_of(x.device).deterministic_cumsum or not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(-1)
    torch.use_deterministic_algorithms(False)
    try:
        return (x if len(x) > 1 else x.expand(2, -1)).cumsum(-1).narrow(0, 0, len(x))
    finally:
        torch.use_deterministic_algorithms(True)


def _truncate(logits: Tensor, rows: Rows, which: np.ndarray) -> list[bytes]:
    """Put -inf where top-k, top-p or min-p say so, in the rows `which`. Returns what is left of each row that records
    it, b"" of others; [] if none does."""
    every = len(which) == len(logits)
    index = torch.from_numpy(which).to(logits.device)
    part = logits if every else logits.index_select(0, index)
    truncate(part, rows.top_k[which], rows.top_p[which], rows.min_p[which])
    if not every:
        logits.index_copy_(0, index, part)
    if not (recorded := rows.record_mask[which]).any():
        return []
    sets = [b""] * len(logits)
    encoded = encode_sets(part[torch.from_numpy(recorded).to(part.device)] > -torch.inf)
    for row, encoded_set in zip(which[recorded], encoded, strict=True):
        sets[row] = encoded_set
    return sets
