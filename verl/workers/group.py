"""The ranks of a run, called together: directly in one process, through Ray on many devices.

A batch's segments travel once. Each mini-batch's groups are spread over the ranks, and the same ranks keep those rows
for every call of the step: only newer columns follow. In one process the rank works on the driver's own segments, and
nothing travels.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from verl.trajectory import COLUMNS, Batch, Media, Segment, segments_of
from verl.workers import payloads
from verl.workers.training_worker import Worker
from verl.workers.update_plan import UpdatePlan, partition

_FIRST = (*(name for name, column in COLUMNS.items() if column.context), "sampling_mask", "teacher_topk_ids")
"""Columns that travel with the rows: a forward pass reads them."""
Each = Sequence[Sequence[Any]] | None
"""The arguments of each worker, in their order; None where all get the same."""


class Calls(Protocol):
    """How `workers` are called. shares_rows: they work on the caller's segments."""

    shares_rows: bool
    workers: list[Any]

    def call(self, method: str, *args: Any, each: Each = None, doing: str = "") -> list[Any]:
        """method(*args) on every worker, or method(*each[i]) on worker i; results in the workers' order."""
        ...

    def share(self, value: Any, media: Iterable[Media | None] = ()) -> Sequence[Any]:
        """Arguments to pass for a large value that several workers get, and for the inputs of these images."""
        ...


class DirectCalls:
    """One worker in this process."""

    shares_rows = True

    def __init__(self, worker: Worker):
        self.workers = [worker]

    def call(self, method: str, *args: Any, each: Each = None, doing: str = "") -> list[Any]:
        """See `Calls.call`."""
        return [getattr(self.workers[0], method)(*(args if each is None else each[0]))]

    def share(self, value: Any, media: Iterable[Media | None] = ()) -> Sequence[Any]:
        """See `Calls.share`."""
        return [value, *(item.inputs for item in payloads.distinct_media(media))]


@dataclass(slots=True)
class Placed:
    """A batch on the ranks. `parts[d]` are the segments of data-parallel rank d, `known` the columns there."""

    batch: Batch
    parts: list[list[Segment]]
    known: set[str]
    where: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, part in enumerate(self.parts):
            for place, row in enumerate(part):
                self.where[id(row)] = (rank, place)

    def positions(self, rows: Sequence[Segment]) -> list[list[int]]:
        """Where these rows are, by data-parallel rank, in their order."""
        places: list[list[int]] = [[] for _ in self.parts]
        for row in rows:
            rank, place = self.where[id(row)]
            places[rank].append(place)
        return places


class WorkerGroup:
    """`facts[i]` is what `Worker.build` of rank i returned. Ranks that share rows have the same dp_rank; of the
    ranks of one dp_rank the first whose `holds_outputs` is not False returns the results for all.

    `lock` is held through every call, so that a restarted sampler receives the weights of one version; `moved` is True
    between an update and the push of its weights.
    """

    def __init__(self, calls: Calls, facts: Sequence[Mapping[str, Any]], *, plan: UpdatePlan, balance: bool = True):
        self.calls, self.plan = calls, plan
        self.facts = list(facts)
        self.dp_ranks = [int(fact["dp_rank"]) for fact in facts]
        self.dp_size = max(self.dp_ranks) + 1
        self._speaker = [self._first(rank) for rank in range(self.dp_size)]
        self.lock = threading.RLock()
        self.moved = False
        self._balance = balance
        self._placed: Placed | None = None

    def _first(self, dp_rank: int) -> int:
        ranks = [i for i, rank in enumerate(self.dp_ranks) if rank == dp_rank]
        return next(i for i in ranks if self.facts[i].get("holds_outputs", True))

    def call(self, method: str, *args: Any, doing: str, each: Each = None) -> list[Any]:
        """A call to every worker under the lock; results in the workers' order."""
        with self.lock:
            return self.calls.call(method, *args, each=each, doing=doing)

    def by_dp_rank(self, results: Sequence[Any]) -> list[Any]:
        """Of the results of a call, one for each data-parallel rank."""
        return [results[i] for i in self._speaker]

    def split(self, batch: Batch) -> list[list[Segment]]:
        """A batch's segments by the data-parallel rank that gets them."""
        parts: list[list[Segment]] = [[] for _ in range(self.dp_size)]
        for trajectories in self.plan.parts(batch):
            rows = segments_of(trajectories)
            for rank, chosen in enumerate(partition(rows, self.dp_size, balance=self._balance)):
                parts[rank] += [rows[i] for i in chosen]
        return parts

    def place(self, batch: Batch, doing: str) -> Placed:
        """Hand a batch's segments to the ranks, unless they are there."""
        if self._placed is not None and self._placed.batch is batch:
            return self._placed
        parts = self.split(batch)
        columns = [name for name in _FIRST if any(name in row.columns for part in parts for row in part)]
        self._placed = placed = Placed(batch, parts, set(columns))
        if self.calls.shares_rows:
            self.call("take_rows", parts[0], doing=doing)
        else:
            encoded = [payloads.encode(part, columns) for part in parts]
            arguments = self._shared(encoded, [[row.media for row in part] for part in parts])
            self.call("receive_rows", each=arguments, doing=doing)
        return placed

    def _shared(
        self, encoded: Sequence[Any], media: Sequence[Sequence[Media | None]] | None = None
    ) -> list[Sequence[Any]]:
        """Arguments by worker: one payload, with its images, for each data-parallel rank, shared by its neighbours."""
        images = media or [[]] * len(encoded)
        shared = [self.calls.share(payload, used) for payload, used in zip(encoded, images, strict=True)]
        return [shared[rank] for rank in self.dp_ranks]

    def news(self, placed: Placed, columns: Sequence[str]) -> list[Sequence[Any]]:
        """Arguments by worker: those of `columns` that the ranks do not have yet."""
        missing = [name for name in columns if name not in placed.known]
        placed.known |= set(missing)
        if self.calls.shares_rows:
            return [({},)] * len(self.dp_ranks)
        return self._shared([payloads.collect(part, missing) for part in placed.parts])

    def fill(
        self, placed: Placed, columns: Sequence[payloads.Payload], positions: list[list[int]] | None = None
    ) -> None:
        """Put columns that the workers returned on the driver's rows; only on `positions`, by data-parallel rank."""
        parts = placed.parts
        if positions is not None:
            parts = [[part[i] for i in places] for part, places in zip(parts, positions, strict=True)]
        for part, returned in zip(parts, self.by_dp_rank(columns), strict=True):
            if not self.calls.shares_rows:
                payloads.fill(part, {name: np.array(values) for name, values in returned.items()})
            placed.known |= set(returned)
