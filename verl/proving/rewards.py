"""Scores under proof: a failure is none, and each response has its own."""

from __future__ import annotations

import copy
import io
from contextlib import redirect_stderr
from pathlib import Path

from verl.algorithms.batch_advantages import copied
from verl.config.reward_weights import user_scores
from verl.proving.finding import FAILED, LOOK, OK, SKIPPED, Finding
from verl.proving.life import Life
from verl.reward.runner import RewardRunner
from verl.trajectory import Batch, Trajectory


def _unscored(t: Trajectory) -> Trajectory:
    fresh = copied(t)
    fresh.score, fresh.score_error, fresh.score_parts, fresh.extra = None, None, {}, dict(t.extra)
    fresh.timing = dict(t.timing)
    return fresh


def failing(life: Life, batch: Batch) -> Finding:
    """Score a response with a function that raises."""
    name, advice = "failing reward", "a reward function that fails gives a score: report it"
    rewards = life.parts.rewards
    if not rewards.asks_function:
        return Finding(name, "no reward function scores", verdict=SKIPPED)
    config = copy.deepcopy(life.config)
    config.custom_reward_function.path = str(Path(__file__).with_name("failing_reward.py"))
    config.custom_reward_function.name = "compute_score"
    runner, row = RewardRunner(config), _unscored(batch[0])
    try:
        with redirect_stderr(io.StringIO()):  # the failure is meant
            life.parts.loop.run(runner.score_batch([row]))
    finally:
        runner.close()
    right = row.score is None and row.score_error is not None
    measured = "no score, and the error" if right else f"a score of {row.score}"
    return Finding(name, measured, "no score", OK if right else FAILED, "" if right else advice)


def again(life: Life, batch: Batch) -> Finding:
    """Score the batch again, in another order."""
    name, rewards = "same scores again", life.parts.rewards
    scored = [t for t in batch if t.scored]
    if not rewards.asks_function or not rewards.per_response or not scored or not _by_function(life):
        return Finding(name, "no function scores single responses", verdict=SKIPPED)
    rows = [_unscored(t) for t in reversed(scored)]
    life.parts.loop.run(rewards.score_batch(rows))
    changed = sum(row.score != t.score for row, t in zip(reversed(rows), scored, strict=True))
    advice = "the reward function draws random numbers, keeps state, or its scores are another response's"
    measured = f"{changed} of {len(rows)} scores differ"
    return Finding(name, measured, "0", LOOK if changed else OK, advice if changed else "")


def _by_function(life: Life) -> bool:
    return user_scores(life.config) or not life.config.actor_rollout_ref.rollout.agent.environment.name
