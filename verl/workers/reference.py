"""The reference role: the policy that KL is measured against. Never trained."""

from __future__ import annotations

from abc import ABC, abstractmethod

from verl.engine.training.base import TrainingEngine
from verl.trajectory import Batch
from verl.workers.execute import reference_log_probs


class ReferenceRole(ABC):
    """What the loop asks of the reference, on one device or on many."""

    @abstractmethod
    def log_probs(self, batch: Batch) -> None:
        """Fill `ref_log_probs`, at the rollout's temperature."""


class Reference(ReferenceRole):
    """The frozen reference weights in an engine of this process; with LoRA the policy's own, without its adapter."""

    def __init__(self, engine: TrainingEngine, *, temperature: float):
        self.engine = engine
        self._temperature = temperature

    def log_probs(self, batch: Batch) -> None:
        """See `ReferenceRole.log_probs`."""
        found = reference_log_probs(self.engine, batch.trajectories, temperature=self._temperature)
        batch.fill_flat("ref_log_probs", found)
