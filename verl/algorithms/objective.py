"""The actor's objective on one micro-batch: policy term − entropy bonus + KL to the reference.

The training engine calls an `ActorObjective` with flat response tokens and never learns what it computes. A policy loss gets
one `LossInputs`. Counts of the whole mini-batch are known before its first micro-batch, so parts add up exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.algorithms.correction import parse_correction
from verl.algorithms.distillation import Distillation
from verl.algorithms.kl import clipped_tokens, kl_penalty
from verl.algorithms.policy_loss import LossInputs, masked, on_inputs, weights_now
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
    found = row.columns.get("loss_mask")
    return row.columns["response_mask"] if found is None else found


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


class PaddedMicroBatch:
    """Segments of a micro-batch as [b, W]: W is the longest response, padding on the right."""

    def __init__(self, rows: Sequence[Segment], like: torch.Tensor):
        lengths = np.array([row.length for row in rows], np.int64)
        self.rows, self.like = rows, like
        self.shape = (len(rows), int(lengths.max(initial=1)))
        where = np.flatnonzero(np.arange(self.shape[1]) < lengths[:, None])
        self._where = torch.from_numpy(where).to(like.device)
        if len(where) != like.numel():
            raise ValueError(f"{like.numel()} log-probs for rows with {len(where)} response tokens")

    def pad(self, flat: torch.Tensor) -> torch.Tensor:
        """Flat [ΣL, …] → [b, W, …], differentiable."""
        out = flat.new_zeros(self.shape[0] * self.shape[1], *flat.shape[1:])
        return out.index_copy(0, self._where, flat).view(*self.shape, *flat.shape[1:])

    def column(self, values: Sequence[np.ndarray]) -> torch.Tensor:
        """One array per row → [b, W, …] in the dtype and on the device of the log-probs."""
        joined = torch.from_numpy(np.concatenate(values))
        return self.pad(joined.to(self.like.device, self.like.dtype))

    def needed(self, name: str) -> torch.Tensor:
        """A column that every row must have. ValueError naming the first that lacks it."""
        return self.column([flat(self.rows, name)])

    def batch_info(
        self, denominators: LossDenominators, tokens_of: Mapping[int, int] | None
    ) -> dict[str, Any]:
        """The keywords of `agg_loss`; `tokens_of`: T_i of rows (by id) whose trajectory has other segments."""
        info = denominators.as_batch_info()
        if tokens_of is not None:
            counts = [tokens_of[id(row)] for row in self.rows]
            info["trajectory_tokens"] = torch.tensor(counts, device=self.like.device)
        return info


class ActorObjective:
    """Loss of the actor as a `MicroLoss` of the training engine (verl/engine/training/base.py).

    `actor` is the group `actor_rollout_ref.actor` (clip_ratio*, loss_agg_mode, entropy_coeff, use_kl_loss,
    kl_loss_coef, kl_loss_type, policy_loss.loss_mode); `denominators` the counts of the mini-batch;
    `rollout_correction` the group of that name: with bypass_mode the old policy is the sampler. `tokens_of`: T_i of
    rows (by id) whose trajectory has other segments. `distillation`: a part that is added, or that alone is computed and
    minimised (use_task_rewards=False).

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
        self._loss = on_inputs(LOSSES.get("bypass_mode" if bypass else name))
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
        area = PaddedMicroBatch(micro.rows, micro.log_probs)
        tokens = sum(int(np.count_nonzero(loss_mask(row))) for row in micro.rows)
        inputs = self._inputs(area, micro)
        loss: torch.Tensor | float = 0.0
        parts: dict[str, torch.Tensor] = {}
        metrics: Metrics = {}
        if self._distillation is None or self._distillation.config.use_task_rewards:
            loss, parts, metrics = self._task_loss(inputs, area, tokens)
        elif inputs.entropy is not None:
            parts["actor/entropy_loss"] = inputs.aggregate(inputs.entropy)
        if self._distillation is not None:
            pulled, distillation_parts, told = self._distillation(inputs, area, micro)
            parts, metrics = parts | distillation_parts, metrics | told
            loss = loss + self._distillation.coefficient * pulled
        assert isinstance(loss, torch.Tensor)
        parts["actor/loss"] = loss
        share = tokens / self._denominators.tokens if self._denominators.tokens else 0.0
        values = torch.stack([part.detach() for part in parts.values()]).tolist()
        return loss, metrics | {name: (v, share) for name, v in zip(parts, values, strict=True)}

    def _task_loss(
        self, inputs: LossInputs, area: PaddedMicroBatch, tokens: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], Metrics]:
        """Policy loss, entropy and KL: their weighted sum, the aggregated terms by name, other metrics as (sum, weight)."""
        loss, found = self._loss(inputs)
        metrics = {name: (_number(value) * tokens, float(tokens)) for name, value in found.items()}
        parts = {"actor/pg_loss": loss}
        if self._entropy_coeff and inputs.entropy is None:
            raise ValueError(f"entropy_coeff={self._entropy_coeff} needs the engine's entropy of this pass")
        if inputs.entropy is not None:
            parts["actor/entropy_loss"] = inputs.aggregate(inputs.entropy)
            if self._entropy_coeff:
                loss = loss - self._entropy_coeff * parts["actor/entropy_loss"]
        if self._use_kl:
            ref = area.needed("ref_log_probs")
            terms = kl_penalty(inputs.log_probs, ref, self._kl_type)
            parts["actor/kl_loss"] = inputs.aggregate(terms)
            loss = loss + self._kl_coef * parts["actor/kl_loss"]
            metrics["actor/kl_coef"] = (self._kl_coef * tokens, float(tokens))
            clipped = masked(clipped_tokens(inputs.log_probs, ref, self._kl_type), inputs.loss_mask).sum()
            metrics["actor/kl_clipped_ratio"] = (float(clipped), float(tokens))
        return loss, parts, metrics

    def _inputs(self, area: PaddedMicroBatch, micro: MicroBatch) -> LossInputs:
        log_probs = area.pad(area.like)
        bypass = self._correction.bypass
        old = area.needed("rollout_log_probs") if bypass else _old_log_probs(area, log_probs)
        entropy = micro.entropy
        if entropy is not None and not self._entropy_coeff:
            entropy = entropy.detach()
        info = area.batch_info(self._denominators, self._tokens_of)
        policy = area.needed("response_mask")
        return LossInputs(
            log_probs=log_probs,
            old_log_probs=old,
            advantages=area.needed("advantages"),
            loss_mask=area.column([loss_mask(row) for row in area.rows]),
            response_mask=policy,
            loss_agg_mode=self._mode,
            config=LossConfig(self._actor, info, self._rollout_correction),
            rollout_is_weights=self._weights(area, log_probs, old, policy),
            entropy=None if entropy is None else area.pad(entropy),
            trajectory_tokens=info.get("trajectory_tokens"),
            columns=self._columns(area),
        )

    def _columns(self, area: PaddedMicroBatch) -> dict[str, torch.Tensor]:
        names = set(self._needs)
        if self._whole is not None and any("mini_batch_values" in row.columns for row in area.rows):
            names.add("mini_batch_values")
        return {name: area.needed(name) for name in names}

    def _weights(
        self, area: PaddedMicroBatch, log_probs: torch.Tensor, old: torch.Tensor, policy: torch.Tensor
    ) -> torch.Tensor | None:
        """Importance weights: the rows' own, else in bypass mode with reinforce those of the current policy over the sampler."""
        if any("is_weights" in row.columns for row in area.rows):
            return area.needed("is_weights")
        correction = self._correction
        if correction.bypass and correction.reinforce and correction.weighting is not None:
            return weights_now(log_probs, old, policy, correction.weighting)
        return None


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


def _old_log_probs(area: PaddedMicroBatch, log_prob: torch.Tensor) -> torch.Tensor:
    """old_log_probs; sg(logp) for rows that have none: the step's first update is its own old policy."""
    have = ["old_log_probs" in row.columns for row in area.rows]
    current = log_prob.detach()
    if not any(have):
        return current
    given = area.column([row.columns.get("old_log_probs", np.zeros(row.length)) for row in area.rows])
    return torch.where(torch.tensor(have, device=given.device).unsqueeze(-1), given, current)
