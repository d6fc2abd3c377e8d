"""Supervised training in the processes that torchrun started: what rank 0 does for all, and what the others do.

Every rank reads the data and computes its share of each batch. Rank 0 alone keeps records and seals checkpoints:
what a checkpoint holds is written by all, when rank 0 says so and where it says.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from verl.data.rows import BadRow
from verl.data.sft import SFTRow
from verl.engine.training.base import TrainingEngine
from verl.engine.training.process_group import all_gather_json, on_all_ranks
from verl.trajectory import Segment, Trajectory
from verl.workers.update_plan import partition

_T = TypeVar("_T")
Jobs = Mapping[str, Callable[[Path], Any]]


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of the run; `local` is its number on its machine. One process needs no group."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @classmethod
    def of_environment(cls) -> Ranks:
        """As torchrun says; one process if it did not start this one."""
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
        return cls(*(int(os.environ.get(name, default)) for name, default in names.items()))

    @property
    def lead(self) -> bool:
        return self.rank == 0

    def share(self, rows: Sequence[Trajectory], engine: TrainingEngine) -> list[Segment]:
        """This rank's rows of a batch that every rank has, about as many tokens as the others; no pair is cut."""
        segments = [segment for row in rows for segment in row.segments]
        return [segments[i] for i in partition(segments, engine.dp_size, halve=False)[engine.dp_rank]]

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, one that JSON holds."""
        return [value] if self.size == 1 else all_gather_json(value)

    def add(self, numbers: Sequence[float], engine: TrainingEngine) -> list[float]:
        """Sums over ranks with different rows, of those that hold outputs."""
        parts = self.gather([engine.dp_rank, list(numbers)] if engine.holds_outputs else None)
        by_share = dict(part for part in parts if part)
        return [sum(column) for column in zip(*(by_share[place] for place in sorted(by_share)), strict=True)]

    def first(self, work: Callable[[], _T]) -> _T:
        """What work() gives on rank 0, on every rank; the value is one that JSON holds. A UserError is all ranks'."""
        if self.size == 1:
            return work()
        mine: Any = on_all_ranks(lambda: work() if self.lead else None)
        return all_gather_json(mine)[0]

    def draw(
        self, data: Any, numbers: Sequence[int], others: Iterable[int], ratio: float
    ) -> tuple[dict[int, SFTRow], dict[int, BadRow]]:
        """Rows by number, the same on every rank, and those that a rank could not draw: each counts as a bad row of
        `data` and is replaced by the next of `others`. DataError where these are too many."""
        rows: dict[int, SFTRow] = {}
        failed: dict[int, BadRow] = {}
        spare_numbers = iter(others)
        while numbers:
            bad: dict[int, BadRow] = {}
            for number in numbers:
                try:
                    rows[number] = data[number]
                except BadRow as error:
                    bad[number] = error
            bad = self._anywhere(bad) if getattr(data, "processor", None) is not None else bad
            for number, why in bad.items():
                rows.pop(number, None)
                data.leave_out(number, why, ratio)
            failed |= bad
            numbers = list(islice(spare_numbers, len(bad)))
        return rows, failed

    def _anywhere(self, bad: dict[int, BadRow]) -> dict[int, BadRow]:
        """What failed on any rank, as on the first of them: an address may answer to some of them only."""
        gathered = self.gather([[number, error.problem, error.detail] for number, error in bad.items()])
        failed = {number: BadRow(*why) for part in reversed(gathered) for number, *why in part}
        return dict(sorted(failed.items()))

    def save(self, jobs: Jobs, seal: Callable[[Jobs], Any]) -> None:
        """seal(jobs) on rank 0; each job that it calls is run by all ranks at once.

        A job that fails elsewhere has failed on rank 0 too, which reports it and goes on without that checkpoint.
        """
        if self.lead:

            def everywhere(name: str, directory: Path) -> None:
                self.gather([name, str(directory)])
                jobs[name](directory)

            try:
                seal({name: partial(everywhere, name) for name in jobs})
            finally:
                self.gather(None)
            return
        while (job := self.gather(None)[0]) is not None:
            name, directory = job
            try:
                jobs[name](Path(directory))
            except Exception:  # as on rank 0, whose save outlives whatever it is
                if self.local == 0:
                    traceback.print_exc()
