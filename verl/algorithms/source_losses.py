"""The policy loss of each data source: `algorithm.by_source.NAME.policy_loss` beside the actor's own.

A response's tokens carry the number of their loss in the column `policy_loss_number`: 0 is the actor's, 1 and on those
of the sources. Each loss sees the micro-batch with the tokens of others masked, and divides by the counts of the whole
mini-batch: the sum over the losses is one loss.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.algorithms import entropy_losses, policy_loss  # noqa: F401  (they fill the registry)
from verl.algorithms.correction import Correction
from verl.algorithms.registry import LOSSES, Algorithm, WholeMiniBatch
from verl.config.schema.actor import CLIP_BOUNDS, OF_POLICY_LOSS
from verl.config.schema.base import setting
from verl.trajectory import Batch


@dataclass(frozen=True, slots=True)
class ChosenLoss:
    """A policy loss with the settings that it reads.

    needs  columns that it declared
    whole  what it has to know of the whole mini-batch; None in bypass mode with loss_type=reinforce, which reads none
    """

    actor: Any
    function: Algorithm
    needs: frozenset[str]
    whole: WholeMiniBatch | None

    @property
    def mode(self) -> str:
        """How its tokens are aggregated."""
        return str(setting(self.actor, "loss_agg_mode", "token-mean"))


def sources_with_loss(by_source: Mapping[str, Any] | None) -> list[str]:
    """The data sources that have a policy loss of their own, in the order of their numbers, which begin at 1."""
    return [source for source, settings in (by_source or {}).items() if settings.get("policy_loss")]


def chosen_losses(actor: Any, by_source: Mapping[str, Any] | None, correction: Correction) -> list[ChosenLoss]:
    """The losses of a run by number: the actor's, then those of data sources."""
    changed = [_with(actor, (by_source or {})[source]["policy_loss"]) for source in sources_with_loss(by_source)]
    return [_chosen(settings, correction) for settings in (actor, *changed)]


def _with(actor: Any, changes: Mapping[str, Any]) -> Any:
    """The actor's group with a source's settings; `clip_ratio` sets the bounds that the source leaves open."""
    settings = copy.copy(actor)
    settings.policy_loss = copy.copy(actor.policy_loss)
    if "clip_ratio" in changes:
        changes = {**dict.fromkeys(CLIP_BOUNDS, changes["clip_ratio"]), **changes}
    for name, value in changes.items():
        setattr(settings if name in OF_POLICY_LOSS else settings.policy_loss, name, value)
    return settings


def _chosen(actor: Any, correction: Correction) -> ChosenLoss:
    name = setting(setting(actor, "policy_loss"), "loss_mode", "vanilla")
    declared = LOSSES.declared(name)
    return ChosenLoss(
        actor,
        function=LOSSES.get("bypass_mode" if correction.bypass else name),
        needs=LOSSES.needs(name),
        whole=None if correction.bypass and correction.reinforce else declared.whole,
    )


class LossNumbers:
    """Puts the column `policy_loss_number` on the rows of a batch before its updates."""

    def __init__(self, by_source: Mapping[str, Any]):
        self._numbers = {source: number for number, source in enumerate(sources_with_loss(by_source), start=1)}

    def __call__(self, batch: Batch, step: int) -> Batch:
        """The batch, its rows numbered."""
        for trajectory in batch:
            number = self._numbers.get(trajectory.prompt.data_source, 0)
            for segment in trajectory.segments:
                segment.put("policy_loss_number", np.full(segment.length, number, np.int16))
        return batch
