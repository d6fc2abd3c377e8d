"""What supervised fine-tuning hands to the training engine: rows as trajectories, cross-entropy as the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from verl.trajectory import Prompt, Trajectory

if TYPE_CHECKING:
    import torch

    from verl.data.sft import SFTRow
    from verl.engine.training.base import MicroBatch


def as_trajectory(row: SFTRow, uid: str) -> Trajectory:
    """A row for the engine: prompt up to the first learned token (at least one), response up to the last."""
    learned = np.flatnonzero(row.mask[1:]) + 1
    start, stop = int(learned[0]), int(learned[-1]) + 1
    response = row.ids[start:stop]
    return Trajectory(
        prompt=Prompt(uid=uid, ids=row.ids[:start], messages=None),
        index=0,
        response_ids=response,
        response_mask=np.ones(len(response), bool),
        loss_mask=row.mask[start:stop],
    )


class CrossEntropy:
    """−Σ log p of the learned tokens / `total`, the learned tokens of the whole batch."""

    def __init__(self, total: int):
        self._total = total

    def __call__(self, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        import torch

        mask = np.concatenate([row.loss_mask for row in micro.rows])
        learned = micro.log_probs[torch.from_numpy(mask).to(micro.log_probs.device)]
        negative = -learned.sum()
        return negative / self._total, {"train/loss": (float(negative.detach()), float(learned.numel()))}
