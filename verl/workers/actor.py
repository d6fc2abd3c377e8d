"""The actor role: the policy in training. Plans a step's mini-batches and drives the engine of this process.

It knows the objective only as a callable; advantages, masks and old log-probs arrive on the trajectories.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from verl.engine.training.base import StepResult, TrainingEngine
from verl.tracking.mfu import ModelCost
from verl.trajectory import Batch, Trajectory
from verl.workers import execute
from verl.workers.plan import MiniBatch, Refusal, UpdatePlan, UpdateResult, summarise

__all__ = ["Actor", "ActorRole", "Refusal", "UpdateResult"]


class ActorRole(ABC):
    """What the loop asks of the policy in training, on one device or on many."""

    plan: UpdatePlan

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps a full batch leads to."""
        return self.plan.updates_per_step

    @abstractmethod
    def old_log_probs(self, batch: Batch) -> None:
        """Fill `old_log_probs` and `entropy` with the weights of the step's start."""

    @abstractmethod
    def update(self, batch: Batch, *, step: int) -> UpdateResult:
        """Mini-batches × epochs of optimizer steps. A group is never split between mini-batches.

        Fills `old_log_probs` and `entropy` of rows that have none: a step's only update is its own old policy.
        """

    @abstractmethod
    def memory(self) -> dict[str, float]:
        """perf/max_memory_allocated_gb of an accelerator, GiB; empty on a CPU."""

    def cost(self) -> ModelCost | None:
        """What a pass takes, and the peak of all devices together; None where the peak is not known."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """The devices, in words."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Hugging Face directory of the policy."""

    @abstractmethod
    def save_optimizer(self, directory: Path) -> None:
        """Optimizer and schedule state."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Inverse of `save`."""

    @abstractmethod
    def load_optimizer(self, directory: Path) -> None:
        """Inverse of `save_optimizer`."""


class Actor(ActorRole):
    """The policy beside a training engine in this process.

    `actor_cfg` is `actor_rollout_ref.actor`; `temperature` that of the rollout; for the rest see `UpdatePlan`.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        actor_cfg: Any,
        *,
        temperature: float,
        max_response_length: float,
        batch_prompts: int,
        rollout_correction: Any = None,
    ):
        self.engine = engine
        self.plan = UpdatePlan(
            actor_cfg,
            max_response_length=max_response_length,
            batch_prompts=batch_prompts,
            rollout_correction=rollout_correction,
        )
        self._cfg = actor_cfg
        self._temperature = temperature

    def old_log_probs(self, batch: Batch) -> None:
        """See `ActorRole.old_log_probs`."""
        with self.engine.on_device():
            stats = self.engine.log_probs(batch.trajectories, temperature=self._temperature, entropy=True)
        batch.fill_flat("old_log_probs", stats.log_probs)
        if stats.entropy is not None:
            batch.fill_flat("entropy", stats.entropy)

    def update(self, batch: Batch, *, step: int) -> UpdateResult:
        """See `ActorRole.update`."""
        with self.engine.on_device(optimizer=True):
            out = summarise(self._update(mini) for mini in self.plan.mini_batches(batch, step))
        out.metrics["actor/lr"] = self.engine.advance()
        return out

    def _update(self, mini: MiniBatch) -> tuple[MiniBatch, StepResult | None]:
        mini, found = self.plan.corrected(mini, self._log_probs)
        if not mini.usable:
            return mini, None
        result = execute.update(
            self.engine,
            self._cfg,
            mini.usable,
            mini.denominators,
            self._temperature,
            self.plan.rollout_correction,
        )
        result.metrics |= found
        return mini, result

    def _log_probs(self, rows: list[Trajectory]) -> np.ndarray:
        return self.engine.log_probs(rows, temperature=self._temperature).log_probs

    def memory(self) -> dict[str, float]:
        """See `ActorRole.memory`."""
        platform = self.engine.platform
        return {} if platform.on_host else {"perf/max_memory_allocated_gb": platform.peak_memory() / 2**30}

    def cost(self) -> ModelCost | None:
        """See `ActorRole.cost`."""
        return self.engine.cost()

    def describe(self) -> str:
        """See `ActorRole.describe`."""
        return self.engine.platform.describe()

    def save(self, directory: Path) -> None:
        """See `ActorRole.save`."""
        self.engine.save_weights(directory)

    def save_optimizer(self, directory: Path) -> None:
        """See `ActorRole.save_optimizer`."""
        self.engine.save_optimizer(directory)

    def load(self, directory: Path) -> None:
        """See `ActorRole.load`."""
        self.engine.load_weights(directory)

    def load_optimizer(self, directory: Path) -> None:
        """See `ActorRole.load_optimizer`."""
        self.engine.load_optimizer(directory)
