"""Losses on pairs of responses to one prompt, a chosen and a rejected one, from their log-probs or scores.

With L = Σ log π of a response's tokens, T their number, Δ = chosen − rejected of L − L_ref:

    dpo       −(1−ε)·log σ(βΔ) − ε·log σ(−βΔ)           DPO, arXiv 2305.18290; label smoothing ε: its cDPO note
    dpo_norm  the same with Δ of (L − L_ref) / T
    ipo       (Δ − 1/(2β))², Δ of (L − L_ref) / T        IPO, arXiv 2310.12036, eq. 17, with means as TRL has them
    simpo     −log σ(β·Δ − γ), Δ of L / T                SimPO, arXiv 2405.14734, eq. 6
    reward    −log σ(s_chosen − s_rejected − margin)     Bradley-Terry; margin: Llama 2, arXiv 2307.09288, eq. 2
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.flat_tokens import Rows
from verl.errors import UserError
from verl.trajectory import flat

if TYPE_CHECKING:
    from verl.config.schema.algorithm import PreferenceConfig
    from verl.engine.training.base import MicroBatch
    from verl.trajectory import Segment

REFERENCE, MARGIN = "reference_log_prob", "margin"
"""Notes of a trajectory (`extra`): Σ log π_ref of its learned tokens, and how much better than the rejected it is."""
_PER_TOKEN = ("dpo_norm", "ipo", "simpo")


def needs_reference(loss: str | None) -> bool:
    """True for a loss that compares with the model at the start."""
    return loss in ("dpo", "dpo_norm", "ipo")


def pair_losses(config: PreferenceConfig, difference: Tensor, margin: Tensor) -> Tensor:
    """The loss of each pair [P] from `difference` [P], Δ of the module or of scores; margin [P] counts for `reward`."""
    if config.loss == "reward":
        return -logsigmoid(difference - margin)
    if config.loss == "ipo":
        return (difference - 1 / (2 * config.beta)) ** 2
    if config.loss == "simpo":
        return -logsigmoid(config.beta * difference - config.gamma)
    logits, smoothing = config.beta * difference, config.label_smoothing
    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


class PreferenceLoss:
    """A `MicroLoss`: the sum over a micro-batch's pairs, each two neighbouring rows, chosen and rejected, divided by
    `pairs`, those of the whole batch.

    Metrics, means over pairs: train/loss, rewards/{chosen,rejected,margins,accuracies}, and logps/{chosen,rejected} of
    the losses on log-probs. A reward is a score, else β·(L − L_ref), per token where the loss is.
    """

    def __init__(self, config: PreferenceConfig, pairs: int):
        self._config, self._pairs = config, pairs

    def __call__(self, micro: MicroBatch) -> tuple[Tensor, dict[str, tuple[float, float]]]:
        """(scalar, metrics as (sum, pairs)). UserError for a micro-batch that holds one of a pair alone."""
        rows, config = micro.rows, self._config
        if [row.uid for row in rows[::2]] != [row.uid for row in rows[1::2]]:
            raise UserError(f"preference.loss={config.loss}: this model is computed row by row, and a pair is two rows")
        values, log_probs = self._values(micro)
        chosen, rejected = values[::2], values[1::2]
        margin = values.new_tensor([_note(row, MARGIN) for row in rows[::2]])
        losses = pair_losses(config, chosen - rejected, margin)
        scale = 1.0 if config.loss == "reward" else config.beta
        gap, count = scale * (chosen - rejected).detach(), float(len(losses))
        metrics = {
            "train/loss": losses,
            "rewards/chosen": scale * chosen,
            "rewards/rejected": scale * rejected,
            "rewards/margins": gap,
            "rewards/accuracies": (gap > 0).float(),
        }
        if log_probs is not None:
            metrics |= {"logps/chosen": log_probs[::2], "logps/rejected": log_probs[1::2]}
        return losses.sum() / self._pairs, {name: (float(x.detach().sum()), count) for name, x in metrics.items()}

    def _values(self, micro: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """What the loss compares, of each row, and the log-probs L."""
        if micro.scores is not None:
            last = np.cumsum([row.length for row in micro.rows], dtype=np.int64) - 1
            return micro.scores[torch.from_numpy(last).to(micro.scores.device)], None
        assert micro.log_probs is not None
        tokens = Rows([row.length for row in micro.rows], micro.log_probs.device)
        mask = torch.from_numpy(flat(micro.rows, "loss_mask")).to(micro.log_probs)
        values = log_probs = tokens.sums(micro.log_probs * mask)
        if needs_reference(self._config.loss):
            values = values - values.new_tensor([_note(row, REFERENCE) for row in micro.rows])
        return values / tokens.sums(mask) if self._config.loss in _PER_TOKEN else values, log_probs


def _note(row: Segment, name: str) -> float:
    assert row.trajectory is not None
    return float(row.trajectory.extra.get(name, 0.0))
