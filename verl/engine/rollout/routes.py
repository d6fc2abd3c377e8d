"""Expert routes as a sampler records them, token by token and call by call. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from verl.trajectory import UNKNOWN_EXPERT


@dataclass(slots=True)
class RecordedRoutes:
    """The routes of a sequence's tokens from its first on, in parts [n, layers, k]; the first one of a token counts."""

    parts: list[np.ndarray] = field(default_factory=list)
    count: int = 0

    def add(self, start: int, routes: np.ndarray) -> None:
        """Routes of the tokens from `start` on, of which some may be known already."""
        new = routes[self.count - start :]
        if len(new):
            self.parts.append(new)
            self.count += len(new)

    def cut(self, count: int) -> None:
        """Forget those of all tokens but the first `count`."""
        if count < self.count:
            self.parts, self.count = [np.concatenate(self.parts)[:count]], count


def first_routes(parts: Iterable[np.ndarray], length: int) -> np.ndarray | None:
    """Of each of the first `length` tokens of a sequence the routes of the first part that has it, UNKNOWN_EXPERT where none
    does: int16 [length, layers, k]. Every part begins with the first token. None without parts."""
    known = RecordedRoutes()
    for part in parts:
        known.add(0, part[:length])
    if not known.parts:
        return None
    rest = np.full((length - known.count, *known.parts[0].shape[1:]), UNKNOWN_EXPERT, np.int16)
    return np.concatenate([*known.parts, rest])
