"""Which rank gets which responses: whole groups, so that a prompt is computed once, and about as many tokens each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from verl.trajectory import Trajectory


def partition(rows: Sequence[Trajectory], ranks: int, *, balance: bool = True) -> list[list[int]]:
    """Positions in `rows` for each of `ranks`, ascending; every position exactly once, some ranks maybe none.

    Groups stay whole unless there are fewer of them than ranks; then the longest are halved. `balance` gives the
    heaviest group that is left to the rank that has least, otherwise ranks get runs of the rows in their order.
    The same rows give the same partition.
    """
    units = _units(rows, ranks)
    if not balance:
        return _runs(units, ranks)
    weights = [_weight(rows, unit) for unit in units]
    heap = [(0, rank) for rank in range(ranks)]
    out: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(range(len(units)), key=lambda u: (-weights[u], units[u][0])):
        load, rank = heapq.heappop(heap)
        out[rank] += units[number]
        heapq.heappush(heap, (load + weights[number], rank))
    return [sorted(part) for part in out]


def _units(rows: Sequence[Trajectory], ranks: int) -> list[list[int]]:
    """Positions by group; halved, longest first, until there is one unit for each rank."""
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.uid, []).append(i)
    units = list(groups.values())
    while len(units) < ranks:
        longest = max(range(len(units)), key=lambda u: len(units[u]), default=None)
        if longest is None or len(units[longest]) < 2:
            break
        unit = units[longest]
        units[longest : longest + 1] = [unit[: len(unit) // 2], unit[len(unit) // 2 :]]
    return units


def _weight(rows: Sequence[Trajectory], unit: Sequence[int]) -> int:
    return len(rows[unit[0]].prompt.ids) + sum(rows[i].length for i in unit)


def _runs(units: Sequence[list[int]], ranks: int) -> list[list[int]]:
    size, extra = divmod(len(units), ranks)
    out, start = [], 0
    for rank in range(ranks):
        end = start + size + (rank < extra)
        out.append(sorted(i for unit in units[start:end] for i in unit))
        start = end
    return out
