"""What a step's updates are, decided before any of them runs: mini-batches, epochs, global counts, the order.

Pure, and the same whoever executes it: the actor of this process (`verl.workers.actor`) or a group of ranks
(`verl.workers.ray`). Counts are those of whole mini-batches, so parts on several ranks add up exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.algorithms.correction import correct
from verl.algorithms.importance import parse_correction
from verl.algorithms.objective import LossDenominators, count_denominators
from verl.engine.training.base import StepResult
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


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The responses of one optimizer step. `usable` have a token to train on; without any the step is left out.

    `masks` are the loss masks of `rows` as the plan found them.
    """

    rows: list[Trajectory]
    usable: list[Trajectory]
    denominators: LossDenominators
    masks: list[np.ndarray | None]

    @property
    def tokens(self) -> int:
        """Tokens the model would compute if no prompt were shared."""
        return sum(len(row.prompt.ids) + row.length - 1 for row in self.usable)


class UpdatePlan:
    """Mini-batches × epochs of a step.

    `actor_cfg` is `actor_rollout_ref.actor`; `max_response_length` is H of seq-mean-token-sum-norm; `batch_prompts` the
    prompts of a step (fixes the number of mini-batches); `rollout_correction` is `algorithm.rollout_correction`.
    """

    def __init__(
        self,
        actor_cfg: Any,
        *,
        max_response_length: float,
        batch_prompts: int,
        rollout_correction: Any = None,
    ):
        self._cfg = actor_cfg
        self.max_response_length = max_response_length
        self.rollout_correction = rollout_correction
        self.correction = parse_correction(rollout_correction)
        self._mini_batches = max(1, math.ceil(batch_prompts / actor_cfg.ppo_mini_batch_size))

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps a full batch leads to."""
        return int(self._mini_batches * self._cfg.ppo_epochs)

    def mini_batches(self, batch: Batch, step: int) -> list[MiniBatch]:
        """Every optimizer step of a training step, in order. A group is never split between mini-batches."""
        minis = [self._mini_batch(rows) for rows in self.parts(batch)]
        return [
            minis[index]
            for epoch in range(self._cfg.ppo_epochs)
            for index in self._order(len(minis), step, epoch)
        ]

    def parts(self, batch: Batch) -> list[list[Trajectory]]:
        """The responses of each mini-batch, as they are in the first epoch without shuffling."""
        split = split_groups(batch.groups(), self._mini_batches)
        return [[row for group in groups for row in group] for groups in split]

    def corrected(
        self, mini: MiniBatch, log_probs: Callable[[list[Trajectory]], np.ndarray]
    ) -> tuple[MiniBatch, dict[str, float]]:
        """The mini-batch after rejection and with weights, where they need its current log-probs; and metrics.

        `log_probs(rows)` computes those, [ΣL], with the weights of this moment. Only with
        `correction.needs_mini_batch_pass` (algorithms.md §7, bypass mode); otherwise the mini-batch as it is.
        """
        if not self.correction.needs_mini_batch_pass or not mini.usable:
            return mini, {}
        for row, mask in zip(mini.rows, mini.masks, strict=True):
            row.loss_mask = mask
        rows = _usable(mini.rows)
        current = np.split(log_probs(rows), np.cumsum([row.length for row in rows])[:-1])
        metrics = correct(rows, self.correction, current)
        return self._mini_batch(mini.rows, mini.masks), metrics

    def _mini_batch(self, rows: list[Trajectory], masks: list[np.ndarray | None] | None = None) -> MiniBatch:
        usable = _usable(rows)
        before = [row.loss_mask for row in rows] if masks is None else masks
        return MiniBatch(rows, usable, count_denominators(usable, self.max_response_length), before)

    def _order(self, count: int, step: int, epoch: int) -> Sequence[int]:
        if not self._cfg.shuffle:
            return range(count)
        rng = np.random.default_rng([self._cfg.data_loader_seed, step, epoch])
        return [int(i) for i in rng.permutation(count)]


def _usable(rows: Sequence[Trajectory]) -> list[Trajectory]:
    return [row for row in rows if row.loss_mask is not None and row.loss_mask.any()]


def summarise(outcomes: Iterable[tuple[MiniBatch, StepResult | None]]) -> UpdateResult:
    """One result out of every mini-batch's; None stands for a mini-batch that was left out."""
    out = UpdateResult(metrics={})
    parts: list[tuple[dict[str, float], float]] = []
    for mini, result in outcomes:
        if result is None:
            out.skipped += 1
        elif result.refused:
            out.refused.append(Refusal(result.refused, mini.rows))
        else:
            out.tokens += mini.tokens
            out.computed += result.tokens
            out.updates += 1
            parts.append((result.metrics, 1.0))
    out.metrics = merge_metrics(parts)
    return out
