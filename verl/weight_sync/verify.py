"""Checksums of weights by name, for `trainer.verify_weight_sync` and the invariance tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from verl.weight_sync.base import WeightSyncError


def checksums(
    weights: Iterable[tuple[str, torch.Tensor]], *, dtype: torch.dtype | None = None
) -> dict[str, str]:
    """Name → BLAKE2b of the tensor's bytes, shape and dtype included. Tensors may live on any device.

    dtype: hash floating point weights as they are after conversion to it (what a sampler of that type receives).
    """
    out = {}
    for name, tensor in weights:
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.detach().to(dtype)
        flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        digest = hashlib.blake2b(f"{tuple(tensor.shape)}{tensor.dtype}".encode(), digest_size=16)
        digest.update(flat.numpy().data)
        out[name] = digest.hexdigest()
    return out


def compare(trainer: dict[str, str], sampler: dict[str, str]) -> None:
    """Raise WeightSyncError naming the first weight that is missing on a side or differs."""
    for name in sorted(trainer.keys() | sampler.keys()):
        if name not in sampler:
            raise WeightSyncError(f"weight sync: the sampler lacks {name}")
        if name not in trainer:
            raise WeightSyncError(f"weight sync: the sampler holds {name}, which the trainer does not have")
        if trainer[name] != sampler[name]:
            raise WeightSyncError(f"weight sync: {name} differs between trainer and sampler")
