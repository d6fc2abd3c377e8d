"""Checksums of weights by name, for `trainer.verify_weight_sync` and the invariance tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch

from verl.weight_sync.base import WeightSyncError


def checksums(
    weights: Iterable[tuple[str, torch.Tensor]], *, dtype: torch.dtype | None = None
) -> dict[str, str]:
    """Name → BLAKE2b of the tensor's bytes, shape and dtype included. Tensors may live on any device.

    dtype: hash floating point weights as they are after conversion to it (what a sampler of that type receives).
    """
    return {name: digest(tensor, dtype) for name, tensor in weights}


def digest(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> str:
    """BLAKE2b of a tensor's shape, data type and bytes, in hexadecimal."""
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    flat = tensor.contiguous().cpu().reshape(-1).view(torch.uint8)
    found = hashlib.blake2b(f"{tuple(tensor.shape)}{tensor.dtype}".encode(), digest_size=16)
    found.update(flat.numpy().data)
    return found.hexdigest()


def digesting(
    weights: Iterable[tuple[str, torch.Tensor]], into: dict[str, str], *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass weights on and note the digest of each: the checksums of a stream that can be read only once."""
    try:
        for name, tensor in weights:
            into[name] = digest(tensor, dtype)
            yield name, tensor
    finally:
        close_stream(weights)


def close_stream(weights: object) -> None:
    """Tell a stream that nobody reads on, now and not when it is collected: its sender waits for that."""
    close = getattr(weights, "close", None)
    if close is not None:
        close()


def compare(trainer: dict[str, str], sampler: dict[str, str]) -> None:
    """Raise WeightSyncError naming the first weight that is missing on a side or differs."""
    for name in sorted(trainer.keys() | sampler.keys()):
        if name not in sampler:
            raise WeightSyncError(f"weight sync: the sampler lacks {name}")
        if name not in trainer:
            raise WeightSyncError(f"weight sync: the sampler holds {name}, which the trainer does not have")
        if trainer[name] != sampler[name]:
            raise WeightSyncError(f"weight sync: {name} differs between trainer and sampler")
