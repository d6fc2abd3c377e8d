"""Truncated distributions: which tokens top-k, top-p and min-p leave, as sets of ids, and logits of these alone.

A set is `bytes`, b"" for the whole vocabulary: a first byte 0 and its ids ascending, int32, or 1 and a bitmask of the
vocabulary, whichever is shorter. The sampler records the set of each draw, and the trainer normalises over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from verl.platform import platform_of

LOWEST = -1e30
"""The logit of a token outside of its set; finite, so that the entropy is."""
_IDS, _BITS = b"\0", b"\1"


def encode_sets(allowed: Tensor) -> list[bytes]:
    """The sets of bool [N, V]."""
    counts, ids = allowed.sum(1).tolist(), allowed.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    ends = zip(counts, accumulate(counts), strict=True)
    return [encode_set(ids[end - count : end], allowed.shape[1]) for count, end in ends]


def encode_set(ids: np.ndarray, vocabulary: int) -> bytes:
    """The set of these ids, ascending int32 [n]."""
    if len(ids) == vocabulary:
        return b""
    if 32 * len(ids) <= vocabulary:
        return _IDS + ids.tobytes()
    bits = np.zeros(vocabulary, bool)
    bits[ids] = True
    return _BITS + np.packbits(bits, bitorder="little").tobytes()


def decode_row(row: np.ndarray, vocabulary: int) -> bytes:
    """The set of a row int32 [1 + ceil(V / 32)] that a device has encoded: the number of ids, then they or the bits."""
    count = int(row[0])
    if count == vocabulary:
        return b""
    if 32 * count <= vocabulary:
        return _IDS + row[1 : 1 + count].tobytes()
    return _BITS + row[1:].tobytes()[: -(-vocabulary // 8)]


class SamplingMask:
    """The sets of R tokens, on a device."""

    def __init__(self, sets: Sequence[bytes], device: torch.device | str):
        self.sets, self._device = sets, device
        parts = [np.frombuffer(s, np.int32, offset=1) if s[:1] == _IDS else np.zeros(0, np.int32) for s in sets]
        counts = [len(part) for part in parts]
        self._starts = [0, *accumulate(counts)]
        self._ids = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *parts])).to(device)
        self._counts = torch.tensor(counts, dtype=torch.int64, device=device)
        self._whole = torch.tensor([not s for s in sets], dtype=torch.bool, device=device)
        self._wide = [row for row, s in enumerate(sets) if s[:1] == _BITS]
        size = max((len(sets[row]) - 1 for row in self._wide), default=0)
        bits = [np.frombuffer(sets[row][1:].ljust(size, b"\0"), np.uint8) for row in self._wide]
        self._bits = torch.from_numpy(np.stack(bits)).to(device) if bits else None

    @classmethod
    def of(cls, sets: Sequence[bytes], device: torch.device | str) -> SamplingMask | None:
        """None where every set is the whole vocabulary."""
        return cls(sets, device) if any(sets) else None

    def rows(self, which: Tensor) -> SamplingMask:
        """Those of some of the tokens, int64 [n]."""
        return SamplingMask([self.sets[row] for row in which.tolist()], self._device)

    def bar(self, z: Tensor, rows: slice, first: int = 0) -> Tensor:
        """Logits [rows, columns from `first` on] with LOWEST in place of what is not in the sets; in place, unless they
        have a gradient."""
        width = z.shape[1]
        ids = self._ids[self._starts[rows.start] : self._starts[rows.stop]].long() - first
        counts = self._counts[rows]
        of_row = torch.arange(len(counts), device=z.device).repeat_interleave(counts, output_size=len(ids))
        allowed = self._whole[rows, None].repeat(1, width + 1)  # the last column takes what is outside of the block
        allowed[of_row, ids.where((ids >= 0) & (ids < width), width)] = True
        wide = [i for i, row in enumerate(self._wide) if rows.start <= row < rows.stop]
        if wide and self._bits is not None:
            columns = torch.arange(first, first + width, device=z.device)
            there = columns < 8 * self._bits.shape[1]
            bytes_of = self._bits[wide[0] : wide[-1] + 1, (columns // 8).where(there, 0)]
            at = torch.tensor([self._wide[i] - rows.start for i in wide], device=z.device)
            allowed[at, :width] = ((bytes_of >> (columns % 8)) & 1).bool() & there
        barred = ~allowed[:, :width]
        return z.masked_fill(barred, LOWEST) if z.requires_grad else z.masked_fill_(barred, LOWEST)


def truncate(logits: Tensor, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> None:
    """Put -inf where top-k, top-p on what it left, or min-p say so, in place; logits float32 [N, V], limits [N]. Ties
    at the border are kept, all of them."""
    vocabulary = logits.shape[1]
    top_k = np.where(top_k > 0, top_k, vocabulary).clip(max=vocabulary)
    if (top_k < vocabulary).any():
        logits.masked_fill_(logits < _kth_largest(logits, top_k), -torch.inf)
    if (top_p < 1.0).any():
        probs = logits.softmax(-1)
        logits.masked_fill_(probs < _nucleus(probs, top_p), -torch.inf)
    if (min_p > 0.0).any():
        with np.errstate(divide="ignore"):
            floor = torch.from_numpy(np.log(min_p)).float().to(logits.device)[:, None]
        logits.masked_fill_(logits < logits.amax(-1, keepdim=True) + floor, -torch.inf)


def _kth_largest(values: Tensor, k: np.ndarray) -> Tensor:
    """The k[i]-th largest of each row, [N, 1]; -inf where k is the whole row."""
    vocab = values.shape[1]
    widest = int(k[k < vocab].max())
    top = values.topk(widest, dim=-1).values
    at = torch.from_numpy(np.minimum(k, widest) - 1).to(values.device)[:, None]
    off = torch.from_numpy(k >= vocab).to(values.device)[:, None]
    return top.gather(1, at).masked_fill(off, -torch.inf)


def _nucleus(probs: Tensor, top_p: np.ndarray) -> Tensor:
    """The largest threshold t, [N, 1], such that the tokens with p ≥ t have at least top_p together.

    Sorting a row costs a hundred passes over it on a CPU. Positive floats are ordered like their bit patterns,
    so bisecting the pattern finds the threshold exactly in at most 31 passes, to rounding where the device has no
    float64. Rows with top_p ≥ 1 get 0.
    """
    wide = torch.float64 if platform_of(probs.device).has_float64 else torch.float32
    off = torch.from_numpy(top_p >= 1.0).to(probs.device)[:, None]
    target = torch.from_numpy(top_p).to(wide).to(probs.device)[:, None] * probs.to(wide).sum(-1, keepdim=True)
    bits = probs.contiguous().view(torch.int32)
    low = torch.zeros_like(bits[:, :1])  # mass(low) ≥ wanted always
    high = bits.amax(-1, keepdim=True) + 1  # mass(high) = 0
    while int((high - low).max()) > 1:
        middle = low + (high - low) // 2
        mass = probs.masked_fill(bits < middle, 0.0).sum(-1, keepdim=True, dtype=wide)
        enough = mass >= target
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low.view(torch.float32).masked_fill(off, 0.0)
