"""Do both sides hold the same weights? Digests by name, of whole tensors or of a sample of each.

A sample takes up to 16,384 elements of a tensor, spread evenly over each of its dimensions. It finds a tensor that was
not sent, that was sent under another name, or that has an outdated shard, and costs milliseconds for a whole model. It
does not find a single wrong element: that is what the full mode is for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch

FULL, SAMPLED, UNVERIFIED = "full", "sampled", ""
"""How a push is verified: every byte of every weight, a sample of every weight, or not at all."""

Weights = Iterable[tuple[str, torch.Tensor]]
"""Names and tensors, maybe gathered as they are asked for."""

_SAMPLE = 1 << 14  # elements of a tensor
_NAMED = 3  # tensors of an error message


class WeightSyncError(RuntimeError):
    """The two sides hold different weights after a push, or a transfer failed; names the weights, or the side."""

    def __init__(self, text: str):
        super().__init__(f"weight sync: {text.removeprefix('weight sync: ')}")


def checksums(weights: Weights, verify: str = FULL, *, dtype: torch.dtype | None = None) -> dict[str, str]:
    """Name → BLAKE2b of the tensor's bytes, shape and dtype included. Tensors may live on any device.

    verify: `FULL` or `SAMPLED`. dtype: hash floating point weights as they are after conversion to it (what a sampler
    of that type receives).
    """
    return {name: digest(tensor, verify, dtype) for name, tensor in weights}


def digest(tensor: torch.Tensor, verify: str = FULL, dtype: torch.dtype | None = None) -> str:
    """BLAKE2b of a tensor's shape, data type and bytes, in hexadecimal."""
    values = tensor.detach()
    if verify == SAMPLED and values.numel() > _SAMPLE:
        values = sample(values)
    if dtype is not None and values.is_floating_point():
        values = values.to(dtype)
    flat = values.contiguous().cpu().reshape(-1).view(torch.uint8)
    hasher = hashlib.blake2b(f"{tuple(tensor.shape)}{values.dtype}".encode(), digest_size=16)
    hasher.update(flat.numpy().data)
    return hasher.hexdigest()


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """About `_SAMPLE` elements, spread evenly over every dimension, the first and the last index of each included."""
    most = max(2, int(_SAMPLE ** (1 / tensor.dim())))
    for dim, size in enumerate(tensor.shape):
        if size > most:
            places = torch.linspace(0, size - 1, most, device=tensor.device).long()
            tensor = tensor.index_select(dim, places)
    return tensor


def digesting(
    weights: Weights, into: dict[str, str], verify: str = FULL, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass weights on and note the digest of each: the checksums of a stream that can be read only once."""
    try:
        for name, tensor in weights:
            into[name] = digest(tensor, verify, dtype)
            yield name, tensor
    finally:
        close_stream(weights)


def close_stream(weights: object) -> None:
    """Tell a stream that it is not read any further, now and not when it is collected: its sender waits for that."""
    close = getattr(weights, "close", None)
    if close is not None:
        close()


def compare(trainer: dict[str, str], sampler: dict[str, str]) -> None:
    """Raise WeightSyncError that names the weights which are missing on a side or differ."""
    for wrong, problem in (
        (trainer.keys() - sampler.keys(), "the sampler lacks {}"),
        (sampler.keys() - trainer.keys(), "the sampler holds {}, which the trainer does not have"),
        ({n for n in trainer if trainer[n] != sampler.get(n)}, "trainer and sampler differ in {}"),
    ):
        if wrong:
            raise WeightSyncError(f"{problem.format(named(wrong))}")


def named(names: Iterable[str]) -> str:
    """The first names in order, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(ordered[:_NAMED]) + more
