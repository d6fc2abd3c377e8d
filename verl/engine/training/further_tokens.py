"""The loss of a layer that predicts a token further (`verl.models.mtp`), added to whatever a step minimises."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.algorithms.flat_tokens import loss_mask
from verl.config.schema.base import setting
from verl.engine.training.base import FURTHER, MicroBatch, MicroLoss
from verl.engine.training.process_group import all_gather_json

if TYPE_CHECKING:
    from verl.trajectory import Segment


@dataclass(frozen=True, slots=True)
class FurtherTokens:
    """factor: of the mean negative log-prob of the tokens that the loss counts."""

    role: str
    factor: float
    device: torch.device

    @classmethod
    def of(cls, model_cfg: Any, role: str, device: torch.device) -> FurtherTokens | None:
        """As `model.mtp` says; None where the layer is not trained."""
        if not (setting(model_cfg, "mtp.enable", False) and setting(model_cfg, "mtp.enable_train", False)):
            return None
        return cls(role, float(setting(model_cfg, "mtp.mtp_loss_scaling_factor", 0.1)), device)

    def joined(
        self, rows: Sequence[Segment], loss: MicroLoss, outputs: Collection[str]
    ) -> tuple[MicroLoss, Collection[str]]:
        """The loss of a mini-batch, of which this rank has `rows`, and the outputs that it sees. Collective."""
        count = sum(all_gather_json(sum(int(np.count_nonzero(loss_mask(row))) for row in rows)))

        def joint(micro: MicroBatch) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
            scalar, metrics = loss(micro)
            assert micro.further_log_probs is not None
            counted = np.concatenate([loss_mask(row) for row in micro.rows]).astype(np.float32)
            total = -(micro.further_log_probs * torch.from_numpy(counted).to(self.device)).sum()
            name, tokens = f"{self.role}/mtp_loss", float(counted.sum())
            return scalar + self.factor / max(count, 1) * total, {**metrics, name: (float(total.detach()), tokens)}

        return joint, (*outputs, FURTHER)
