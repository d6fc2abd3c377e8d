"""The actor's objective on one micro-batch: policy term − entropy bonus + KL to the reference.

The training engine calls an `ActorObjective` with flat response tokens and never learns what it computes. A policy loss
gets one `LossInputs`. Counts of the whole mini-batch are known before its first micro-batch, so parts add up exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.algorithms.correction import parse_correction
from verl.algorithms.distillation import Distillation
from verl.algorithms.flat_tokens import Rows, masked
from verl.algorithms.kl import clipped_tokens, kl_penalty
from verl.algorithms.policy_loss import LossInputs, weights_now
from verl.algorithms.registry import LOSSES
from verl.config.schema.base import Map, setting
from verl.trajectory import Segment, flat

if TYPE_CHECKING:
    from verl.engine.training.base import MicroBatch

Metrics = dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class LossDenominators:
    """Counts over a whole mini-batch, all ranks: T tokens in the loss, B trajectories that have one, and H."""

    tokens: int
    trajectories: int
    max_response_length: float | None

    def as_batch_info(self) -> dict[str, Any]:
        """The keywords of `agg_loss`. Gradients are added, never averaged, hence dp_size 1."""
        return {
            "dp_size": 1,
            "batch_num_tokens": self.tokens,
            "global_batch_size": self.trajectories,
            "loss_scale_factor": self.max_response_length,
        }


def loss_mask(row: Segment) -> np.ndarray:
    """m of a segment, bool [L]: its loss mask, or its policy mask where no phase has set one."""
    mask = row.columns.get("loss_mask")
    return row.columns["response_mask"] if mask is None else mask


def count_denominators(rows: Sequence[Segment], max_response_length: float | None) -> LossDenominators:
    """T and B of a mini-batch, after rejection and drops; `max_response_length` is H of seq-mean-token-sum-norm."""
    counts = [int(np.count_nonzero(loss_mask(row))) for row in rows]
    carrying = {id(row.trajectory or row) for row, count in zip(rows, counts, strict=True) if count}
    return LossDenominators(sum(counts), len(carrying), max_response_length)


def trajectory_tokens(rows: Sequence[Segment]) -> list[int] | None:
    """T_i for each row: loss tokens of all segments of its trajectory. None where every trajectory has one segment."""
    if all(row.trajectory is None or len(row.trajectory.segments) == 1 for row in rows):
        return None
    return [
        sum(int(np.count_nonzero(loss_mask(s))) for s in (row.trajectory or row).segments) for row in rows
    ]


class LossConfig(Map):
    """The actor's config as a policy loss sees it: its settings, `global_batch_info` and `rollout_correction`."""

    def __init__(self, actor: Any, global_batch_info: dict[str, Any], rollout_correction: Any = None):
        settings = actor if isinstance(actor, dict) else {**vars(actor), **getattr(actor, "_extra", {})}
        super().__init__(settings)
        self.update(global_batch_info=global_batch_info, rollout_correction=rollout_correction)


class MicroBatchColumns:
    """Columns of the segments of a micro-batch as flat tensors [T, …], in the dtype and on the device of the pass's
    outputs."""

    def __init__(self, segments: Sequence[Segment], like: torch.Tensor):
        self.segments, self.like = segments, like
        self.rows = Rows([segment.length for segment in segments], like.device)
        if self.rows.cu_seqlens[-1] != len(like):
            raise ValueError(
                f"{len(like)} log-probs for rows with {self.rows.cu_seqlens[-1]} response tokens"
            )

    def __getitem__(self, name: str) -> torch.Tensor:
        """A column that every segment must have. ValueError naming the first that lacks it."""
        return self.joined([flat(self.segments, name)])

    def joined(self, values: Sequence[np.ndarray]) -> torch.Tensor:
        """Arrays [L_i, …], one after the other."""
        return torch.from_numpy(np.concatenate(values)).to(self.like.device, self.like.dtype)

    @property
    def loss_mask(self) -> torch.Tensor:
        """m [T]."""
        return self.joined([loss_mask(segment) for segment in self.segments])

    def old_log_probs(self) -> torch.Tensor:
        """The column; the detached log-probs of this pass for segments without it: a step's first update is its own old
        policy."""
        current = self.like.detach()
        present = ["old_log_probs" in segment.columns for segment in self.segments]
        if not any(present):
            return current
        zeros = (segment.columns.get("old_log_probs", np.zeros(segment.length)) for segment in self.segments)
        mask = torch.from_numpy(np.repeat(present, self.rows.lengths)).to(current.device)
        return torch.where(mask, self.joined(list(zeros)), current)

    def batch_info(
        self, denominators: LossDenominators, tokens_of: Mapping[int, int] | None
    ) -> dict[str, Any]:
        """The keywords of `aggregate`; `tokens_of`: T_i of segments (by id) whose trajectory has others."""
        info = denominators.as_batch_info()
        if tokens_of is not None:
            counts = [tokens_of[id(segment)] for segment in self.segments]
            info["trajectory_tokens"] = torch.tensor(counts, device=self.like.device)
        return info


class ActorObjective:
    """Loss of the actor as a `MicroLoss` of the training engine (verl/engine/training/base.py).

    `actor` is the group `actor_rollout_ref.actor` (clip_ratio*, loss_agg_mode, entropy_coeff, use_kl_loss,
    kl_loss_coef, kl_loss_type, policy_loss.loss_mode); `denominators` the counts of the mini-batch;
    `rollout_correction` the group of that name: with bypass_mode the old policy is the sampler. `tokens_of`: T_i of
    rows (by id) whose trajectory has other segments. `distillation`: a part that is added, or that alone is computed
    and minimised (use_task_rewards=False).

    Metrics come as (sum, weight). The mini-batch's value is Σsum / Σweight over its micro-batches: shares and
    means weigh by their tokens; an aggregated term (pg_loss, kl_loss, entropy_loss, loss) is a part of a sum,
    and weighs by its share of the mini-batch's tokens, so that weights add up to 1 and parts just add.
    """

    def __init__(
        self,
        actor: Any,
        denominators: LossDenominators,
        rollout_correction: Any = None,
        tokens_of: Mapping[int, int] | None = None,
        distillation: Distillation | None = None,
    ):
        self._distillation = distillation
        self._actor, self._rollout_correction = actor, rollout_correction
        self._correction = parse_correction(rollout_correction)
        name = setting(setting(actor, "policy_loss"), "loss_mode", "vanilla")
        bypass = self._correction.bypass
        self._needs = LOSSES.needs(name) - {"advantages", "response_mask", "old_log_probs", "is_weights"}
        self._loss = LOSSES.get("bypass_mode" if bypass else name)
        self._whole = None if bypass and self._correction.reinforce else LOSSES.declared(name).whole
        self._mode = setting(actor, "loss_agg_mode", "token-mean")
        self._denominators, self._tokens_of = denominators, tokens_of
        self._entropy_coeff = float(setting(actor, "entropy_coeff", 0.0))
        self._use_kl = bool(setting(actor, "use_kl_loss", False))
        self._kl_coef = float(setting(actor, "kl_loss_coef", 0.001))
        self._kl_type = setting(actor, "kl_loss_type", "low_var_kl")

    def __call__(self, micro: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        """Scalar to differentiate, already divided by the global counts, and metrics as (sum, weight)."""
        assert micro.log_probs is not None
        columns = MicroBatchColumns(micro.rows, micro.log_probs)
        tokens = sum(int(np.count_nonzero(loss_mask(row))) for row in micro.rows)
        inputs = self._inputs(columns, micro)
        loss: torch.Tensor | float = 0.0
        parts: dict[str, torch.Tensor] = {}
        metrics: Metrics = {}
        if self._distillation is None or self._distillation.config.use_task_rewards:
            loss, parts, metrics = self._task_loss(inputs, columns, tokens)
        elif inputs.entropy is not None:
            parts["actor/entropy_loss"] = inputs.aggregate(inputs.entropy)
        if self._distillation is not None:
            pulled, distillation_parts, distillation_metrics = self._distillation(inputs, columns, micro)
            parts, metrics = parts | distillation_parts, metrics | distillation_metrics
            loss = loss + self._distillation.coefficient * pulled
        assert isinstance(loss, torch.Tensor)
        parts["actor/loss"] = loss
        share = tokens / self._denominators.tokens if self._denominators.tokens else 0.0
        values = torch.stack([part.detach() for part in parts.values()]).tolist()
        return loss, metrics | {name: (v, share) for name, v in zip(parts, values, strict=True)}

    def _task_loss(
        self, inputs: LossInputs, columns: MicroBatchColumns, tokens: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], Metrics]:
        """Policy loss, entropy and KL: their weighted sum, the aggregated terms by name, other metrics as (sum,
        weight)."""
        loss, values = self._loss(inputs)
        metrics = {name: (_number(value) * tokens, float(tokens)) for name, value in values.items()}
        parts = {"actor/pg_loss": loss}
        if self._entropy_coeff and inputs.entropy is None:
            raise ValueError(f"entropy_coeff={self._entropy_coeff} needs the engine's entropy of this pass")
        if inputs.entropy is not None:
            parts["actor/entropy_loss"] = inputs.aggregate(inputs.entropy)
            if self._entropy_coeff:
                loss = loss - self._entropy_coeff * parts["actor/entropy_loss"]
        if self._use_kl:
            ref = columns["ref_log_probs"]
            terms = kl_penalty(inputs.log_probs, ref, self._kl_type)
            parts["actor/kl_loss"] = inputs.aggregate(terms)
            loss = loss + self._kl_coef * parts["actor/kl_loss"]
            metrics["actor/kl_coef"] = (self._kl_coef * tokens, float(tokens))
            clipped = masked(clipped_tokens(inputs.log_probs, ref, self._kl_type), inputs.loss_mask).sum()
            metrics["actor/kl_clipped_ratio"] = (float(clipped), float(tokens))
        return loss, parts, metrics

    def _inputs(self, columns: MicroBatchColumns, micro: MicroBatch) -> LossInputs:
        bypass = self._correction.bypass
        entropy = micro.entropy
        if entropy is not None and not self._entropy_coeff:
            entropy = entropy.detach()
        info = columns.batch_info(self._denominators, self._tokens_of)
        inputs = LossInputs(
            log_probs=columns.like,
            old_log_probs=columns["rollout_log_probs"] if bypass else columns.old_log_probs(),
            advantages=columns["advantages"],
            loss_mask=columns.loss_mask,
            response_mask=columns["response_mask"],
            rows=columns.rows,
            loss_agg_mode=self._mode,
            config=LossConfig(self._actor, info, self._rollout_correction),
            entropy=entropy,
            trajectory_tokens=info.get("trajectory_tokens"),
            columns={name: columns[name] for name in self._declared_columns(columns)},
        )
        return replace(inputs, rollout_is_weights=self._weights(columns, inputs))

    def _declared_columns(self, columns: MicroBatchColumns) -> frozenset[str]:
        whole = self._whole is not None
        if whole and any("mini_batch_values" in segment.columns for segment in columns.segments):
            return self._needs | {"mini_batch_values"}
        return self._needs

    def _weights(self, columns: MicroBatchColumns, inputs: LossInputs) -> torch.Tensor | None:
        """Importance weights: the rows' own, else in bypass mode with reinforce those of the current policy over the
        sampler."""
        if any("is_weights" in segment.columns for segment in columns.segments):
            return columns["is_weights"]
        correction = self._correction
        if correction.bypass and correction.reinforce and correction.weighting is not None:
            return weights_now(inputs, correction.weighting)
        return None


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
