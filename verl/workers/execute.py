"""Running one mini-batch on a training engine: the worker's half of an update, whoever planned it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from verl.algorithms.objective import ActorObjective, LossDenominators
from verl.engine.training.base import MicroBatch, StepResult, TrainingEngine
from verl.trajectory import Trajectory


class RecordOldLogProbs:
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


def update(
    engine: TrainingEngine,
    actor_cfg: Any,
    rows: Sequence[Trajectory],
    denominators: LossDenominators,
    temperature: float,
    rollout_correction: Any = None,
) -> StepResult:
    """One optimizer step on `rows`, which are this rank's share of a mini-batch with these global counts.

    Fills `old_log_probs` and `entropy` of rows that have none.
    """
    objective = RecordOldLogProbs(ActorObjective(actor_cfg, denominators, rollout_correction))
    return engine.step(rows, objective, temperature=temperature, entropy=True)


def reference_log_probs(
    engine: TrainingEngine, rows: Sequence[Trajectory], *, temperature: float
) -> np.ndarray:
    """Log-probs of the reference, float32 [ΣL]: of an engine of its own, or of the base below the policy's adapter."""
    base = engine.without_adapter() if engine.adapted else nullcontext()
    with engine.on_device(), base:
        return engine.log_probs(rows, temperature=temperature).log_probs
