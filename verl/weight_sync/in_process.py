"""Trainer and sampler in one process: the sampler reads the trainer's own tensors, nothing is copied.

A push tells the sampler that the values changed (it refreshes what it derived from them) and names the version.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from verl.weight_sync.base import SyncResult, WeightSync

if TYPE_CHECKING:
    from verl.engine.training.base import TrainingEngine


class SharesWeights(Protocol):
    """A sampler that works on the trainer's tensors."""

    def weights_updated(self, version: int) -> int | None:
        """Refresh what was derived from the weights; returns the bytes that took."""

    def checksums(self) -> dict[str, str]:
        """Digest of each weight the sampler uses; raises WeightSyncError for a derived copy that is not its weight."""


class InProcessSync(WeightSync):
    """Zero-copy transfer between two engines that share one module."""

    def __init__(
        self, trainer: TrainingEngine, sampler: SharesWeights, clock: Callable[[], float] = time.monotonic
    ):
        self._trainer = trainer
        self._sampler = sampler
        self._clock = clock

    def push(self, version: int, *, verify: bool = False) -> SyncResult:
        """See WeightSync.push."""
        started = self._clock()
        moved = self._sampler.weights_updated(version) or 0
        if verify:
            from verl.weight_sync.verify import checksums, compare

            compare(checksums(self._trainer.named_weights()), self._sampler.checksums())
        return SyncResult(bytes=int(moved), seconds=self._clock() - started, verified=verify)
