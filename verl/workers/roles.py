"""The roles of a run, over the ranks that play them: what the loop asks of the policy, and the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.algorithms.objective import trajectory_tokens
from verl.engine.training.base import StepResult
from verl.tracking.mfu import ModelCost
from verl.trajectory import Batch, Segment
from verl.workers.group import Placed, WorkerGroup
from verl.workers.plan import MiniBatch, UpdatePlan, UpdateResult, summarise

if TYPE_CHECKING:
    from verl.engine.rollout.base import RolloutEngine
    from verl.tracking.profiler import Profiler
    from verl.weight_sync.base import WeightSync

Outcome = tuple[MiniBatch, StepResult | None]


class Role:
    """A model on the ranks of a group, under the name that its checkpoint has. Base class and, as it is, a frozen role."""

    trained = False

    def __init__(self, name: str, group: WorkerGroup):
        self.name, self.group = name, group

    def forward(self, batch: Batch, phase: str, outputs: Mapping[str, str]) -> None:
        """A forward pass over the batch: fill the columns of `outputs` (output of the engine → column)."""
        placed = self.group.place(batch, phase)
        self.group.fill(placed, self.group.call("forward", phase, self.name, dict(outputs), doing=phase))

    def save(self, part: str, directory: Path) -> None:
        """Write the `weights` (a Hugging Face directory) or the `optimizer`; ranks write in parallel, to a folder that all
        nodes see."""
        self.group.call("save", self.name, part, str(directory.absolute()), doing="save_checkpoint")

    def load(self, part: str, directory: Path) -> None:
        """Inverse of `save`."""
        self.group.call("load", self.name, part, str(directory.absolute()), doing="load_checkpoint")


class Policy(Role):
    """The policy in training. Advantages, masks and old log-probs arrive on the batch."""

    trained = True

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps a full batch leads to."""
        return self.group.plan.updates_per_step

    def update(self, batch: Batch, *, step: int) -> UpdateResult:
        """Mini-batches × epochs of optimizer steps. A group is never split between mini-batches.

        Fills `old_log_probs` and `entropy` of rows that have none: a step's only update is its own old policy. One call for
        the whole step, unless each mini-batch has to be corrected by itself.
        """
        group, plan = self.group, self.group.plan
        placed = group.place(batch, "update_actor")
        minis = plan.mini_batches(batch, step)
        with group.lock:
            if any(plan.needs_pass(mini) for mini in minis):
                outcomes = [self._corrected(mini, placed) for mini in minis]
            else:
                outcomes = self._execute(minis, placed)
            rate = group.call("advance", doing="update_actor")[0]
            group.moved = True
        out = summarise(outcomes)
        out.metrics["actor/lr"] = rate
        return out

    def _corrected(self, mini: MiniBatch, placed: Placed) -> Outcome:
        if not mini.usable:
            return mini, None
        mini, found = self.group.plan.corrected(mini, lambda rows: self._log_probs(rows, placed))
        placed.known -= {"loss_mask", "is_weights"}
        outcome = self._execute([mini], placed)[0]
        if outcome[1] is not None:
            outcome[1].metrics |= found
        return outcome

    def _execute(self, minis: Sequence[MiniBatch], placed: Placed) -> list[Outcome]:
        """Optimizer steps on all ranks, those without a token left out."""
        group = self.group
        work = [mini for mini in minis if mini.usable]
        if not work:
            return [(mini, None) for mini in minis]
        news = group.news(placed, group.plan.columns)
        orders = self._orders(work, placed)
        each = [(*new, orders[rank]) for new, rank in zip(news, group.dp_ranks, strict=True)]
        done = group.call("update", each=each, doing="update_actor")
        group.fill(placed, [one["columns"] for one in done])
        results = iter(StepResult(**result) for result in group.by_dp_rank(done)[0]["results"])
        return [(mini, next(results) if mini.usable else None) for mini in minis]

    def _orders(self, minis: Sequence[MiniBatch], placed: Placed) -> list[list[dict[str, Any]]]:
        """For each data-parallel rank its share of each mini-batch, with the counts of all ranks."""
        out: list[list[dict[str, Any]]] = [[] for _ in placed.parts]
        for mini in minis:
            counts = trajectory_tokens(mini.usable)
            by_row = None if counts is None else dict(zip(map(id, mini.usable), counts, strict=True))
            for rank, rows in enumerate(placed.positions(mini.usable)):
                part = placed.parts[rank]
                own = None if by_row is None else [by_row[id(part[i])] for i in rows]
                shares = {"denominators": asdict(mini.denominators), "trajectory_tokens": own}
                out[rank].append({"rows": np.array(rows, np.int64), **shares})
        return out

    def _log_probs(self, rows: list[Segment], placed: Placed) -> np.ndarray:
        """Log-probs of some of the batch's rows with the weights of this moment, float32 [ΣL]."""
        group, own = self.group, placed.positions(rows)
        each = [(np.array(own[rank], np.int64),) for rank in group.dp_ranks]
        flats = group.by_dp_rank(group.call("log_probs_of", each=each, doing="update_actor"))
        starts = [0] * group.dp_size
        out = []
        for row in rows:
            rank = placed.where[id(row)][0]
            out.append(flats[rank][starts[rank] : starts[rank] + row.length])
            starts[rank] += row.length
        return np.concatenate(out) if out else np.zeros(0, np.float32)

    def memory(self) -> dict[str, float]:
        """perf/max_memory_allocated_gb of an accelerator, GiB, the largest of all ranks; empty on a CPU."""
        found = [peak for peak in self.group.call("peak_memory", doing="peak_memory") if peak is not None]
        return {"perf/max_memory_allocated_gb": max(found)} if found else {}

    def cost(self) -> ModelCost | None:
        """What a pass takes, and the peak of all devices together; None where the peak is not known."""
        found = self.group.call("cost", doing="cost")[0]
        return None if found is None else ModelCost(**found)


@dataclass(slots=True)
class WorkerSet:
    """What the loop talks to, wherever it runs.

    roles    by name: "actor" is the policy, "ref" the reference if a pass of it is needed; none where only samples are wanted
    weight_sync  None without a policy: then the samplers have the weights of the model's files
    describe the devices, in words
    devices  training and sampling devices together, for rates per device
    release  gives the workers back at the end of a run
    profiler of all processes that the roles run in; None when nothing is to be profiled
    """

    roles: dict[str, Role]
    sampler: RolloutEngine
    weight_sync: WeightSync | None
    describe: str = ""
    devices: int = 1
    release: Callable[[], None] | None = None
    profiler: Profiler | None = None

    @property
    def policy(self) -> Policy:
        """The policy."""
        policy = self.roles["actor"]
        assert isinstance(policy, Policy)
        return policy

    def close(self) -> None:
        """Write what there is of a profile, stop sampling, then give everything back."""
        if self.profiler is not None:
            self.profiler.close()
        self.sampler.close()
        if self.release is not None:
            self.release()


def roles_of(group: WorkerGroup) -> dict[str, Role]:
    """The roles that the ranks of a group play."""
    return {name: (Policy if name == "actor" else Role)(name, group) for name in group.facts[0]["roles"]}


def update_plan(config: Any) -> UpdatePlan:
    """The plan of a run's updates."""
    actor = config.actor_rollout_ref.actor
    return UpdatePlan(
        actor,
        max_response_length=float(actor.loss_scale_factor or config.data.max_response_length),
        batch_prompts=config.data.train_batch_size,
        rollout_correction=config.algorithm.rollout_correction,
    )
