"""On-policy distillation: a teacher scores the tokens that the policy sampled, and the policy is pulled towards it.

    terms per token ──▶ minimised as they are                 added to the actor's loss, or in its place
                   └──▶ −sg(term) as advantages of a policy loss

Sources: on-policy distillation of language models, arXiv 2306.13649; reverse KL as a reward (On-Policy Distillation,
Thinking Machines 2025); overlap of the most likely tokens, arXiv 2604.13016.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.flat_tokens import Metrics, MicroBatchColumns
from verl.algorithms.kl import kl_penalty
from verl.algorithms.policy_loss import CLIP_KEYS, CLIP_RATIO_C, DPPO_CLIP_RATIO_C, LossInputs
from verl.algorithms.registry import LOSSES
from verl.config.schema.algorithm import TOPK_MODES, DistillationLossConfig
from verl.config.schema.base import Map, setting

if TYPE_CHECKING:
    from verl.engine.training.base import MicroBatch


def compares_teachers_tokens(config: DistillationLossConfig) -> bool:
    """True if the tokens that are compared follow from the teacher's most likely ones
    (`distillation.distillation_loss`)."""
    mode = config.loss_mode
    return mode in TOPK_MODES[:2] or (mode in TOPK_MODES and config.token_set in ("teacher", "intersection"))


def compares_both_sets(config: DistillationLossConfig) -> bool:
    """True if the policy's most likely tokens and the teacher's are compared."""
    return config.loss_mode == "reverse_kl_topk" and config.token_set in ("union", "difference")


def joined_sets(
    ids: np.ndarray, log_probs: np.ndarray, other_ids: np.ndarray, other_log_probs: np.ndarray, *, symmetric: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The policy's k most likely tokens of each position, then the teacher's, [L, 2k] each: ids, and the teacher's
    log-probs, −inf for what is not to be compared: a token's second place, or with `symmetric` a token of both."""
    same = ids[:, :, None] == other_ids[:, None, :]
    first = np.where(same.any(2) & symmetric, -np.inf, log_probs)
    second = np.where(same.any(1), -np.inf, other_log_probs)
    return np.concatenate([ids, other_ids], 1), np.concatenate([first, second], 1).astype(np.float32)


def topk_terms(student: Tensor, teacher: Tensor) -> Tensor:
    """Σ_v ν(v)·(log ν(v) − logp(v)), at least 0: the forward KL over the teacher's k most likely tokens,
    [..., k] → [...].

    `student`, `teacher`: their log-probs of those tokens. A token of −inf for either, which is not in its vocabulary or
    not to be compared, is left out. With the two exchanged it is the reverse KL, over any k tokens.
    """
    absent = (student == float("-inf")) | (teacher == float("-inf"))
    student, teacher = student.masked_fill(absent, 0.0), teacher.masked_fill(absent, 0.0)
    return (teacher.exp() * (teacher - student)).masked_fill(absent, 0.0).sum(-1).clamp(min=0)


def jsd_terms(student: Tensor, teacher: Tensor) -> Tensor:
    """½ Σ_v [ν·log(ν/m) + π·log(π/m)], m = (ν + π)/2, of the log-probs of k tokens, [..., k] → [...]. A token of −inf
    is left out, as in `topk_terms`."""
    absent = student == float("-inf")
    student = student.masked_fill(absent, 0.0)
    middle = torch.logaddexp(student, teacher) - math.log(2)
    terms = teacher.exp() * (teacher - middle) + student.exp() * (student - middle)
    return terms.masked_fill(absent, 0.0).sum(-1) / 2


class Distillation:
    """The distillation part of the actor's loss. `config` is the group `distillation.distillation_loss`.

    Metrics, means over the tokens in the loss unless said: distillation/loss (aggregated), abs_loss, loss_min,
    loss_max, the shares that limits cut (loss_clamped_ratio, log_prob_clamped_ratio); with a policy gradient what its
    loss logs; of the k tokens that are compared student_mass and teacher_mass with _min and _max, and with
    forward_kl_topk and jsd_topk overlap_ratio and overlap_token_advantage.
    """

    def __init__(self, config: DistillationLossConfig):
        self.config = config
        self.topk = config.loss_mode in TOPK_MODES
        self.of_teacher = compares_teachers_tokens(config)
        #: What the engine's pass has to give beside log-probs and entropy.
        outputs = ("candidate_log_probs", "candidates_in_topk")
        self.outputs = outputs[: 1 + self.of_teacher] if self.topk else ()
        self.coefficient = float(config.distillation_loss_coef) if config.use_task_rewards else 1.0

    def __call__(
        self, inputs: LossInputs, columns: MicroBatchColumns, micro: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor], Metrics]:
        """(the scalar to add times `coefficient`, aggregated parts by name, other metrics as (sum, weight))."""
        terms, metrics = self._terms(inputs, columns, micro)
        limit = self.config.loss_max_clamp
        if limit is not None:
            metrics |= self._told(inputs, loss_clamped_ratio=terms.detach().abs() > limit)
            terms = terms.clamp(-limit, limit)
        of_tokens = terms.detach()
        metrics |= self._told(inputs, ("loss",), loss=of_tokens, abs_loss=of_tokens.abs())
        parts = {"distillation/loss": inputs.aggregate(terms)}
        if not self.config.use_policy_gradient:
            return parts["distillation/loss"], parts, metrics
        loss, policy_metrics = self._policy_gradient(replace(inputs, advantages=-of_tokens))
        tokens = float(inputs.loss_mask.sum())
        for name, value in policy_metrics.items():
            metrics[name.replace("actor/", "distillation/")] = (float(value) * tokens, tokens)
        return loss, parts | {"distillation/pg_loss": loss}, metrics

    def _policy_gradient(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Any]]:
        declared = LOSSES.declared(self.config.policy_loss_mode)
        if declared.whole is not None and inputs.trajectory_tokens is not None:
            raise ValueError(
                f"distillation_loss.policy_loss_mode={self.config.policy_loss_mode} "
                "takes responses of one segment; use vanilla"
            )
        config = Map({**inputs.config} | {name: setting(self.config, name) for name in CLIP_KEYS})
        cap = setting(inputs.config, "clip_ratio_c", CLIP_RATIO_C)
        if self.config.policy_loss_mode.startswith("dppo_") and cap == CLIP_RATIO_C:  # not set for it
            config["clip_ratio_c"] = DPPO_CLIP_RATIO_C
        loss = LOSSES.get(self.config.policy_loss_mode)
        return loss(replace(inputs, config=config, columns={}))

    def _terms(self, inputs: LossInputs, columns: MicroBatchColumns, micro: MicroBatch) -> tuple[Tensor, Metrics]:
        if not self.topk:
            teacher = columns["teacher_log_probs"]
            student, teacher, metrics = self._from_below(inputs, inputs.log_probs, teacher)
            return kl_penalty(student, teacher, self.config.loss_mode), metrics
        if missing := [name for name in self.outputs if getattr(micro, name) is None]:
            raise ValueError(f"{self.config.loss_mode} needs the engine's {' and '.join(missing)}")
        teacher = columns["teacher_topk_log_probs"]
        assert micro.candidate_log_probs is not None
        student = micro.candidate_log_probs
        if self.config.loss_mode == "reverse_kl_topk" and self.config.token_set == "intersection":
            assert micro.candidates_in_topk is not None
            teacher = teacher.masked_fill(micro.candidates_in_topk == 0, float("-inf"))
        metrics = self._overlap(inputs, student.detach(), teacher, micro.candidates_in_topk)
        student, teacher, limited = self._from_below(inputs, student, teacher)
        if self.config.loss_mode == "jsd_topk":
            terms = jsd_terms(student, teacher)
        else:
            reverse = self.config.loss_mode == "reverse_kl_topk"
            terms = topk_terms(teacher, student) if reverse else topk_terms(student, teacher)
        return terms, metrics | limited

    def _from_below(self, inputs: LossInputs, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        """Both log-probs limited from below, and the share of tokens of which one was."""
        least = self.config.log_prob_min_clamp
        if least is None:
            return student, teacher, {}
        below = (student.detach() < least) | ((teacher < least) & (teacher > float("-inf")))
        below = below if below.ndim == 1 else below.any(-1)
        limited = torch.where(student == float("-inf"), student, student.clamp(min=least))
        absent = teacher == float("-inf")
        return (
            limited,
            torch.where(absent, teacher, teacher.clamp(min=least)),
            self._told(inputs, log_prob_clamped_ratio=below),
        )

    def _overlap(self, inputs: LossInputs, student: Tensor, teacher: Tensor, overlap: Tensor | None) -> Metrics:
        """What the k tokens have of both, and with `overlap` how far the two agree on the most likely tokens. The
        advantage is the mean of −ν(v)·(log ν(v) − logp(v)) over tokens that are among the k of both, 0 where there is
        none."""
        student = student.masked_fill(teacher == float("-inf"), float("-inf"))  # not compared
        values = {"student_mass": student.exp().sum(-1), "teacher_mass": teacher.exp().sum(-1)}
        if overlap is None:
            return self._told(inputs, ("student_mass", "teacher_mass"), **values)
        gains = torch.where(overlap > 0, teacher.exp() * (student - teacher), 0.0).sum(-1)
        values["overlap_token_advantage"] = gains / overlap.sum(-1).clamp(min=1)
        return self._told(inputs, ("student_mass", "teacher_mass"), overlap_ratio=overlap.mean(-1), **values)

    def _told(self, inputs: LossInputs, spread: Sequence[str] = (), **values: Tensor) -> Metrics:
        """Means over the tokens in the loss, as (sum, tokens); of those in `spread` also {name}_min and {name}_max."""
        mask, out = inputs.loss_mask, dict[str, tuple[float, float]]()
        for name, value in values.items():
            selected = value[mask.bool()].to(mask.dtype)
            out[f"distillation/{name}"] = (float(selected.sum()), float(len(selected)))
            if name in spread and len(selected):
                out[f"distillation/{name}_min"] = (float(selected.min()), 1.0)
                out[f"distillation/{name}_max"] = (float(selected.max()), 1.0)
        return out
