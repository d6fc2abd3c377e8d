"""From scores to advantages: what the loop calls once per step, on the driver.

decide which responses count → token rewards → KL in the reward → correction → the estimator → columns of the batch.
A failed score is not an outcome. It never becomes a number: the response leaves every statistic and the loss.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from verl.algorithms.advantage import Arrays, Estimator, EstimatorInputs
from verl.algorithms.correction import correct, on_tokens, parse_correction
from verl.algorithms.entropy import controls_entropy, weigh_entropy
from verl.algorithms.flat_tokens import Rows
from verl.algorithms.kl import charge_kl
from verl.algorithms.registry import ESTIMATORS
from verl.config.schema.base import setting
from verl.trajectory import COLUMNS, Batch, Trajectory, fill_flat, flat


def compute_advantages(
    batch: Batch,
    algorithm: Any,
    rollout_n: int,
    kl_beta: float | None = None,
    state: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Fill token_rewards, advantages, returns and loss_mask of every trajectory; return what is to be logged.

    `algorithm` is the config group (adv_estimator, norm_adv_by_std_in_grpo, use_kl_in_reward, kl_penalty, …);
    `kl_beta` the coefficient of the KL in the reward, needed with use_kl_in_reward (then old and reference
    log-probs must be there); `state` what the estimator keeps from step to step. Responses that do not count (see
    `prepare_outcomes`) get advantages of zero and an empty loss mask, and no estimator sees them.

    With `algorithm.rollout_correction` rows also get is_weights, and what is rejected leaves their loss_mask; in
    bypass mode that is done before each update (verl.workers.update_plan), for it needs the weights of that moment.
    With `rollout_rs_in_baseline=False` the estimator does not see responses that are rejected whole.

    Metrics: training/dropped_groups; with KL in the reward actor/reward_kl_penalty and its coefficient;
    rollout_corr/rollout_is_… and rollout_rs_…; critic/reward_baseline/mean where greedy responses are compared with.
    """
    greedy = "reward_baselines" in ESTIMATORS.needs(algorithm.adv_estimator)
    of_source = {source: _settings_of(source, algorithm) for source in {t.prompt.data_source for t in batch}}
    compares = {s: ESTIMATORS.declared(group.adv_estimator).compares_groups for s, group in of_source.items()}
    usable, dropped = prepare_outcomes(batch, rollout_n, compares, greedy)
    metrics: dict[str, float] = {}
    correction = parse_correction(setting(algorithm, "rollout_correction"))
    for t in batch:
        t.advantages = t.returns = np.zeros(t.length, np.float32)
        t.token_rewards = token_rewards(t).astype(np.float32) if t.scored else t.advantages.copy()
    # What is not trained on may have a reward all the same: a response left alone in its group.
    scored = Batch([t for t in batch if t.scored], batch.meta)
    rows = Batch([t for t, counted in zip(batch, usable, strict=True) if counted], batch.meta)
    if setting(algorithm, "use_kl_in_reward", False):
        if kl_beta is None:
            raise ValueError("use_kl_in_reward: compute_advantages needs kl_beta, the coefficient in force")
        old = "rollout_log_probs" if correction.bypass else "old_log_probs"
        metrics |= _charge_kl(scored, algorithm, kl_beta, old)
    if correction.active and not correction.bypass:
        metrics |= correct(rows.trajectories, correction)
        if not correction.rejected_in_baseline:
            rows, alone = _without_rejected(rows, compares, rollout_n)
            dropped += alone
    metrics["training/dropped_groups"] = dropped
    state = {} if state is None else state
    for settings in {id(group): group for group in of_source.values()}.values():
        part = [t for t in rows if of_source[t.prompt.data_source] is settings]
        if part:
            _estimate(Batch(part, batch.meta), ESTIMATORS.get(settings.adv_estimator), settings, state)
    if controls_entropy(algorithm):
        metrics |= weigh_entropy(batch, algorithm, state)
    if greedy:
        baselines = _baselines(Batch({t.uid: t for t in rows}.values()))
        metrics["critic/reward_baseline/mean"] = math.nan if baselines is None else float(np.mean(baselines))
    return metrics


def _settings_of(source: str, algorithm: Any) -> Any:
    """The algorithm's settings for the rows of a data source (`by_source`); the group itself where there are none."""
    changes = (setting(algorithm, "by_source") or {}).get(source)
    if not changes:
        return algorithm
    settings = copy.copy(algorithm)
    for name, value in changes.items():
        setattr(settings, name, value)
    return settings


def prepare_outcomes(
    batch: Batch, rollout_n: int, needs_group_baseline: bool | Mapping[str, bool], needs_greedy: bool = False
) -> tuple[np.ndarray, int]:
    """Decide which responses count and set `loss_mask` of every trajectory.

    Returns (usable bool [N], number of groups dropped). loss_mask is the policy mask of usable responses, but for those
    without gradient (`rollout.agent.on_status`), and all False elsewhere. With `rollout_n` ≥ 2 and an estimator that
    compares the members of a group (of the run, or of each data source), a group left with one scored response has no
    baseline: it is dropped. With rollout_n = 1 every response is a group of one and all scored ones count.
    `needs_greedy`: a group is dropped too whose greedy response has no score.
    """
    outcomes = {id(t) for t in batch if t.scored}
    dropped = 0
    for group in batch.groups():
        members = [id(t) for t in group if id(t) in outcomes]
        alone = len(members) == 1 and rollout_n >= 2 and _compares(group[0], needs_group_baseline)
        greedy = group[0].baseline
        if members and (alone or (needs_greedy and (greedy is None or not greedy.scored))):
            dropped += 1
            outcomes -= set(members)
    usable = np.array([id(t) in outcomes for t in batch], dtype=bool)
    for t, counts in zip(batch, usable, strict=True):
        learns = counts and not t.extra.get("without_gradient")
        t.loss_mask = np.array(t.response_mask, dtype=bool) if learns else np.zeros(t.length, dtype=bool)
    return usable, dropped


def _compares(trajectory: Trajectory, needs_group_baseline: bool | Mapping[str, bool]) -> bool:
    if isinstance(needs_group_baseline, bool):
        return needs_group_baseline
    return needs_group_baseline[trajectory.prompt.data_source]


def _without_rejected(rows: Batch, compares: Mapping[str, bool], rollout_n: int) -> tuple[Batch, int]:
    """(the rows of which rejection left a token to train on, the number of groups it left without a baseline).

    A response that had no gradient before the rejection stays: its score is an outcome of its group all the same.
    """
    accepted: list[Trajectory] = []
    dropped = 0
    for group in rows.groups():
        members = [t for t in group if t.loss_mask.any() or t.extra.get("without_gradient") or not t.policy_tokens]
        if rollout_n >= 2 and len(members) == 1 and _compares(group[0], compares):
            members[0].loss_mask = np.zeros(members[0].length, bool)
            members, dropped = [], dropped + 1
        accepted += members
    return Batch(accepted, rows.meta), dropped


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
    positions = np.flatnonzero(mask)
    values = np.asarray(scores, dtype=np.float64)
    if values.shape != rewards.shape:
        raise ValueError(
            f"response {trajectory.index} of {trajectory.uid}: token_scores has shape {values.shape}, "
            f"the response has {trajectory.length} tokens"
        )
    before = np.searchsorted(positions, np.arange(trajectory.length), side="right") - 1
    np.add.at(rewards, positions[before.clip(min=0)], values)
    return rewards


def _charge_kl(scored: Batch, algorithm: Any, beta: float, old: str) -> dict[str, float]:
    """Take β·KL(old‖ref) off the token rewards of every scored response; returns the metrics of the penalty."""
    if not len(scored):
        return {"actor/reward_kl_penalty": float("nan"), "actor/reward_kl_penalty_coeff": beta}
    columns = ("token_rewards", old, "ref_log_probs", "response_mask")
    if missing := next((name for name in columns if not scored.has(name)), None):
        raise ValueError(f"use_kl_in_reward needs {missing} of every response before advantages are computed")
    rewards, old_log_probs, reference, mask = (
        torch.from_numpy(flat(scored.trajectories, name)).double() for name in columns
    )
    lengths = Rows([t.length for t in scored])
    name = setting(algorithm, "kl_penalty", "kl")
    charged, metrics = charge_kl(rewards, old_log_probs, reference, mask, lengths, beta, name)
    fill_flat(scored.trajectories, "token_rewards", charged.numpy())
    return metrics


def _estimate(rows: Batch, estimator: Estimator, algorithm: Any, state: dict[str, Any]) -> None:
    """Call an estimator of `EstimatorInputs` and write its results, float32, into the rows."""
    masks = [np.asarray(t.response_mask, bool) for t in rows]
    result = estimator(replace(_inputs(rows, masks, algorithm), state=state))
    advantages, returns = result if isinstance(result, tuple) else (result, result)
    if (weight := float(setting(algorithm, "weight", 1.0))) != 1:
        of_both, advantages = returns is advantages, [weight * values for values in advantages]
        returns = advantages if of_both else returns
    for t, mask, advantage, value in zip(rows, masks, advantages, returns, strict=True):
        t.advantages = on_tokens(advantage, mask)
        t.returns = t.advantages if returns is advantages else on_tokens(value, mask)


def _inputs(rows: Batch, masks: Arrays, algorithm: Any) -> EstimatorInputs:
    def column(name: str) -> Iterator[np.ndarray]:
        if not rows.has(name):
            raise ValueError(f"adv_estimator={algorithm.adv_estimator} needs {name}, which this step has not")
        dtype = bool if COLUMNS[name].dtype is bool else np.float64
        # One response after another: float64 copies of all tokens of a step would be gigabytes.
        values = (np.asarray(t.column(name), dtype) for t in rows)
        return (row if mask.all() else row[mask] for row, mask in zip(values, masks, strict=True))

    def part(key: str) -> list[Any]:
        return [t.score if key in ("score", "reward") else t.score_parts.get(key) for t in rows]

    return EstimatorInputs(
        # A score has float32's digits here as on its token.
        scores=np.array([_outcome(t) for t in rows], np.float64),
        index=rows.uids,
        lengths=np.array([np.count_nonzero(mask) for mask in masks], np.int64),
        column=column,
        part=part,
        baselines=_baselines(rows),
        config=algorithm,
        divide=setting(algorithm, "norm_adv_by_std_in_grpo", True),
        gamma=setting(algorithm, "gamma", 1.0),
        lam=setting(algorithm, "lam", 1.0),
        batch=rows,
    )


def _outcome(t: Trajectory) -> float:
    """The sum of a response's token rewards; of one without a policy token its score."""
    if t.policy_tokens and t.token_rewards is not None:
        return float(np.sum(t.token_rewards, dtype=np.float64))
    return float(np.float32(t.score or 0.0))


def _baselines(rows: Batch) -> np.ndarray | None:
    """The score of each prompt's greedy response, float64 [N]; None where there is one without."""
    scores = [t.baseline.score for t in rows if t.baseline is not None]
    return np.array(scores, np.float64) if len(scores) == len(rows) > 0 else None


# -- which responses are trained on ----------------------------------------------------------------------------


def rows_of_update(batch: Batch, algorithm: Any, seed: int | Sequence[int]) -> tuple[Batch, dict[str, float]]:
    """What a step's updates train on, after advantages: the batch; with `use_pf_ppo` as many scored responses as it
    has, drawn with replacement with probability ∝ weight + 1e-8.

    They keep the batch's order. A response that is drawn again is a trajectory of its own, over the same arrays.
    Metrics: training/pf_ppo/unique_ratio, distinct responses of those drawn; nan without a scored one. Source: arXiv
    2409.06957.
    """
    if not setting(algorithm, "use_pf_ppo", False):
        return batch, {}
    rows = [t for t in batch if t.scored]
    if not rows:
        return batch, {"training/pf_ppo/unique_ratio": float("nan")}
    settings = setting(algorithm, "pf_ppo")
    method, power = setting(settings, "reweight_method", "pow"), setting(settings, "weight_pow", 2.0)
    with np.errstate(over="ignore"):  # of high powers: the largest weights are then equal
        weights = resampling_weights(np.array([t.score for t in rows], np.float64), method, power)
    weights = np.minimum(weights, 1e300) + 1e-8
    drawn = np.random.default_rng(seed).choice(len(rows), size=len(rows), p=weights / weights.sum())
    chosen = [copied(rows[i]) for i in np.sort(drawn)]
    ratio = len(np.unique(drawn)) / len(rows)
    return Batch(chosen, batch.meta), {"training/pf_ppo/unique_ratio": ratio}


def copied(trajectory: Trajectory) -> Trajectory:
    """A trajectory of its own over the same arrays: columns that are put on it do not reach the original."""
    out = copy.copy(trajectory)
    out.segments = [copy.copy(segment) for segment in trajectory.segments]
    for segment in out.segments:
        segment.columns, segment.trajectory = dict(segment.columns), out
    return out


def resampling_weights(scores: np.ndarray, method: str, power: float) -> np.ndarray:
    """Weight of each score, float64 [N]. ValueError for an unknown method.

    pow: |score|^power. max_min: 1 for the largest and the smallest of the batch, else 0. max_random: 0.4 for the
    largest, else 0.1.
    """
    if method == "pow":
        return np.abs(scores) ** power
    if method == "max_min":
        return ((scores == scores.max()) | (scores == scores.min())).astype(np.float64)
    if method == "max_random":
        return np.where(scores == scores.max(), 0.4, 0.1)
    raise ValueError(f"unknown pf_ppo.reweight_method {method!r}; there are: pow, max_min, max_random")
