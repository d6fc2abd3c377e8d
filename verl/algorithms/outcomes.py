"""Which responses of a step count: the rules for failed scores and groups too small for a baseline.

A failed score is not an outcome. It never becomes a number: the response leaves every statistic and the loss.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from verl.trajectory import Batch, Trajectory


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """What happened to the responses of a batch.

    failed            responses without a finite score
    dropped_groups    groups left with one scored response, which is then not trained on
    failed_groups     groups without any scored response
    empty             responses without a policy token, whatever their score
    usable            responses in the statistics (empty ones too)
    """

    failed: int
    dropped_groups: int
    failed_groups: int
    empty: int
    usable: int

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


def has_outcome(trajectory: Trajectory) -> bool:
    """True if the response has a finite score."""
    return trajectory.score is not None and math.isfinite(trajectory.score)


def prepare_outcomes(
    batch: Batch, rollout_n: int, needs_group_baseline: bool
) -> tuple[np.ndarray, OutcomeCounts]:
    """Decide which responses count and set `loss_mask` of every trajectory.

    Returns (usable bool [N], counts). loss_mask is the policy mask of usable responses and all False elsewhere.
    With `rollout_n` ≥ 2 and an estimator that compares the members of a group, a group left with one scored
    response has no baseline: that response is not usable. With rollout_n = 1 every response is a group of one and
    all scored ones count.
    """
    usable = np.zeros(len(batch), dtype=bool)
    position = {id(t): i for i, t in enumerate(batch)}
    dropped = failed_groups = 0
    for group in batch.groups():
        members = [t for t in group if has_outcome(t)]
        if not members:
            failed_groups += 1
        elif len(members) == 1 and rollout_n >= 2 and needs_group_baseline:
            dropped += 1
        else:
            usable[[position[id(t)] for t in members]] = True
    for t, counts in zip(batch, usable, strict=True):
        t.loss_mask = np.array(t.response_mask, dtype=bool) if counts else np.zeros(t.length, dtype=bool)
    return usable, OutcomeCounts(
        failed=sum(not has_outcome(t) for t in batch),
        dropped_groups=dropped,
        failed_groups=failed_groups,
        empty=sum(t.policy_tokens == 0 for t in batch),
        usable=int(usable.sum()),
    )


def token_rewards(trajectory: Trajectory) -> np.ndarray:
    """Rewards per token, float64 [L], that sum to the score; they stand on policy tokens only.

    The score stands on the last policy token, whatever follows it. `extra["token_scores"]` (any sequence of
    L numbers), where a reward is given per token, is taken instead; what it puts on a token the policy did
    not write moves to the nearest policy token before it (else the first after it). Without a policy token
    all are 0. ValueError if token_scores has another length.
    """
    mask = trajectory.response_mask
    rewards = np.zeros(trajectory.length, dtype=np.float64)
    if not np.any(mask):
        return rewards
    scores = trajectory.extra.get("token_scores")
    if scores is None:
        rewards[-1 - np.argmax(mask[::-1])] = trajectory.score
        return rewards
    written = np.flatnonzero(mask)
    given = np.asarray(scores, dtype=np.float64)
    if given.shape != rewards.shape:
        raise ValueError(
            f"response {trajectory.index} of {trajectory.uid}: token_scores has shape {given.shape}, "
            f"the response has {trajectory.length} tokens"
        )
    before = np.searchsorted(written, np.arange(trajectory.length), side="right") - 1
    np.add.at(rewards, written[before.clip(min=0)], given)
    return rewards
