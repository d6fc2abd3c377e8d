"""Policy losses and the critic's loss under the signatures of the public system, with padded tensors [b, L].

a public function ─ flat_form ─→ a function of LossInputs, which the trainer calls
a function of LossInputs ─ padded_form ─→ the public signature, for users who call ours

Gradients of micro-batches and ranks are added, so a loss has to divide by the counts of the whole mini-batch. Losses
written for the public system often do not: `agg_loss` without counts then takes those of the running loss, and the
value of a loss that uses none at all counts as a mean over its tokens (`_MiniBatch`).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.flat_tokens import Count, Rows, aggregate
from verl.algorithms.kl import charge_kl
from verl.algorithms.policy_loss import LossInputs, PolicyLoss
from verl.algorithms.value_loss import value_loss
from verl.config.schema.base import Map, setting

FlatLoss = Callable[[LossInputs], PolicyLoss]
PaddedLoss = Callable[..., PolicyLoss]


def rows_of(padded: Tensor) -> Rows:
    """The rows of a padded tensor [b, L, …]: b rows of L tokens each."""
    return Rows([padded.shape[1]] * padded.shape[0], padded.device)


def pad(rows: Rows, values: Tensor) -> Tensor:
    """Flat [T, …] → [b, W, …], W tokens of the longest row, zeros on the right; differentiable."""
    mask = torch.arange(rows.width) < torch.from_numpy(rows.lengths).unsqueeze(-1)
    where = mask.flatten().nonzero().squeeze(-1).to(values.device)
    out = values.new_zeros(len(rows) * rows.width, *values.shape[1:])
    return out.index_copy(0, where, values).view(len(rows), rows.width, *values.shape[1:])


def takes_inputs(function: Callable[..., Any], public: Collection[str] = ()) -> bool:
    """True for a function of one argument, whose name is not one of the public signature's."""
    parameters = list(inspect.signature(function).parameters.values())
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return len(parameters) == 1 and parameters[0].kind not in collecting and parameters[0].name not in public


def once(form: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorator: the same result for the same function, which need not be hashable."""
    results: dict[int, tuple[Any, Any]] = {}

    @functools.wraps(form)
    def call(function: Any) -> Any:
        return results.setdefault(id(function), (function, form(function)))[1]

    return call


@once
def padded_form(loss: FlatLoss) -> PaddedLoss:
    """A loss of `LossInputs` under the public signature; `response_mask` [b, L] is the loss mask."""

    def call(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> PolicyLoss:
        mask = response_mask.flatten()
        mask = mask if mask.is_floating_point() else mask.to(log_prob.dtype)
        inputs = LossInputs(
            log_probs=log_prob.flatten(),
            old_log_probs=old_log_prob.flatten(),
            advantages=advantages.flatten(),
            loss_mask=mask,
            response_mask=mask,
            rows=rows_of(log_prob),
            loss_agg_mode=loss_agg_mode,
            config=config,
            rollout_is_weights=None if rollout_is_weights is None else rollout_is_weights.flatten(),
        )
        return loss(inputs)

    call.__name__ = call.__qualname__ = f"compute_policy_loss_{loss.__name__}"
    call.__doc__ = loss.__doc__
    return call


@once
def flat_form(function: PaddedLoss) -> FlatLoss:
    """A loss that a user registers, as a function of `LossInputs`: one of a single argument as it is, any other with
    padded tensors."""
    if takes_inputs(function):
        return function

    def call(inputs: LossInputs) -> PolicyLoss:
        weights, mini_batch = inputs.rollout_is_weights, _MiniBatch(inputs)
        reset = _RUNNING.set(mini_batch)
        try:
            loss, metrics = function(
                old_log_prob=pad(inputs.rows, inputs.old_log_probs),
                log_prob=pad(inputs.rows, inputs.log_probs),
                advantages=pad(inputs.rows, inputs.advantages),
                response_mask=pad(inputs.rows, inputs.loss_mask),
                loss_agg_mode=inputs.loss_agg_mode,
                config=_WatchedConfig(inputs.config),
                rollout_is_weights=None if weights is None else pad(inputs.rows, weights),
            )
        finally:
            _RUNNING.reset(reset)
        return (loss if mini_batch.used else mini_batch.part_of_mean(loss, function)), metrics

    call.__module__ = getattr(function, "__module__", __name__)
    call.__qualname__ = getattr(function, "__qualname__", "loss")
    call.public = function  # type: ignore[attr-defined]
    return call


class _MiniBatch:
    """The counts of the mini-batch that a user's loss gets a part of. used: the loss has divided by them."""

    def __init__(self, inputs: LossInputs):
        self.counts: dict[str, Any] = dict(setting(inputs.config, "global_batch_info", None) or {})
        self.used = not self.counts
        self._inputs = inputs

    def part_of_mean(self, loss: Tensor, function: PaddedLoss) -> Tensor:
        """What a mean over the tokens of a micro-batch adds to the mean over those of the mini-batch."""
        name = getattr(function, "__qualname__", "loss")
        if name not in _TOLD:
            _TOLD.add(name)
            logging.getLogger(__name__).warning(
                "policy loss %s: it uses no counts of the mini-batch, so its value is taken as a mean over the tokens "
                "of a micro-batch; agg_loss(…, **config.global_batch_info) says what it divides by",
                name,
            )
        tokens = float(self._inputs.loss_mask.sum())
        if not tokens:  # a mean of nothing may be nan
            return self._inputs.log_probs.sum() * 0.0
        return loss * (tokens / self.counts["batch_num_tokens"])


_TOLD: set[str] = set()
_RUNNING: ContextVar[_MiniBatch | None] = ContextVar("running loss", default=None)


class _WatchedConfig(Map):
    """The config of a loss, which notes that the counts in it are asked for."""

    def __getitem__(self, name: str) -> Any:
        if name == "global_batch_info" and (running := _RUNNING.get()) is not None:
            running.used = True
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: float | None = None,
    trajectory_tokens: Tensor | None = None,
) -> Tensor:
    """`verl.algorithms.flat_tokens.aggregate` of per-token terms [b, L] under a mask [b, L]; without loss_scale_factor
    H is L. In a policy loss that the trainer calls, without counts, they are those of its mini-batch."""
    arguments = {
        "dp_size": dp_size,
        "batch_num_tokens": batch_num_tokens,
        "global_batch_size": global_batch_size,
        "loss_scale_factor": loss_scale_factor,
        "trajectory_tokens": trajectory_tokens,
    }
    counts = {name: value for name, value in arguments.items() if value is not None}
    running = _RUNNING.get()
    if running is not None and dp_size == 1 and not counts.keys() & {"batch_num_tokens", "global_batch_size"}:
        running.used = True
        counts = running.counts | counts
    terms, mask = torch.broadcast_tensors(torch.atleast_2d(loss_mat), torch.atleast_2d(loss_mask))
    return aggregate(terms.flatten(), mask.flatten(), rows_of(terms), loss_agg_mode, **counts)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float = 0.5,
    loss_agg_mode: str = "token-mean",
    **counts: Any,
) -> tuple[Tensor, Tensor]:
    """`verl.algorithms.value_loss.value_loss` of padded tensors [b, L]; `counts` are those of `agg_loss`."""
    predicted, returns, values, mask = (t.flatten() for t in (vpreds, returns, values, response_mask))
    return value_loss(predicted, returns, values, mask, rows_of(vpreds), cliprange_value, loss_agg_mode, **counts)


def apply_kl_penalty(
    token_level_rewards: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    beta: float,
    kl_penalty_name: str = "kl",
) -> tuple[Tensor, dict[str, float]]:
    """`verl.algorithms.kl.charge_kl` of padded tensors [N, L]; the new rewards have the dtype of the old ones."""
    padded = (token_level_rewards, old_log_probs, ref_log_prob, response_mask)
    rewards, old, ref, mask = (tensor.flatten().double() for tensor in padded)
    rows = rows_of(token_level_rewards)
    rewards, metrics = charge_kl(rewards, old, ref, mask, rows, beta, kl_penalty_name)
    return rewards.view_as(token_level_rewards).to(token_level_rewards.dtype), metrics
