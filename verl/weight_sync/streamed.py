"""From a trainer in this process to a sampler with weights of its own: one stream of full tensors.

The sampler's `push_weights` is the transfer; nothing is gathered twice and nothing is kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from verl.weight_sync.base import SyncResult, WeightSync

if TYPE_CHECKING:
    import torch

    from verl.engine.training.base import TrainingEngine


class OwnsWeights(Protocol):
    """A sampler that is sent its weights. weights_dtype: what floating point ones are converted to, None for nothing.

    holds_adapter: it has the base already and is sent the adapter alone.
    """

    weights_dtype: Any
    holds_adapter: bool

    def push_weights(
        self, weights: Iterable[tuple[str, Any]], version: int, *, checksums: bool = False
    ) -> SyncResult:
        """Replace all weights; keep checksums of what arrived if asked to."""

    def checksums(self) -> dict[str, str]:
        """Those checksums, by name."""


class StreamedSync(WeightSync):
    """Streams `trainer.named_weights()` into `sampler.push_weights`."""

    def __init__(self, trainer: TrainingEngine, sampler: OwnsWeights):
        self._trainer, self._sampler = trainer, sampler

    def push(self, version: int, *, verify: bool = False) -> SyncResult:
        """See WeightSync.push. `verify` compares what was sent with what arrived, in the data type it travelled in."""
        started = time.monotonic()
        self._trainer.release_cached_memory()  # the sampler is about to wake, first its weights and then its cache
        result = self._sampler.push_weights(self._weights(), version, checksums=verify)
        if verify:
            from verl.weight_sync.verify import checksums, compare

            sent = _converted(self._weights(), self._sampler.weights_dtype)
            compare(checksums(sent), self._sampler.checksums())
        self._trainer.release_cached_memory()
        return SyncResult(bytes=result.bytes, seconds=time.monotonic() - started, verified=verify)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        alone = self._sampler.holds_adapter
        return self._trainer.adapter_weights() if alone else self._trainer.named_weights()


def _converted(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
