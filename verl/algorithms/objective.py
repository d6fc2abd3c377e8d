"""The actor's objective on one micro-batch: policy term − entropy bonus + KL to the reference + observation loss.

The training engine calls an `ActorObjective` with flat response tokens and never learns what it computes. A policy loss
gets one `LossInputs`. Counts of the whole mini-batch are known before its first micro-batch, so parts add up exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.algorithms.correction import parse_correction
from verl.algorithms.distillation import Distillation
from verl.algorithms.flat_tokens import LossDenominators, Metrics, MicroBatchColumns, loss_mask, masked
from verl.algorithms.kl import clipped_tokens, kl_penalty
from verl.algorithms.policy_loss import LossInputs, weights_now
from verl.algorithms.source_losses import chosen_losses
from verl.config.schema.actor import ActorConfig
from verl.config.schema.base import Map, setting

if TYPE_CHECKING:
    from verl.engine.training.base import MicroBatch
    from verl.trajectory import Segment


class LossConfig(Map):
    """The actor's config as a policy loss sees it: its settings, `global_batch_info` and `rollout_correction`."""

    def __init__(
        self,
        actor: ActorConfig | dict[str, Any],
        global_batch_info: dict[str, Any],
        rollout_correction: Mapping[str, Any] | None = None,
    ):
        settings = actor if isinstance(actor, dict) else {**vars(actor), **getattr(actor, "_extra", {})}
        super().__init__(settings)
        self.update(global_batch_info=global_batch_info, rollout_correction=rollout_correction)


class ActorObjective:
    """Loss of the actor as a `MicroLoss` of the training engine (verl/engine/training/base.py).

    `actor` is the group `actor_rollout_ref.actor` (clip_ratio*, loss_agg_mode, entropy_coeff, use_kl_loss,
    kl_loss_coef, kl_loss_type, policy_loss.loss_mode); `denominators` the counts of the mini-batch;
    `rollout_correction` the group of that name: with bypass_mode the old policy is the sampler. `tokens_of`: T_i of
    rows (by id) whose trajectory has other segments. `distillation`: a part that is added, or that alone is computed
    and minimised (use_task_rewards=False). `by_source` is the group `algorithm.by_source`: policy losses of data
    sources.

    Metrics come as (sum, weight). The mini-batch's value is Σsum / Σweight over its micro-batches: shares and
    means weigh by their tokens; an aggregated term (pg_loss, kl_loss, entropy_loss, loss) is a part of a sum,
    and weighs by its share of the mini-batch's tokens (with `observation_loss_coef` of those that others wrote, and
    with demonstrations of theirs, too), so that weights add up to 1 and parts just add.
    """

    def __init__(
        self,
        actor: ActorConfig | dict[str, Any],
        denominators: LossDenominators,
        rollout_correction: Mapping[str, Any] | None = None,
        tokens_of: Mapping[int, int] | None = None,
        distillation: Distillation | None = None,
        by_source: Mapping[str, Any] | None = None,
    ):
        self._distillation = distillation
        self._actor, self._rollout_correction = actor, rollout_correction
        self._correction = parse_correction(rollout_correction)
        self._losses = chosen_losses(actor, by_source, self._correction)
        at_hand = {"advantages", "response_mask", "old_log_probs", "is_weights"}
        self._needs = frozenset().union(*(loss.needs for loss in self._losses)) - at_hand
        self._mode = setting(actor, "loss_agg_mode", "token-mean")
        self._denominators, self._tokens_of = denominators, tokens_of
        self._observation_coef = float(setting(actor, "observation_loss_coef", 0.0))
        self._by_confidence = bool(setting(actor, "demonstrations.by_confidence", False))
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
        total = self._denominators.tokens
        weights = columns["demonstration_weights"] if self._denominators.demonstrated else None
        if weights is not None:
            demonstrated, chances = weights > 0, inputs.log_probs.detach().exp()
            terms = -inputs.log_probs * (chances * (1 - chances) if self._by_confidence else 1.0)
            shown = int(demonstrated.sum())
            tokens, total = tokens + shown, total + self._denominators.demonstrated
            count = self._denominators.demonstrated
            parts["actor/demonstration_loss"] = masked(terms, demonstrated).sum() / count
            loss = loss + masked(terms * weights, demonstrated).sum() / count
            metrics["actor/demonstration_weight"] = (float(weights.sum()), float(shown))
        if self._observation_coef and self._denominators.observed:
            observed = 1 - inputs.response_mask if weights is None else (1 - inputs.response_mask) * (weights == 0)
            tokens, total = tokens + int(observed.sum()), total + self._denominators.observed
            terms = -inputs.log_probs
            if all("observation_weights" in row.columns for row in micro.rows):
                terms = terms * columns["observation_weights"]
            cross_entropy = masked(terms, observed).sum() / self._denominators.observed
            parts["actor/observation_loss"] = cross_entropy
            loss = loss + self._observation_coef * cross_entropy
        assert isinstance(loss, torch.Tensor)
        parts["actor/loss"] = loss
        share = tokens / total if total else 0.0
        values = torch.stack([part.detach() for part in parts.values()]).tolist()
        return loss, metrics | {name: (v, share) for name, v in zip(parts, values, strict=True)}

    def _task_loss(
        self, inputs: LossInputs, columns: MicroBatchColumns, tokens: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], Metrics]:
        """Policy loss, entropy and KL: their weighted sum, the aggregated terms by name, other metrics as (sum,
        weight)."""
        loss, metrics = self._policy_loss(inputs, columns)
        parts = {"actor/pg_loss": loss}
        if self._entropy_coeff and inputs.entropy is None:
            raise ValueError(f"entropy_coeff={self._entropy_coeff} needs the engine's entropy of this pass")
        if inputs.entropy is not None:
            parts["actor/entropy_loss"] = inputs.aggregate(inputs.entropy)
            if self._entropy_coeff:
                loss = loss - self._entropy_coeff * parts["actor/entropy_loss"]
            if _weighs_entropy(columns):
                loss = loss - inputs.aggregate(inputs.entropy * columns["entropy_weights"])
        if self._use_kl:
            ref = columns["ref_log_probs"]
            terms = kl_penalty(inputs.log_probs, ref, self._kl_type)
            parts["actor/kl_loss"] = inputs.aggregate(terms)
            loss = loss + self._kl_coef * parts["actor/kl_loss"]
            metrics["actor/kl_coef"] = (self._kl_coef * tokens, float(tokens))
            clipped = masked(clipped_tokens(inputs.log_probs, ref, self._kl_type), inputs.loss_mask).sum()
            metrics["actor/kl_clipped_ratio"] = (float(clipped), float(tokens))
        return loss, parts, metrics

    def _policy_loss(self, inputs: LossInputs, columns: MicroBatchColumns) -> tuple[torch.Tensor, Metrics]:
        """The sum of the losses of the micro-batch's rows, each over the tokens that have its number."""
        total: torch.Tensor | float = 0.0
        metrics: Metrics = {}
        for number, rows in self._rows_by_loss(columns).items():
            chosen, own = self._losses[number], inputs
            if number or len(self._losses) > 1:
                config = LossConfig(chosen.actor, inputs.config["global_batch_info"], self._rollout_correction)
                mask = inputs.loss_mask * (columns["policy_loss_number"] == number)
                own = replace(inputs, loss_mask=mask, loss_agg_mode=chosen.mode, config=config)
            loss, values = chosen.function(own)
            total, tokens = total + loss, float(sum(int(np.count_nonzero(loss_mask(row))) for row in rows))
            for name, value in values.items():
                before, weight = metrics.get(name, (0.0, 0.0))
                metrics[name] = (before + _number(value) * tokens, weight + tokens)
        assert isinstance(total, torch.Tensor)
        return total, metrics

    def _rows_by_loss(self, columns: MicroBatchColumns) -> dict[int, list[Segment]]:
        """The micro-batch's rows by the number of their policy loss; the first loss is there without any."""
        if len(self._losses) == 1:
            return {0: list(columns.segments)}
        rows: dict[int, list[Segment]] = {}
        for row in columns.segments:
            if row.length:
                rows.setdefault(int(row.columns["policy_loss_number"][0]), []).append(row)
        return rows or {0: []}

    def _inputs(self, columns: MicroBatchColumns, micro: MicroBatch) -> LossInputs:
        bypass = self._correction.bypass
        entropy = micro.entropy
        if entropy is not None and not (self._entropy_coeff or _weighs_entropy(columns)):
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
        whole = any(loss.whole is not None for loss in self._losses)
        if whole and any("mini_batch_values" in segment.columns for segment in columns.segments):
            return self._needs | {"mini_batch_values"}
        return self._needs

    def _weights(self, columns: MicroBatchColumns, inputs: LossInputs) -> torch.Tensor | None:
        """Importance weights: the rows' own, else in bypass mode with reinforce those of the current policy over the
        sampler."""
        if any("is_weights" in segment.columns for segment in columns.segments):
            # Rejected and unscored responses have none; they are here for what the policy did not write.
            segments, zeros = columns.segments, np.zeros
            return columns.joined(
                [s.is_weights if loss_mask(s).any() else zeros(s.length, np.float32) for s in segments]
            )
        correction = self._correction
        if correction.bypass and correction.reinforce and correction.weighting is not None:
            return weights_now(inputs, correction.weighting)
        return None


def _weighs_entropy(columns: MicroBatchColumns) -> bool:
    """True where `algorithm.entropy_ctrl` has a coefficient above 0 in this step."""
    weights = (row.columns.get("entropy_weights") for row in columns.segments)
    return any(values is not None and values.any() for values in weights)


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
