"""What is said of a weight transfer: how it is verified, what it moved, why it failed."""

from __future__ import annotations

from dataclasses import dataclass

FULL, SAMPLED, UNVERIFIED = "full", "sampled", ""
"""How a push is verified: every byte of every weight, a sample of every weight, or not at all."""


@dataclass(frozen=True, slots=True)
class SyncResult:
    """bytes moved, seconds taken, and of how many weights it was verified that both sides have the same."""

    bytes: int
    seconds: float
    verified: int = 0


class WeightSyncError(RuntimeError):
    """The two sides hold different weights after a push, or a transfer failed; names the weights, or the side."""

    def __init__(self, text: str):
        super().__init__(f"weight sync: {text.removeprefix('weight sync: ')}")
