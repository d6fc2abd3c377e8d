"""What training engines with an optimizer have in common: its learning rate moves with the training steps."""

from __future__ import annotations

from typing import Any, ClassVar

from verl.config.schema.training import OptimConfig
from verl.engine.training.base import TrainingEngine
from verl.engine.training.optimizer import Schedule


class ScheduledEngine(TrainingEngine):
    """A training engine whose subclass builds `_optimizer` from the settings `_optim`, where it is trainable."""

    role: str
    #: (optimizer, settings, number of training steps) → the schedule.
    _build_schedule: ClassVar[Any] = Schedule
    _optimizer: Any = None
    _optim: OptimConfig

    def _require_optimizer(self) -> Any:
        if self._optimizer is None:
            raise RuntimeError(f"the {self.role} engine was built with trainable=False")
        return self._optimizer

    def schedule(self, total_steps: int) -> None:
        """See `TrainingEngine.schedule`."""
        self._schedule = self._build_schedule(self._require_optimizer(), self._optim, total_steps)

    def advance(self) -> float:
        """See `TrainingEngine.advance`."""
        self._require_optimizer()
        return float(self._schedule.advance())
