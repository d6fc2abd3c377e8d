"""The actor's objective on one micro-batch: policy term − entropy bonus + KL to the reference.

The training engine calls an `ActorObjective` with flat response tokens and never learns what it computes.
Counts of the whole mini-batch are known before its first micro-batch, so parts add up exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.algorithms.aggregate import agg_loss, masked
from verl.algorithms.importance import parse_correction
from verl.algorithms.kl import clipped_tokens, kl_penalty
from verl.algorithms.policy_loss import weights_now
from verl.algorithms.registry import LOSSES
from verl.algorithms.settings import setting
from verl.trajectory import Trajectory

if TYPE_CHECKING:
    from verl.engine.training.base import MicroBatch

Metrics = dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class LossDenominators:
    """Counts over a whole mini-batch, all ranks: T tokens in the loss, B responses that have one, and H."""

    tokens: int
    responses: int
    max_response_length: float | None

    def as_batch_info(self) -> dict[str, Any]:
        """The keywords of `agg_loss`. Gradients are added, never averaged, hence dp_size 1."""
        return {
            "dp_size": 1,
            "batch_num_tokens": self.tokens,
            "global_batch_size": self.responses,
            "loss_scale_factor": self.max_response_length,
        }


def loss_mask(row: Trajectory) -> np.ndarray:
    """m of a response, bool [L]: its loss mask, or its policy mask where no phase has set one."""
    return row.response_mask if row.loss_mask is None else row.loss_mask


def count_denominators(rows: Sequence[Trajectory], max_response_length: float | None) -> LossDenominators:
    """T and B of a mini-batch, after rejection and drops; `max_response_length` is H of seq-mean-token-sum-norm."""
    tokens = [int(np.count_nonzero(loss_mask(row))) for row in rows]
    return LossDenominators(sum(tokens), sum(count > 0 for count in tokens), max_response_length)


class LossConfig:
    """The actor's config as a policy loss sees it: its settings, `global_batch_info` and `rollout_correction`."""

    def __init__(self, actor: Any, denominators: LossDenominators, rollout_correction: Any = None):
        self._actor = actor
        self.global_batch_info = denominators.as_batch_info()
        self.rollout_correction = rollout_correction

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._actor, name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        """The setting, or `default` where there is none of that name."""
        return getattr(self, name, default)


class PaddedMicroBatch:
    """Rows of a micro-batch as [b, W]: W is the longest response, padding on the right."""

    def __init__(self, rows: Sequence[Trajectory], like: torch.Tensor):
        lengths = [row.length for row in rows]
        self.rows, self.like = rows, like
        self.shape = (len(rows), max([1, *lengths]))
        starts = np.arange(len(rows), dtype=np.int64) * self.shape[1]
        within = [np.arange(length, dtype=np.int64) for length in lengths]
        where = np.concatenate([start + w for start, w in zip(starts, within, strict=True)] or [starts])
        self._where = torch.from_numpy(where).to(like.device)
        if len(where) != like.numel():
            raise ValueError(f"{like.numel()} log-probs for rows with {len(where)} response tokens")

    def pad(self, flat: torch.Tensor) -> torch.Tensor:
        """Flat [ΣL] → [b, W], differentiable."""
        out = flat.new_zeros(self.shape[0] * self.shape[1])
        return out.index_copy(0, self._where, flat).view(self.shape)

    def column(self, values: Sequence[np.ndarray]) -> torch.Tensor:
        """One array per row → [b, W] in the dtype and on the device of the log-probs."""
        flat = torch.from_numpy(np.concatenate([np.asarray(v) for v in values]))
        return self.pad(flat.to(self.like.device, self.like.dtype))

    def needed(self, name: str, why: str) -> torch.Tensor:
        """A column that every row must have. ValueError naming the first that lacks it."""
        for row in self.rows:
            if getattr(row, name) is None:
                raise ValueError(f"{why}: response {row.index} of {row.uid} has no {name}")
        return self.column([getattr(row, name) for row in self.rows])


class ActorObjective:
    """Loss of the actor as a `MicroLoss` of the training engine (verl/engine/training/base.py).

    `actor` is the group `actor_rollout_ref.actor` (clip_ratio*, loss_agg_mode, entropy_coeff, use_kl_loss,
    kl_loss_coef, kl_loss_type, policy_loss.loss_mode); `denominators` the counts of the mini-batch;
    `rollout_correction` the group of that name: with bypass_mode the old policy is the sampler.

    Metrics come as (sum, weight). The mini-batch's value is Σsum / Σweight over its micro-batches: shares and
    means weigh by their tokens; an aggregated term (pg_loss, kl_loss, entropy_loss, loss) is a part of a sum,
    and weighs by its share of the mini-batch's tokens, so that weights add up to 1 and parts just add.
    """

    def __init__(self, actor: Any, denominators: LossDenominators, rollout_correction: Any = None):
        self._correction = parse_correction(rollout_correction)
        loss_mode = setting(setting(actor, "policy_loss"), "loss_mode", "vanilla")
        self._policy_loss = LOSSES.get("bypass_mode" if self._correction.bypass else loss_mode)
        self._mode = setting(actor, "loss_agg_mode", "token-mean")
        self._denominators = denominators
        self._config = LossConfig(actor, denominators, rollout_correction)
        self._entropy_coeff = float(setting(actor, "entropy_coeff", 0.0))
        self._use_kl = bool(setting(actor, "use_kl_loss", False))
        self._kl_coef = float(setting(actor, "kl_loss_coef", 0.001))
        self._kl_type = setting(actor, "kl_loss_type", "low_var_kl")

    def __call__(self, micro: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        """Scalar to differentiate, already divided by the global counts, and metrics as (sum, weight)."""
        area = PaddedMicroBatch(micro.rows, micro.log_probs)
        mask = area.column([loss_mask(row) for row in micro.rows])
        tokens = sum(int(np.count_nonzero(loss_mask(row))) for row in micro.rows)
        log_prob = area.pad(micro.log_probs)
        pg_loss, metrics = self._policy_term(area, log_prob, mask, tokens)
        loss = pg_loss
        parts = {"actor/pg_loss": pg_loss}
        if self._entropy_coeff and micro.entropy is None:
            raise ValueError(f"entropy_coeff={self._entropy_coeff} needs the engine's entropy of this pass")
        if micro.entropy is not None:
            entropy = micro.entropy if self._entropy_coeff else micro.entropy.detach()
            parts["actor/entropy_loss"] = self._aggregate(area.pad(entropy), mask)
            if self._entropy_coeff:
                loss = loss - self._entropy_coeff * parts["actor/entropy_loss"]
        if self._use_kl:
            ref = area.needed("ref_log_probs", "use_kl_loss")
            parts["actor/kl_loss"] = self._aggregate(kl_penalty(log_prob, ref, self._kl_type), mask)
            loss = loss + self._kl_coef * parts["actor/kl_loss"]
            metrics["actor/kl_coef"] = (self._kl_coef * tokens, float(tokens))
            clipped = masked(clipped_tokens(log_prob, ref, self._kl_type), mask).sum()
            metrics["actor/kl_clipped_ratio"] = (float(clipped), float(tokens))
        parts["actor/loss"] = loss
        share = tokens / self._denominators.tokens if self._denominators.tokens else 0.0
        values = torch.stack([part.detach() for part in parts.values()]).tolist()
        return loss, metrics | {name: (v, share) for name, v in zip(parts, values, strict=True)}

    def _aggregate(self, terms: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return agg_loss(terms, mask, self._mode, **self._denominators.as_batch_info())

    def _policy_term(
        self, area: PaddedMicroBatch, log_prob: torch.Tensor, mask: torch.Tensor, tokens: int
    ) -> tuple[torch.Tensor, Metrics]:
        """The registered loss on this micro-batch; its metrics weigh by tokens."""
        bypass = self._correction.bypass
        old = area.needed("rollout_log_probs", "bypass_mode") if bypass else _old_log_prob(area, log_prob)
        loss, metrics = self._policy_loss(
            old_log_prob=old,
            log_prob=log_prob,
            advantages=area.needed("advantages", "policy loss"),
            response_mask=mask,
            loss_agg_mode=self._mode,
            config=self._config,
            rollout_is_weights=self._weights(area, log_prob, old),
        )
        return loss, {name: (_number(value) * tokens, float(tokens)) for name, value in metrics.items()}

    def _weights(
        self, area: PaddedMicroBatch, log_prob: torch.Tensor, old: torch.Tensor
    ) -> torch.Tensor | None:
        """Importance weights: the rows' own, else with bypass those of the current policy over the sampler."""
        if any(row.is_weights is not None for row in area.rows):
            return area.needed("is_weights", "rollout correction")
        how = self._correction.weighting
        if how is None or not (self._correction.bypass and self._correction.reinforce):
            return None
        policy = area.column([row.response_mask for row in area.rows])
        return weights_now(log_prob, old, policy, how)


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


def _old_log_prob(area: PaddedMicroBatch, log_prob: torch.Tensor) -> torch.Tensor:
    """old_log_probs; sg(logp) for rows that have none: the step's first update is its own old policy."""
    have = [row.old_log_probs is not None for row in area.rows]
    current = log_prob.detach()
    if not any(have):
        return current
    parts = [
        row.old_log_probs if known else np.zeros(row.length)
        for row, known in zip(area.rows, have, strict=True)
    ]
    given = area.column([np.asarray(part) for part in parts])
    return torch.where(torch.tensor(have, device=given.device).unsqueeze(-1), given, current)
