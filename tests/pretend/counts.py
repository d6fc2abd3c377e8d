"""What the pretend device counts, and the bounds of these counts that tests hold: lower them with the code."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

BOUNDS = {
    "training: launches a layer, forward": 28,
    "training: launches a layer, step": 69,
    "training: launches outside the layers, forward": 45,
    "training: launches outside the layers, step": 84,
    "training: KB a token and layer, step": 489,
}
"""Upper bounds of what is counted; those of the sampler are in tests/unit/engine/native/decode_counts.py."""


@dataclass(slots=True)
class Counts:
    """launches and waits: by operation, of a wait also by the line of verl that waited. bytes: read and written by
    launches. uploads: copies from the host. captures, replays: of graphs; what a replay runs is not counted again."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    uploads: int = 0
    captures: int = 0
    replays: int = 0


COUNTS = [Counts()]


def wait(name: str) -> None:
    """The host waits for the device."""
    frame = sys._getframe(1)
    while frame is not None and "/verl/" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    place = "?" if frame is None else f"{frame.f_code.co_filename.rpartition('/verl/')[2]}:{frame.f_lineno}"
    COUNTS[-1].waits[f"{name} at {place}"] += 1


@contextmanager
def counting() -> Iterator[Counts]:
    """Counts of the block alone."""
    COUNTS.append(counts := Counts())
    try:
        yield counts
    finally:
        COUNTS.remove(counts)
