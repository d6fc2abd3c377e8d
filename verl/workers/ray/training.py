"""The policy and the reference on many ranks: the driver plans and scatters, the ranks compute in step.

A batch's rows travel once. Each mini-batch's groups are spread over the ranks, and the same ranks keep those rows
for every call of the step: only columns that came into being since then follow.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import exceptions as faults

from verl.engine.training.base import StepResult
from verl.errors import UserError
from verl.tracking.mfu import ModelCost
from verl.trajectory import Batch, Trajectory
from verl.workers import codec
from verl.workers.actor import ActorRole
from verl.workers.balance import partition
from verl.workers.plan import MiniBatch, UpdatePlan, UpdateResult, summarise
from verl.workers.ray.worker_group import RayWorkerGroup, store_full
from verl.workers.reference import ReferenceRole

_FIRST = ("old_log_probs", "ref_log_probs")
_UPDATE = ("loss_mask", "advantages", "is_weights", "old_log_probs", "ref_log_probs", "rollout_log_probs")
Outcome = tuple[MiniBatch, StepResult | None]


@dataclass(slots=True)
class Placed:
    """A batch on the ranks. `parts[d]` are the rows of data-parallel rank d; `known` the columns it has."""

    batch: Batch
    parts: list[list[Trajectory]]
    known: set[str]
    where: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, part in enumerate(self.parts):
            for place, row in enumerate(part):
                self.where[id(row)] = (rank, place)

    def positions(self, rows: Sequence[Trajectory]) -> list[np.ndarray]:
        """Where these rows are, by data-parallel rank, in their order; int64."""
        found: list[list[int]] = [[] for _ in self.parts]
        for row in rows:
            rank, place = self.where[id(row)]
            found[rank].append(place)
        return [np.array(places, np.int64) for places in found]


class Training:
    """Training workers, and the batch that is with them. `dp_ranks[i]` is the data-parallel rank of worker i.

    `lock` is held through every call, so that whoever restarts a sampler finds the weights of one version.
    """

    def __init__(
        self,
        group: RayWorkerGroup,
        dp_ranks: Sequence[int],
        *,
        plan: UpdatePlan,
        temperature: float,
        balance: bool,
    ):
        self.group, self.plan, self.temperature = group, plan, temperature
        self.dp_ranks = list(dp_ranks)
        self.dp_size = max(dp_ranks) + 1
        self.lock = threading.RLock()
        self.moved = False
        self._balance = balance
        self._placed: Placed | None = None

    def call(
        self, method: str, *args: Any, doing: str, each: Sequence[Sequence[Any]] | None = None
    ) -> list[Any]:
        """`RayWorkerGroup.call` under the lock."""
        with self.lock:
            return self.group.call(method, *args, each=each, doing=doing)

    def place(self, batch: Batch, doing: str) -> Placed:
        """Send a batch's rows to the ranks, unless they are there."""
        if self._placed is not None and self._placed.batch is batch:
            return self._placed
        parts: list[list[Trajectory]] = [[] for _ in range(self.dp_size)]
        for rows in self.plan.parts(batch):
            for rank, chosen in enumerate(partition(rows, self.dp_size, balance=self._balance)):
                parts[rank] += [rows[i] for i in chosen]
        columns = [name for name in _FIRST if any(getattr(row, name) is not None for row in batch)]
        placed = Placed(batch, parts, set(columns))
        self.call("take_rows", each=self.each([codec.encode(part, columns) for part in parts]), doing=doing)
        self._placed = placed
        return placed

    def each(self, payloads: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Arguments by worker: one reference for each data-parallel rank, shared by its neighbours."""
        try:
            refs = [ray.put(payload) for payload in payloads]
        except (faults.ObjectStoreFullError, faults.OutOfDiskError) as error:
            raise UserError(store_full(error)) from error
        return [(refs[rank],) for rank in self.dp_ranks]

    def fill(self, placed: Placed, responses: Sequence[codec.Payload]) -> None:
        """Put columns back on the driver's rows. Neighbours of a data-parallel rank give the same; one counts."""
        for rank, part in enumerate(placed.parts):
            response = responses[self.dp_ranks.index(rank)]
            codec.fill(part, {name: np.array(values) for name, values in response.items()})
            placed.known |= {name for name in response if not name.startswith("has.")}


class ActorGroup(ActorRole):
    """The policy on many ranks."""

    def __init__(self, training: Training, describe: str):
        self.training = training
        self.plan = training.plan
        self._describe = describe
        self._bypass = self.plan.correction.bypass

    def old_log_probs(self, batch: Batch) -> None:
        """See `ActorRole.old_log_probs`."""
        training = self.training
        placed = training.place(batch, "old_log_prob")
        training.fill(placed, training.call("old_log_probs", training.temperature, doing="old_log_prob"))

    def update(self, batch: Batch, *, step: int) -> UpdateResult:
        """See `ActorRole.update`. One call for the whole step, unless each mini-batch has to be corrected by itself."""
        training = self.training
        placed = training.place(batch, "update_actor")
        minis = self.plan.mini_batches(batch, step)
        with training.lock:
            if self.plan.correction.needs_mini_batch_pass:
                outcomes = [self._corrected(mini, placed) for mini in minis]
            else:
                outcomes = self._execute(minis, placed)
            lr = training.call("advance", doing="update_actor")[0]
            training.moved = True
        out = summarise(outcomes)
        out.metrics["actor/lr"] = lr
        return out

    def _corrected(self, mini: MiniBatch, placed: Placed) -> Outcome:
        mini, found = self.plan.corrected(mini, lambda rows: self._log_probs(rows, placed))
        placed.known -= {"loss_mask", "is_weights"}
        outcome = self._execute([mini], placed)[0]
        if outcome[1] is not None:
            outcome[1].metrics |= found
        return outcome

    def _execute(self, minis: Sequence[MiniBatch], placed: Placed) -> list[Outcome]:
        """Optimizer steps on all ranks, those without a token left out."""
        training = self.training
        work = [mini for mini in minis if mini.usable]
        if not work:
            return [(mini, None) for mini in minis]
        columns = [n for n in _UPDATE if n not in placed.known and (n != "rollout_log_probs" or self._bypass)]
        shipped = training.each([codec.collect(part, columns) for part in placed.parts])
        placed.known |= set(columns)
        orders = [self._orders(work, placed, rank) for rank in range(training.dp_size)]
        each = [
            (ref, orders[rank], training.temperature)
            for (ref,), rank in zip(shipped, training.dp_ranks, strict=True)
        ]
        responses = training.call("update", each=each, doing="update_actor")
        training.fill(placed, [response["columns"] for response in responses])
        results = iter(StepResult(**result) for result in responses[0]["results"])
        return [(mini, next(results) if mini.usable else None) for mini in minis]

    def _orders(self, minis: Sequence[MiniBatch], placed: Placed, rank: int) -> list[dict[str, Any]]:
        """A rank's share of each mini-batch, with the counts of all ranks."""
        return [
            {"rows": own[rank], "denominators": asdict(mini.denominators)}
            for mini in minis
            for own in [placed.positions(mini.usable)]
        ]

    def _log_probs(self, rows: list[Trajectory], placed: Placed) -> np.ndarray:
        """Log-probs of some of the batch's rows with the weights of this moment, float32 [ΣL]."""
        training = self.training
        own = placed.positions(rows)
        each = [(own[rank], training.temperature) for rank in training.dp_ranks]
        responses = training.call("log_probs_of", each=each, doing="update_actor")
        flats = [responses[training.dp_ranks.index(rank)] for rank in range(training.dp_size)]
        starts = [0] * training.dp_size
        out = []
        for row in rows:
            rank = placed.where[id(row)][0]
            out.append(flats[rank][starts[rank] : starts[rank] + row.length])
            starts[rank] += row.length
        return np.concatenate(out) if out else np.zeros(0, np.float32)

    def memory(self) -> dict[str, float]:
        """See `ActorRole.memory`: the largest of all ranks."""
        found = [peak for peak in self.training.call("peak_memory", doing="peak_memory") if peak is not None]
        return {"perf/max_memory_allocated_gb": max(found)} if found else {}

    def cost(self) -> ModelCost | None:
        """See `ActorRole.cost`."""
        found = self.training.call("cost", doing="cost")[0]
        return None if found is None else ModelCost(**found)

    def describe(self) -> str:
        """See `ActorRole.describe`."""
        return self._describe

    def save(self, directory: Path) -> None:
        """See `ActorRole.save`: the ranks write in parallel, to a folder that all nodes see."""
        self.training.call("save_weights", str(directory.absolute()), doing="save_checkpoint")

    def save_optimizer(self, directory: Path) -> None:
        """See `ActorRole.save_optimizer`."""
        self.training.call("save_optimizer", str(directory.absolute()), doing="save_checkpoint")

    def load(self, directory: Path) -> None:
        """See `ActorRole.load`."""
        self.training.call("load_weights", str(directory.absolute()), doing="load_checkpoint")

    def load_optimizer(self, directory: Path) -> None:
        """See `ActorRole.load_optimizer`."""
        self.training.call("load_optimizer", str(directory.absolute()), doing="load_checkpoint")


class ReferenceGroup(ReferenceRole):
    """The reference beside the policy, on the same ranks and the same rows."""

    def __init__(self, training: Training):
        self.training = training

    def log_probs(self, batch: Batch) -> None:
        """See `ReferenceRole.log_probs`."""
        training = self.training
        placed = training.place(batch, "ref")
        training.fill(placed, training.call("reference_log_probs", training.temperature, doing="ref"))
