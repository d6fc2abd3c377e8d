"""What a weight transfer does: after a push both sides hold the same weights under one version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

FULL, SAMPLED, UNVERIFIED = "full", "sampled", ""
"""How a push is verified: every byte of every weight, a sample of every weight, or not at all."""


@dataclass(frozen=True, slots=True)
class SyncResult:
    """bytes moved, seconds taken, and whether both sides were compared."""

    bytes: int
    seconds: float
    verified: bool = False


class WeightSyncError(RuntimeError):
    """The two sides hold different weights after a push, or a transfer failed; names the weights, or the side."""


class WeightSync(ABC):
    """Moves weights from a training engine to a sampling engine."""

    _proven = False

    def push(self, version: int, *, verify: bool = False) -> SyncResult:
        """Make the sampler hold the trainer's current weights. Raises WeightSyncError when it does not.

        verify: compare everything afterwards. The first push compares a sample of every weight without being asked.
        """
        result = self._push(version, FULL if verify else UNVERIFIED if self._proven else SAMPLED)
        self._proven = True
        return result

    @abstractmethod
    def _push(self, version: int, verify: str) -> SyncResult:
        """`push`, verified as `FULL`, `SAMPLED` or `UNVERIFIED` says."""
