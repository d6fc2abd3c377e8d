"""What a weight transfer does: after a push both sides hold the same weights under one version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SyncResult:
    """bytes moved, seconds taken, and whether checksums were compared."""

    bytes: int
    seconds: float
    verified: bool = False


class WeightSyncError(RuntimeError):
    """The two sides hold different weights after a push; names the first that differs."""


class WeightSync(ABC):
    """Moves weights from a training engine to a sampling engine."""

    @abstractmethod
    def push(self, version: int, *, verify: bool = False) -> SyncResult:
        """Make the sampler hold the trainer's current weights. Raises WeightSyncError when `verify` finds a difference."""
