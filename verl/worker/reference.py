"""The reference role: the policy that KL is measured against. Never trained."""

from __future__ import annotations

from verl.engine.training.base import TrainingEngine
from verl.trajectory import Batch


class Reference:
    """Log-probs under the frozen reference weights, at the rollout's temperature."""

    def __init__(self, engine: TrainingEngine, *, temperature: float):
        self.engine = engine
        self._temperature = temperature

    def log_probs(self, batch: Batch) -> None:
        """Fill `ref_log_probs`."""
        self.engine.onload()
        stats = self.engine.log_probs(batch.trajectories, temperature=self._temperature)
        batch.fill_flat("ref_log_probs", stats.log_probs)
        self.engine.offload()
