"""The actor role: the policy in training. Splits a step's batch into mini-batches and drives the engine.

It knows the objective only as a callable; advantages, masks and old log-probs arrive on the trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.algorithms.objective import ActorObjective, count_normalisers
from verl.engine.training.base import MicroBatch, StepResult, TrainingEngine
from verl.tracking.reduce import merge_metrics
from verl.trajectory import Batch, Trajectory, split_groups


@dataclass(slots=True)
class Refusal:
    """A mini-batch whose update was refused, kept for the dump."""

    reason: str
    rows: list[Trajectory]


@dataclass(slots=True)
class UpdateResult:
    """What a step's updates did. metrics are means over mini-batches and epochs.

    `computed` tokens went through the model; without shared prompts it would have been `tokens`.
    """

    metrics: dict[str, float]
    updates: int = 0
    skipped: int = 0
    tokens: int = 0
    computed: int = 0
    refused: list[Refusal] = field(default_factory=list)


class _Recording:
    """Wraps an objective: keeps the first pass's log-probs and entropy of rows that have none yet.

    With one optimizer step per batch the old log-probs are the update's own, so no extra pass is needed.
    """

    def __init__(self, objective: ActorObjective):
        self._objective = objective

    def __call__(self, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        result = self._objective(micro)
        sizes = [row.length for row in micro.rows]
        for column, flat in (("old_log_probs", micro.log_probs), ("entropy", micro.entropy)):
            if flat is None:
                continue
            parts = np.split(flat.detach().float().cpu().numpy(), np.cumsum(sizes)[:-1])
            for row, part in zip(micro.rows, parts, strict=True):
                if getattr(row, column) is None:
                    setattr(row, column, part.copy())
        return result


def _usable(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """The rows with a token to train on."""
    return [row for row in rows if row.loss_mask is not None and row.loss_mask.any()]


class Actor:
    """The policy's role beside a training engine.

    `actor_cfg` is `actor_rollout_ref.actor`; `temperature` that of the rollout; `horizon` is H of
    seq-mean-token-sum-norm; `batch_prompts` the prompts of a step (fixes the number of mini-batches).
    """

    def __init__(
        self,
        engine: TrainingEngine,
        actor_cfg: Any,
        *,
        temperature: float,
        horizon: float,
        batch_prompts: int,
    ):
        self.engine = engine
        self._cfg = actor_cfg
        self._temperature = temperature
        self._horizon = horizon
        self._mini_batches = max(1, math.ceil(batch_prompts / actor_cfg.ppo_mini_batch_size))

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps a full batch leads to."""
        return self._mini_batches * self._cfg.ppo_epochs

    def old_log_probs(self, batch: Batch) -> None:
        """Fill `old_log_probs` and `entropy` with the weights of the step's start."""
        stats = self.engine.log_probs(batch.trajectories, temperature=self._temperature, entropy=True)
        batch.fill_flat("old_log_probs", stats.log_probs)
        if stats.entropy is not None:
            batch.fill_flat("entropy", stats.entropy)

    def update(self, batch: Batch, *, step: int) -> UpdateResult:
        """Mini-batches × epochs of optimizer steps. A group is never split between mini-batches."""
        out = UpdateResult(metrics={})
        parts: list[tuple[dict[str, float], float]] = []
        minis = split_groups(batch.groups(), self._mini_batches)
        for epoch in range(self._cfg.ppo_epochs):
            for index in self._order(len(minis), step, epoch):
                rows = [row for group in minis[index] for row in group]
                result = self._update_mini(rows)
                if result is None:
                    out.skipped += 1
                    continue
                if result.refused:
                    out.refused.append(Refusal(result.refused, rows))
                else:
                    out.tokens += sum(len(row.prompt.ids) + row.length - 1 for row in _usable(rows))
                    out.computed += result.tokens
                    out.updates += 1
                    parts.append((result.metrics, 1.0))
        out.metrics = merge_metrics(parts)
        out.metrics["actor/lr"] = self.engine.advance()
        return out

    def _order(self, count: int, step: int, epoch: int) -> Sequence[int]:
        if not self._cfg.shuffle:
            return range(count)
        rng = np.random.default_rng([self._cfg.data_loader_seed, step, epoch])
        return [int(i) for i in rng.permutation(count)]

    def _update_mini(self, rows: list[Trajectory]) -> StepResult | None:
        """One optimizer step, or None when no token is left to train on."""
        usable = _usable(rows)
        if not usable:
            return None
        objective = ActorObjective(self._cfg, count_normalisers(usable, self._horizon))
        return self.engine.step(usable, _Recording(objective), temperature=self._temperature, entropy=True)

    def memory(self) -> dict[str, float]:
        """perf/max_memory_allocated_gb of an accelerator, GiB; empty on a CPU."""
        platform = self.engine.platform
        return (
            {} if platform.name == "cpu" else {"perf/max_memory_allocated_gb": platform.peak_memory() / 2**30}
        )

    def save(self, directory: Path) -> None:
        """Hugging Face directory of the policy."""
        self.engine.save_weights(directory)

    def save_optimizer(self, directory: Path) -> None:
        """Optimizer and schedule state."""
        self.engine.save_optimizer(directory)
