"""What a step's updates are, decided before any of them runs: mini-batches, epochs, global counts, the order.

Pure, and the same for any number of ranks. Counts are those of whole mini-batches, so parts on several ranks add up.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl.algorithms.correction import correct, parse_correction
from verl.algorithms.flat_tokens import LossDenominators, count_denominators, demonstrates
from verl.algorithms.registry import MiniBatchTokens
from verl.algorithms.source_losses import chosen_losses
from verl.config.schema.actor import ActorConfig, CriticConfig
from verl.config.schema.algorithm import RolloutCorrectionConfig
from verl.config.schema.base import setting
from verl.engine.training.base import TrainStepResult
from verl.tracking.names import merge_metrics
from verl.trajectory import COLUMNS, Batch, Segment, Trajectory, fill_flat, segments_of, split_groups

CORRECTED = frozenset({"loss_mask", "is_weights", "mini_batch_values"})
"""Columns that `UpdatePlan.corrected` writes."""


def _read_by(role: str, needed: Iterable[str] = ()) -> tuple[str, ...]:
    """The columns that a role's updates read, those that its loss declared (`needed`) among them."""
    declared = {*needed} - {"response_mask"}
    return tuple(name for name, column in COLUMNS.items() if role in column.updates or name in declared)


@dataclass(slots=True)
class Refusal:
    """A mini-batch whose update was refused, kept for the dump."""

    reason: str
    rows: list[Trajectory]


@dataclass(slots=True)
class UpdateResult:
    """What a step's updates did. metrics are means over mini-batches and epochs.

    `computed` tokens went through the model; without shared prompts it would have been `tokens`. first: the
    first optimizer step's mini-batch and outcome.
    """

    metrics: dict[str, float]
    updates: int = 0
    skipped: int = 0
    tokens: int = 0
    computed: int = 0
    refused: list[Refusal] = field(default_factory=list)
    first: tuple[MiniBatch, TrainStepResult] | None = None


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The trajectories of one optimizer step. `usable` segments have a token to train on; without any it is skipped.

    `masks` are the loss masks of `rows` as the plan found them; `metrics` those of its correction.
    """

    rows: list[Trajectory]
    usable: list[Segment]
    denominators: LossDenominators
    masks: list[np.ndarray | None]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens the model would compute if no prompt were shared."""
        return sum(len(row.context_ids) + row.length - 1 for row in self.usable)


class UpdatePlan:
    """Mini-batches × epochs of a step.

    `actor_cfg` is `actor_rollout_ref.actor`; `max_response_length` is H of seq-mean-token-sum-norm; `batch_prompts` the
    prompts of a step (fixes the number of mini-batches); `rollout_correction` is `algorithm.rollout_correction`.
    `columns`: those that an update reads; `of_critic`: an update of the critic, whose group takes the place of the
    actor's; `of_distillation`: columns that distillation reads; `by_source` is `algorithm.by_source`.
    """

    def __init__(
        self,
        actor_cfg: ActorConfig | CriticConfig,
        *,
        max_response_length: float,
        batch_prompts: int,
        rollout_correction: RolloutCorrectionConfig | None = None,
        of_critic: bool = False,
        of_distillation: frozenset[str] = frozenset(),
        by_source: Mapping[str, Any] | None = None,
    ):
        self._cfg = actor_cfg
        self.max_response_length = max_response_length
        self.correction = parse_correction(rollout_correction)
        sampler = {"rollout_log_probs"} if self.correction.bypass else set()
        losses = chosen_losses(actor_cfg, by_source, self.correction)
        self._numbered = len(losses) > 1
        self._whole = {number: loss for number, loss in enumerate(losses) if loss.whole is not None}
        needed = of_distillation.union(sampler, *(loss.needs for loss in losses))
        self.columns = _read_by("critic") if of_critic else _read_by("actor", needed)
        self._observes = bool(setting(actor_cfg, "observation_loss_coef", 0.0)) and not of_critic
        self._mini_batches = max(1, math.ceil(batch_prompts / actor_cfg.ppo_mini_batch_size))

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps a full batch leads to."""
        return int(self._mini_batches * self._cfg.ppo_epochs)

    def mini_batches(self, batch: Batch, step: int) -> list[MiniBatch]:
        """Every optimizer step of a training step, in order. A group is never split between mini-batches."""
        minis = [self._mini_batch(rows) for rows in self.parts(batch)]
        epochs = range(self._cfg.ppo_epochs)
        return [minis[index] for epoch in epochs for index in self._order(len(minis), step, epoch)]

    def parts(self, batch: Batch) -> list[list[Trajectory]]:
        """The trajectories of each mini-batch, as they are in the first epoch without shuffling."""
        split = split_groups(batch.groups(), self._mini_batches)
        return [[row for group in groups for row in group] for groups in split]

    def needs_pass(self, mini: MiniBatch) -> bool:
        """True if something must be known of the whole mini-batch before its update, under its current weights: for the
        correction in bypass mode, or for the loss (`WholeMiniBatch`)."""
        whole = [loss.whole for loss in self._whole.values() if loss.whole is not None]
        of_loss = any(not one.only_segments for one in whole) or (bool(whole) and _split(mini))
        return of_loss or self._to_correct(mini)

    def _to_correct(self, mini: MiniBatch) -> bool:
        """The correction in bypass mode; also for a weight per trajectory whose segments may be on several ranks."""
        if self.correction.needs_mini_batch_pass:
            return True
        weighting = self.correction.weighting
        sums = self.correction.bypass and self.correction.reinforce and weighting is not None
        return _split(mini) and sums and weighting is not None and weighting.kind == "sequence"

    def corrected(
        self,
        mini: MiniBatch,
        log_probs: Callable[[list[Segment]], np.ndarray],
        step: int = 0,
        number: int = 1,
    ) -> MiniBatch:
        """The mini-batch with all that depends on its current log-probs: rejection, weights, `mini_batch_values`,
        metrics.

        `log_probs(segments)` computes those, [ΣL], with the current weights; `number` is that of the update in the
        step: before the first, they are the old log-probs.
        """
        for row, mask in zip(mini.rows, mini.masks, strict=True):
            row.loss_mask = mask
        rows = [row for row in mini.rows if self._usable(row.segments)]
        segments = segments_of(rows)
        current = self._current(segments, log_probs, first=number == 0)
        metrics: dict[str, float] = {}
        if self._to_correct(mini):
            joined = [np.concatenate([current[id(segment)] for segment in row.segments]) for row in rows]
            metrics = correct(rows, self.correction, joined)
        corrected = self._mini_batch(mini.rows, mini.masks)
        if self._whole and corrected.usable:
            # In the order of trajectories, so that what is drawn does not depend on how they are cut into segments.
            usable = self._usable(segment for row in rows for segment in row.segments)
            self._fill_values(usable, current, (setting(self._cfg, "data_loader_seed", 0), step, number))
        return replace(corrected, metrics=metrics)

    def _fill_values(self, usable: list[Segment], current: dict[int, np.ndarray], seed: Sequence[int]) -> None:
        """`mini_batch_values`: of each loss from the rows that have it, 0 where a loss asks for none."""
        for segment in usable if self._numbered else ():
            segment.put("mini_batch_values", np.zeros(segment.length, np.float32))
        for number, loss in self._whole.items():
            rows = [s for s in usable if not self._numbered or (s.policy_loss_number == number).all()]
            if rows and loss.whole is not None:
                fill_flat(rows, "mini_batch_values", loss.whole.compute(self._tokens(rows, current, seed), loss.actor))

    def _current(
        self, segments: list[Segment], log_probs: Callable[[list[Segment]], np.ndarray], first: bool
    ) -> dict[int, np.ndarray]:
        """Log-probs of the current weights by segment (its id). Where they equal the old ones, and those are not
        computed yet, any number will do: only the difference, 0, is used."""
        if first and not self.correction.bypass:
            old = [segment.columns.get("old_log_probs") for segment in segments]
            return {
                id(segment): np.zeros(segment.length) if values is None else values
                for segment, values in zip(segments, old, strict=True)
            }
        ends = np.cumsum([segment.length for segment in segments])[:-1]
        return dict(zip(map(id, segments), np.split(log_probs(segments), ends), strict=True))

    def _tokens(self, segments: list[Segment], current: dict[int, np.ndarray], seed: Sequence[int]) -> MiniBatchTokens:
        """What a loss may ask of the whole mini-batch."""
        old = "rollout_log_probs" if self.correction.bypass else "old_log_probs"
        numbers: dict[int, int] = {}
        owners = [numbers.setdefault(id(segment.trajectory), len(numbers)) for segment in segments]
        groups = np.unique([segment.uid for segment in segments], return_inverse=True)[1]

        def joined(parts: Iterable[np.ndarray]) -> np.ndarray:
            return np.concatenate([np.asarray(part, np.float64) for part in parts])

        known = set.intersection(*(set(segment.columns) for segment in segments)) if segments else set[str]()
        weighted = not self.correction.bypass and "is_weights" in known
        return MiniBatchTokens(
            log_probs=joined(current[id(segment)] for segment in segments),
            old_log_probs=joined(segment.columns.get(old, current[id(segment)]) for segment in segments),
            advantages=joined(segment.advantages for segment in segments),
            loss_mask=np.concatenate([segment.loss_mask for segment in segments]),
            trajectory=np.repeat(owners, [segment.length for segment in segments]),
            group=np.repeat(groups, [segment.length for segment in segments]),
            entropy=joined(segment.entropy for segment in segments) if "entropy" in known else None,
            weights=joined(segment.is_weights for segment in segments) if weighted else None,
            seed=seed,
        )

    def _mini_batch(self, rows: list[Trajectory], masks: list[np.ndarray | None] | None = None) -> MiniBatch:
        usable = self._usable(segments_of(rows))
        before = [row.loss_mask for row in rows] if masks is None else masks
        return MiniBatch(rows, usable, count_denominators(usable, self.max_response_length), before)

    def _usable(self, rows: Iterable[Segment]) -> list[Segment]:
        """Those with a token in the loss, or one that the loss of observations reads."""
        return [
            row
            for row in rows
            if row.loss_mask is not None
            and (row.loss_mask.any() or demonstrates(row) or (self._observes and not row.response_mask.all()))
        ]

    def _order(self, count: int, step: int, epoch: int) -> Sequence[int]:
        if not self._cfg.shuffle:
            return range(count)
        rng = np.random.default_rng([self._cfg.data_loader_seed, step, epoch])
        return [int(i) for i in rng.permutation(count)]


def _split(mini: MiniBatch) -> bool:
    return any(len(row.segments) > 1 for row in mini.rows)


def summarise(outcomes: Iterable[tuple[MiniBatch, TrainStepResult | None]]) -> UpdateResult:
    """One result out of every mini-batch's; None stands for a mini-batch that was left out."""
    out = UpdateResult(metrics={})
    parts: list[tuple[dict[str, float], float]] = []
    for mini, result in outcomes:
        parts.append((mini.metrics, 1.0))
        if result is None:
            out.skipped += 1
        elif result.refused:
            out.refused.append(Refusal(result.refused, mini.rows))
        else:
            out.tokens += mini.tokens
            out.computed += result.tokens
            out.updates += 1
            parts.append((result.metrics, 1.0))
            out.first = out.first or (mini, result)
    out.metrics = merge_metrics(parts)
    return out


# -- which rank gets which segments ------------------------------------------------------------------------------


def partition(rows: Sequence[Segment], ranks: int, *, balance: bool = True, halve: bool = True) -> list[list[int]]:
    """Positions in `rows` for each of `ranks`, ascending; every position exactly once, some ranks maybe none.

    Groups stay whole, so that a prompt is computed once, unless there are fewer groups than ranks; then with `halve`
    the longest are halved. `balance` gives the heaviest remaining group to the rank with the least load; otherwise
    ranks get runs of the rows in their order. The same rows give the same partition.
    """
    units = _units(rows, ranks if halve else 0)
    if not balance:
        runs = np.array_split(np.arange(len(units)), ranks)
        return [sorted(i for unit in run for i in units[unit]) for run in runs]
    weights = [len(rows[unit[0]].context_ids) + sum(rows[i].length for i in unit) for unit in units]
    heap = [(0, rank) for rank in range(ranks)]
    out: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(range(len(units)), key=lambda u: (-weights[u], units[u][0])):
        load, rank = heapq.heappop(heap)
        out[rank] += units[number]
        heapq.heappush(heap, (load + weights[number], rank))
    return [sorted(part) for part in out]


def _units(rows: Sequence[Segment], ranks: int) -> list[list[int]]:
    """Positions by group; halved, longest first, until there is one unit for each rank."""
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.uid, []).append(i)
    units = list(groups.values())
    while len(units) < ranks:
        longest = max(range(len(units)), key=lambda u: len(units[u]), default=None)
        if longest is None or len(units[longest]) < 2:
            break
        unit = units[longest]
        units[longest : longest + 1] = [unit[: len(unit) // 2], unit[len(unit) // 2 :]]
    return units
