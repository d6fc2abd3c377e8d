"""The roles of a run, over the ranks that execute them: what the loop asks of the policy, the reference, a critic,
teachers and a classifier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl.algorithms.advantage import WITHOUT_CONTRAST
from verl.algorithms.distillation import joined_sets
from verl.algorithms.flat_tokens import trajectory_tokens
from verl.algorithms.needs import teacher_columns, teacher_roles
from verl.config import Config
from verl.config.schema.actor import ActorConfig, CriticConfig
from verl.config.schema.base import setting
from verl.data.teacher_prompt import Reading
from verl.engine.rollout.base import RolloutEngine
from verl.engine.training.base import TrainStepResult
from verl.errors import UserError
from verl.models.layers import ModelCost
from verl.tracking.names import spread
from verl.tracking.profiler import Profiler
from verl.trajectory import Batch, Prompt, Segment, Trajectory, segments_of
from verl.weight_sync.sender import WeightSync
from verl.workers.group import Placed, WorkerGroup
from verl.workers.update_plan import CORRECTED, MiniBatch, UpdatePlan, UpdateResult, partition, summarise

Outcome = tuple[MiniBatch, TrainStepResult | None]


class Role:
    """A model on the ranks of a group, under the name that its checkpoint has. The base class, and a frozen role."""

    trained = False
    #: Whether its weights change in a run, so that checkpoints hold them.
    moves = False

    def __init__(self, name: str, group: WorkerGroup):
        self.name, self.group = name, group

    def forward(self, batch: Batch, phase: str, outputs: Mapping[str, str]) -> None:
        """A forward pass over the batch: fill the columns of `outputs` (output of the engine → column)."""
        placed = self.group.place(batch, phase)
        self.group.fill(placed, self.group.call("forward", phase, self.name, dict(outputs), doing=phase))

    def onload(self, *, optimizer: bool) -> None:
        """Bring to the device what is in host memory while the role is idle: weights, and for updates the optimizer's
        state."""
        self.group.call("onload", self.name, optimizer, doing="onload")

    def offload(self) -> None:
        """Back to host memory."""
        self.group.call("run", self.name, "offload", doing="offload")

    def save(self, part: str, directory: Path) -> None:
        """Write the `weights` (a Hugging Face directory) or the `optimizer`; ranks write in parallel, to a folder that
        all nodes see."""
        self.group.call("save", self.name, part, str(directory.absolute()), doing="save_checkpoint")

    def load(self, part: str, directory: Path) -> None:
        """Inverse of `save`."""
        self.group.call("run", self.name, f"load_{part}", directory.absolute(), doing="load_checkpoint")


class Classifier(Role):
    """A sequence classifier that scores."""

    async def scores(self, computing: Callable[[Role], AbstractContextManager[None]], batch: Batch) -> None:
        """Fill the column `scores`, in `computing(self)`. Remote ranks compute while the event loop goes on; a device
        of this process has one caller at a time."""

        def compute() -> None:
            with computing(self):
                self.forward(batch, "reward", {"scores": "scores"})

        if self.group.calls.shares_rows:
            compute()
        else:
            await asyncio.to_thread(compute)


class Teacher(Role):
    """A model that computes the rows whose prompt `choose` gives it.

    config   the group `distillation`; `cfg` that of this teacher
    prompt   makes of a response, and those of its group, the one that it reads; None: the response as it is
    """

    def __init__(self, name: str, group: WorkerGroup, choose: Callable[[Prompt], str], config: Config):
        super().__init__(name, group)
        self._choose, self._loss = choose, config.distillation.distillation_loss
        self._cfg = teacher_roles(config)[name]
        self.rate: float | None = self._cfg.get("update_rate")
        self.moves = self.rate is not None
        self.prompt: Reading | None = None

    def forward(self, batch: Batch, phase: str, outputs: Mapping[str, str]) -> None:
        """See `Role.forward`; a teacher that follows the policy moves before. UserError for a prompt without a
        teacher."""
        if self.rate is not None:  # the policy is that of the step's start: the last step's update is in it
            self.group.call("follow", self.name, self.rate, doing=phase)
        chosen = [t for t in batch if self._choose(t.prompt) == self.name]
        if self.prompt is None:
            self._compute(chosen, batch, phase, outputs)
        else:
            groups = Batch(chosen).groups()
            self._read([(t, [self.prompt(t, group)]) for group in groups for t in group], phase, outputs)
            if count := self._cfg.get("contrast"):
                contrasts = [(t, self.prompt.contrasts(t, group, count)) for group in groups for t in group]
                self._read(contrasts, phase, {"log_probs": "teacher_contrast_log_probs"})
                for trajectory, others in contrasts:
                    if not others:
                        trajectory.extra[WITHOUT_CONTRAST] = True
                        trajectory.put("teacher_contrast_log_probs", trajectory.column("teacher_log_probs"))
        if "teacher_other_ids" in outputs.values():
            self._join_sets(chosen, batch)

    def _read(
        self, readings: list[tuple[Trajectory, list[Trajectory]]], phase: str, outputs: Mapping[str, str]
    ) -> None:
        """A pass over what it reads in place of each response; of several the log of the mean probability."""
        super().forward(Batch(row for _, rows in readings for row in rows), phase, outputs)
        assert self.prompt is not None
        for trajectory, rows in readings:
            for column in outputs.values() if rows else ():
                values = [self.prompt.column(trajectory, row, column) for row in rows]
                if len(rows) > 1:
                    mean = np.logaddexp.reduce(np.array(values, np.float32)) - np.log(np.float32(len(rows)))
                    trajectory.put(column, mean)
                else:
                    trajectory.put(column, values[0])

    def _join_sets(self, chosen: Iterable[Trajectory], batch: Batch) -> None:
        """The policy's most likely tokens and the teacher's become one set (`joined_sets`)."""
        names = ("teacher_topk_ids", "teacher_topk_log_probs", "teacher_other_ids", "teacher_other_log_probs")
        for segment in segments_of(chosen):
            values = [getattr(segment, name) for name in names]
            ids, log_probs = joined_sets(*values, symmetric=self._loss.token_set == "difference")
            segment.put(names[0], ids)
            segment.put(names[1], log_probs)
            for name in names[2:]:
                segment.put(name, None)
        self.group.place(batch, "teacher").known -= set(names)

    def _compute(self, chosen: list[Trajectory], batch: Batch, phase: str, outputs: Mapping[str, str]) -> None:
        group, placed = self.group, self.group.place(batch, phase)
        rows = placed.positions(segments_of(chosen))
        calls = [(phase, self.name, dict(outputs), np.array(rows[rank], np.int64)) for rank in group.dp_ranks]
        group.fill(placed, group.call("forward", each=calls, doing=phase), rows)


def _tokens(rows: Iterable[Segment]) -> int:
    return sum(len(row.context_ids) + row.length for row in rows)


class TrainedRole(Role):
    """A model in training. `plan`: its mini-batches. Advantages, returns and masks arrive on the batch."""

    trained = moves = True

    def __init__(self, name: str, group: WorkerGroup, plan: UpdatePlan):
        super().__init__(name, group)
        self.plan, self.phase = plan, f"update_{name}"

    @property
    def compute_dtype(self) -> str:
        """The data type of its matrix products, as torch prints it."""
        return str(self.group.facts[0]["compute_dtypes"][self.name])

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps a full batch leads to."""
        return self.plan.updates_per_step

    def update(self, batch: Batch, *, step: int) -> UpdateResult:
        """Mini-batches × epochs of optimizer steps. A group is never split between mini-batches."""
        placed = self.group.place(batch, self.phase)
        with self.group.lock:
            outcomes = self._outcomes(self.plan.mini_batches(batch, step), placed, step)
            rate = self.group.call("run", self.name, "advance", doing=self.phase)[0]
        out = summarise(outcomes)
        out.metrics[f"{self.name}/lr"] = rate
        return out

    def optimizer_norm(self) -> float | None:
        """See `TrainingEngine.optimizer_norm`."""
        norm: float | None = self.group.call("run", self.name, "optimizer_norm", doing="save_checkpoint")[0]
        return norm

    def cost(self) -> ModelCost | None:
        """What a pass takes, and the peak of all devices together; None where the peak is not known."""
        cost: ModelCost | None = self.group.call("run", self.name, "cost", doing="cost")[0]
        return cost

    def _outcomes(self, minis: Sequence[MiniBatch], placed: Placed, step: int) -> list[Outcome]:
        return self._execute(minis, placed)

    def _execute(self, minis: Sequence[MiniBatch], placed: Placed) -> list[Outcome]:
        """Optimizer steps on all ranks, those without a token left out."""
        group = self.group
        work = [mini for mini in minis if mini.usable]
        if not work:
            return [(mini, None) for mini in minis]
        news = group.news(placed, self.plan.columns)
        orders = self._orders(work, placed)
        arguments = [(self.name, *new, orders[rank]) for new, rank in zip(news, group.dp_ranks, strict=True)]
        replies = group.call("update", each=arguments, doing=self.phase)
        group.fill(placed, [reply["columns"] for reply in replies])
        results = iter(group.by_dp_rank(replies)[0]["results"])
        return [(mini, next(results) if mini.usable else None) for mini in minis]

    def _orders(self, minis: Sequence[MiniBatch], placed: Placed) -> list[list[dict[str, Any]]]:
        """For each data-parallel rank its share of each mini-batch, with the counts of all ranks."""
        out: list[list[dict[str, Any]]] = [[] for _ in placed.parts]
        for mini in minis:
            counts = trajectory_tokens(mini.usable)
            by_row = None if counts is None else dict(zip(map(id, mini.usable), counts, strict=True))
            for rank, rows in enumerate(placed.positions(mini.usable)):
                part = placed.parts[rank]
                tokens = None if by_row is None else [by_row[id(part[i])] for i in rows]
                shares = {"denominators": mini.denominators, "trajectory_tokens": tokens}
                out[rank].append({"rows": np.array(rows, np.int64), **shares})
        return out


class Policy(TrainedRole):
    """The policy. An update fills `old_log_probs` and `entropy` of rows that have none: the only update of a step is
    its own old policy. One call for the whole step, unless each mini-batch must be corrected by itself.

    before_update: what (batch, step) becomes before its updates: loss weights, demonstrations.
    """

    def __init__(self, name: str, group: WorkerGroup, plan: UpdatePlan):
        super().__init__(name, group, plan)
        self.before_update: list[Callable[[Batch, int], Batch]] = []

    def update(self, batch: Batch, *, step: int) -> UpdateResult:
        """See `TrainedRole.update`."""
        for change in self.before_update:
            batch = change(batch, step)
        return super().update(batch, step=step)

    def _outcomes(self, minis: Sequence[MiniBatch], placed: Placed, step: int) -> list[Outcome]:
        self.group.moved = True
        if any(self.plan.needs_pass(mini) for mini in minis):
            return [self._corrected(mini, placed, step, number) for number, mini in enumerate(minis)]
        return self._execute(minis, placed)

    def _corrected(self, mini: MiniBatch, placed: Placed, step: int, number: int) -> Outcome:
        if not mini.usable:
            return mini, None
        mini = self.plan.corrected(mini, lambda rows: self._log_probs(rows, placed), step, number)
        placed.known -= CORRECTED
        return self._execute([mini], placed)[0]

    def _log_probs(self, rows: list[Segment], placed: Placed) -> np.ndarray:
        """Log-probs of some of the batch's rows with the weights of this moment, float32 [ΣL]."""
        group, positions = self.group, placed.positions(rows)
        arguments = [(np.array(positions[rank], np.int64),) for rank in group.dp_ranks]
        flats = group.by_dp_rank(group.call("log_probs_of", each=arguments, doing="update_actor"))
        starts = [0] * group.dp_size
        out = []
        for row in rows:
            rank = placed.where[id(row)][0]
            out.append(flats[rank][starts[rank] : starts[rank] + row.length])
            starts[rank] += row.length
        return np.concatenate(out) if out else np.zeros(0, np.float32)

    def fill_adapter(self, value: float, layers: Collection[str] | None = None) -> list[str]:
        """See `TrainingEngine.fill_adapter`; the layers of all ranks."""
        self.group.moved = True
        of_ranks = self.group.call("run", self.name, "fill_adapter", value, layers, doing="sync_proof")
        return list(dict.fromkeys(name for names in of_ranks for name in names))

    def memory(self) -> dict[str, float]:
        """perf/max_memory_{allocated,reserved}_gb of an accelerator, GiB, the largest of all ranks; empty on a CPU."""
        peaks = self.group.call("peak_memory", doing="peak_memory")
        return {f"perf/max_memory_{kind}_gb": max(peak[kind] for peak in peaks) for kind in peaks[0]}

    def balance(self, batch: Batch) -> dict[str, float]:
        """global_seqlen/*: tokens of each rank, were the batch split in its order, and as it is; empty for one rank."""
        if self.group.dp_size == 1:
            return {}
        rows = segments_of(batch)
        runs = partition(rows, self.group.dp_size, balance=False)
        in_order = [_tokens(rows[i] for i in run) for run in runs]
        placed = [_tokens(part) for part in self.group.split(batch)]
        values = spread("global_seqlen", in_order)
        values["global_seqlen/minmax_diff"] = max(in_order) - min(in_order)
        return values | {"global_seqlen/balanced_min": min(placed), "global_seqlen/balanced_max": max(placed)}

    def images(self) -> dict[str, int]:
        """See `TrainingEngine.images`; of all ranks together."""
        counts = self.group.by_dp_rank(self.group.call("run", self.name, "images", doing="images"))
        return {name: sum(part[name] for part in counts) for name in counts[0]}


@dataclass(slots=True)
class WorkerSet:
    """What the loop talks to, wherever it runs.

    roles    by name: "actor" is the policy, "ref" the reference and "critic" the value model if a pass of them is
             needed, "reward_model" a classifier that scores, "teacher_…" the teachers of distillation; none for
             sampling alone
    weight_sync  None without a policy: then the samplers have the weights of the model's files
    describe the devices, in words
    devices  training and sampling devices together, for rates per device
    judge    samples a judge's model, where that has devices of its own
    release  gives the workers back at the end of a run
    profiler of all processes that the roles run in; None when nothing is to be profiled
    """

    roles: dict[str, Role]
    sampler: RolloutEngine
    weight_sync: WeightSync | None
    describe: str = ""
    devices: int = 1
    judge: RolloutEngine | None = None
    release: Callable[[], None] | None = None
    profiler: Profiler | None = None

    @property
    def policy(self) -> Policy:
        """The policy."""
        policy = self.roles["actor"]
        assert isinstance(policy, Policy)
        return policy

    def trained(self, *, policy: bool) -> list[TrainedRole]:
        """The roles that a step updates, the critic first; without the policy while the critic warms up."""
        return trained_of(self.roles, policy=policy)

    def close(self) -> None:
        """Write what there is of a profile, stop sampling, then give everything back."""
        if self.profiler is not None:
            self.profiler.close()
        self.sampler.close()
        if self.release is not None:
            self.release()


def trained_of(roles: Mapping[str, Role], *, policy: bool) -> list[TrainedRole]:
    """The roles that a step updates, the critic first; without the policy while the critic warms up."""
    trained_roles = [role for role in roles.values() if isinstance(role, TrainedRole)]
    chosen = [role for role in trained_roles if policy or not isinstance(role, Policy)]
    return sorted(chosen, key=lambda role: isinstance(role, Policy))


def roles_of(group: WorkerGroup, config: Config) -> dict[str, Role]:
    """The roles that the ranks of a group play."""
    roles: dict[str, Role] = {name: Role(name, group) for name in group.facts[0]["roles"]}
    if "actor" in roles:
        roles["actor"] = Policy("actor", group, group.plan)
    for name in roles.keys() & teacher_roles(config).keys():
        roles[name] = Teacher(name, group, teacher_of(config), config)
    if "critic" in roles:
        roles["critic"] = TrainedRole("critic", group, critic_plan(config))
    if "reward_model" in roles:
        roles["reward_model"] = Classifier("reward_model", group)
    return roles


def update_plan(config: Config) -> UpdatePlan:
    """The plan of the policy's updates."""
    return _plan(
        config,
        config.actor_rollout_ref.actor,
        rollout_correction=config.algorithm.rollout_correction,
        of_distillation=teacher_columns(config),
        by_source=setting(config.algorithm, "by_source"),
    )


def teacher_of(config: Config) -> Callable[[Prompt], str]:
    """The teacher's role for a prompt: of several, the one whose key is the prompt's `distillation.teacher_key`."""
    roles, column = teacher_roles(config), config.distillation.teacher_key
    by_key = {str(cfg.get("key") or name.removeprefix("teacher_")): name for name, cfg in roles.items()}
    sources = ("data_source", config.data.reward_fn_key)

    def choose(prompt: Prompt) -> str:
        if len(roles) == 1:
            return next(iter(roles))
        value = prompt.data_source if column in sources else prompt.columns.get(column)
        if str(value) not in by_key:
            raise UserError(
                f"{prompt.file} row {prompt.row}: {column}={value!r} has no teacher; distillation.teacher_models has "
                f"those of {', '.join(by_key)}. Add one, or leave the row out"
            )
        return by_key[str(value)]

    return choose


def critic_plan(config: Config) -> UpdatePlan:
    """The plan of the critic's updates."""
    return _plan(config, config.critic, of_critic=True)


def _plan(config: Config, role_cfg: ActorConfig | CriticConfig, **options: Any) -> UpdatePlan:
    longest = float(role_cfg.loss_scale_factor or config.data.max_response_length)
    prompts = config.data.train_batch_size
    return UpdatePlan(role_cfg, max_response_length=longest, batch_prompts=prompts, **options)
