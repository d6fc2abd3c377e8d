"""From scores to advantages: what the loop calls once per step, on the driver.

decide which responses count → token rewards → KL in the reward → correction → the estimator → columns of the batch.
A failed score is not an outcome. It never becomes a number: the response leaves every statistic and the loss.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.algorithms import core_algos  # noqa: F401  (it fills the registries)
from verl.algorithms.advantage import EPSILON, Arrays, Estimator, EstimatorInputs
from verl.algorithms.correction import correct, parse_correction
from verl.algorithms.kl import apply_kl_penalty
from verl.algorithms.pf_ppo import resample
from verl.algorithms.registry import ESTIMATORS, Algorithm
from verl.config.schema.base import setting
from verl.trajectory import COLUMNS, Batch, Trajectory

_OFFERED_APART = {"response_ids", "response_mask", "token_rewards", "loss_mask", "advantages", "returns"}


def compute_advantages(
    batch: Batch, algorithm: Any, rollout_n: int, kl_beta: float | None = None
) -> dict[str, float]:
    """Fill token_rewards, advantages, returns and loss_mask of every trajectory; return what is to be logged.

    `algorithm` is the config group (adv_estimator, norm_adv_by_std_in_grpo, use_kl_in_reward, kl_penalty, …);
    `kl_beta` the coefficient of the KL in the reward, needed with use_kl_in_reward (then old and reference
    log-probs must be there). Responses that do not count (see
    `prepare_outcomes`) get advantages of zero and an empty loss mask, and no estimator sees them.

    With `algorithm.rollout_correction` rows also get is_weights, and what is rejected leaves their loss_mask; in
    bypass mode that is done before each update (verl.workers.plan), for it needs the weights of that moment.

    Metrics: training/dropped_groups; with KL in the reward actor/reward_kl_penalty and its coefficient;
    rollout_corr/rollout_is_… and rollout_rs_…; critic/reward_baseline/mean where greedy responses are compared with.
    """
    estimator = ESTIMATORS.get(algorithm.adv_estimator)
    greedy = "reward_baselines" in ESTIMATORS.needs(algorithm.adv_estimator)
    usable, dropped = prepare_outcomes(batch, rollout_n, needs_group_baseline(estimator), greedy)
    metrics: dict[str, float] = {"training/dropped_groups": dropped}
    correction = parse_correction(setting(algorithm, "rollout_correction"))
    for t in batch:
        t.advantages = t.returns = np.zeros(t.length, np.float32)
        t.token_rewards = token_rewards(t).astype(np.float32) if has_outcome(t) else t.advantages.copy()
    # What is not trained on may have a reward all the same: a response left alone in its group.
    scored = Batch([t for t in batch if has_outcome(t)], batch.meta)
    rows = Batch([t for t, counted in zip(batch, usable, strict=True) if counted], batch.meta)
    beta = kl_beta if setting(algorithm, "use_kl_in_reward", False) else None
    if beta is None and setting(algorithm, "use_kl_in_reward", False):
        raise ValueError("use_kl_in_reward: compute_advantages needs kl_beta, the coefficient in force")
    if beta is not None:
        old = "rollout_log_probs" if correction.bypass else "old_log_probs"
        metrics |= _charge_kl(scored, algorithm, beta, old)
    if correction.active and not correction.bypass:
        metrics |= correct(rows.trajectories, correction)
    if len(rows):
        on_inputs = getattr(estimator, "on_inputs", None)
        if on_inputs is None:
            _estimate_on_tensors(rows, estimator, algorithm)
        else:
            _estimate(rows, on_inputs, algorithm)
    if greedy:
        found = _baselines(Batch({t.uid: t for t in rows}.values()))
        metrics["critic/reward_baseline/mean"] = math.nan if found is None else float(np.mean(found))
    return metrics


def rows_of_update(batch: Batch, algorithm: Any, seed: Sequence[int], metrics: dict[str, float]) -> Batch:
    """What a step's updates train on: the batch, or with `use_pf_ppo` responses drawn from it; what is to be logged of that is added
    to `metrics`."""
    if not setting(algorithm, "use_pf_ppo", False):
        return batch
    drawn, found = resample(batch, algorithm, seed)
    metrics |= found
    return drawn


def has_outcome(trajectory: Trajectory) -> bool:
    """True if the response has a finite score."""
    return trajectory.score is not None and math.isfinite(trajectory.score)


def prepare_outcomes(
    batch: Batch, rollout_n: int, needs_group_baseline: bool, needs_greedy: bool = False
) -> tuple[np.ndarray, int]:
    """Decide which responses count and set `loss_mask` of every trajectory.

    Returns (usable bool [N], number of groups dropped). loss_mask is the policy mask of usable responses, but for those
    without gradient (`rollout.agent.on_status`), and all False elsewhere. With `rollout_n` ≥ 2 and an estimator that compares the members of a group, a group left with one scored
    response has no baseline: it is dropped. With rollout_n = 1 every response is a group of one and all scored ones count.
    `needs_greedy`: a group is dropped too whose greedy response has no score.
    """
    outcomes = {id(t) for t in batch if has_outcome(t)}
    dropped = 0
    for group in batch.groups():
        members = [id(t) for t in group if id(t) in outcomes]
        alone = len(members) == 1 and rollout_n >= 2 and needs_group_baseline
        greedy = group[0].baseline
        if members and (alone or (needs_greedy and (greedy is None or not has_outcome(greedy)))):
            dropped += 1
            outcomes -= set(members)
    usable = np.array([id(t) in outcomes for t in batch], dtype=bool)
    for t, counts in zip(batch, usable, strict=True):
        learns = counts and not t.extra.get("without_gradient")
        t.loss_mask = np.array(t.response_mask, dtype=bool) if learns else np.zeros(t.length, dtype=bool)
    return usable, dropped


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


def needs_group_baseline(estimator: Algorithm) -> bool:
    """True for an estimator that compares the responses to one prompt: it asks for the group keys, `index`."""
    return "index" in inspect.signature(estimator).parameters


def _pad(rows: Batch, column: str) -> torch.Tensor:
    """[N, max(1, max L)]: one column at least, so that a response without tokens has a place for its score."""
    width = max(1, int(rows.lengths.max()))
    return torch.from_numpy(rows.padded(column, width=width))


def _charge_kl(scored: Batch, algorithm: Any, beta: float, old: str) -> dict[str, float]:
    """Take β·KL(old‖ref) off the token rewards of every scored response; returns the metrics of the penalty."""
    if not len(scored):
        return {"actor/reward_kl_penalty": float("nan"), "actor/reward_kl_penalty_coeff": beta}
    rewards, metrics = apply_kl_penalty(
        _pad(scored, "token_rewards"),
        _needed(scored, old),
        _needed(scored, "ref_log_probs"),
        _pad(scored, "response_mask"),
        beta,
        setting(algorithm, "kl_penalty", "kl"),
    )
    scored.fill("token_rewards", rewards.numpy())
    return metrics


def _needed(rows: Batch, column: str) -> torch.Tensor:
    if not rows.has(column):
        raise ValueError(f"use_kl_in_reward needs {column} of every response before advantages are computed")
    return _pad(rows, column)


def _estimate(rows: Batch, estimator: Estimator, algorithm: Any) -> None:
    """Call an estimator of `EstimatorInputs` and write its results, float32, into the rows."""
    masks = [np.asarray(t.response_mask, bool) for t in rows]
    result = estimator(_inputs(rows, masks, algorithm))
    advantages, returns = result if isinstance(result, tuple) else (result, None)
    for t, mask, value in zip(rows, masks, advantages, strict=True):
        t.advantages = _on_tokens(value, mask)
        t.returns = t.advantages
    for t, mask, value in zip(rows, masks, returns, strict=True) if returns is not None else ():
        t.returns = _on_tokens(value, mask)


def _on_tokens(values: Any, mask: np.ndarray) -> np.ndarray:
    """A number, or one for each policy token, on the tokens of a response: float32 [L], 0 on those of others."""
    out = np.zeros(len(mask), np.float32)
    out[mask] = values
    return out


def _inputs(rows: Batch, masks: Arrays, algorithm: Any) -> EstimatorInputs:
    def column(name: str) -> Iterator[np.ndarray]:
        if not rows.has(name):
            raise ValueError(
                f"adv_estimator={algorithm.adv_estimator} needs {name}, which this step does not have"
            )
        dtype = bool if COLUMNS[name].dtype is bool else np.float64
        # One response after another: float64 copies of all tokens of a step would be gigabytes.
        values = (np.asarray(t.column(name), dtype) for t in rows)
        return (own if mask.all() else own[mask] for own, mask in zip(values, masks, strict=True))

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
    )


def _outcome(t: Trajectory) -> float:
    """The sum of a response's token rewards; of one without a policy token its score."""
    if t.policy_tokens and t.token_rewards is not None:
        return float(np.sum(t.token_rewards, dtype=np.float64))
    return float(np.float32(t.score or 0.0))


def _baselines(rows: Batch) -> np.ndarray | None:
    """The score of each prompt's greedy response, float64 [N]; None where there is one without."""
    found = [t.baseline.score for t in rows if t.baseline is not None]
    return np.array(found, np.float64) if len(found) == len(rows) > 0 else None


def _estimate_on_tensors(rows: Batch, estimator: Algorithm, algorithm: Any) -> None:
    """The same for an estimator of the public form, with the arguments that it names."""
    mask = _pad(rows, "response_mask")
    offered = _offer(rows, algorithm)
    advantages, returns = estimator(**_arguments(estimator, offered, str(algorithm.adv_estimator)))
    for name, result in (("advantages", advantages), ("returns", returns)):
        if tuple(result.shape) != tuple(mask.shape):
            raise ValueError(
                f"adv_estimator={algorithm.adv_estimator} returned {name} of shape {tuple(result.shape)}; "
                f"expected {tuple(mask.shape)} (responses, response length)"
            )
        kept = torch.where(mask.bool(), result.float(), torch.zeros_like(mask))
        rows.fill(name, kept.numpy())


def _rewards(rows: Batch) -> torch.Tensor:
    """Token rewards float32 [N, W], KL penalty taken off.

    The score of a response without a policy token stands in its first column: its mask is 0 there, and the
    row's sum is the score, as for every other.
    """
    rewards = _pad(rows, "token_rewards")
    for row, t in zip(rewards, rows, strict=True):
        if t.policy_tokens == 0:
            row[0] = t.score
    return rewards


def _offer(rows: Batch, algorithm: Any) -> dict[str, Callable[[], Any]]:
    """Everything an estimator may ask for, by name; made only when asked for."""
    offered: dict[str, Callable[[], Any]] = {
        "token_level_rewards": lambda: _rewards(rows),
        "response_mask": lambda: _pad(rows, "response_mask"),
        "loss_mask": lambda: _pad(rows, "loss_mask"),
        "index": lambda: rows.uids,
        "config": lambda: algorithm,
        "epsilon": lambda: EPSILON,
        "norm_adv_by_std_in_grpo": lambda: setting(algorithm, "norm_adv_by_std_in_grpo", True),
        "gamma": lambda: setting(algorithm, "gamma", 1.0),
        "lam": lambda: setting(algorithm, "lam", 1.0),
        "non_tensor_batch": lambda: _view(rows).non_tensor_batch,
        "batch": lambda: _view(rows).batch,
    }
    baselines = _baselines(rows)
    if baselines is not None:
        offered["reward_baselines"] = lambda: torch.from_numpy(baselines).float()
    for name, column in COLUMNS.items():
        if column.public and name not in _OFFERED_APART and rows.has(name):
            offered[column.public] = lambda name=name: _pad(rows, name)  # type: ignore[misc]
    return offered


def _view(rows: Batch) -> Any:
    from verl.data_proto import DataProto

    return DataProto.from_trajectories(rows)


def _arguments(estimator: Algorithm, offered: Mapping[str, Callable[[], Any]], name: str) -> dict[str, Any]:
    """The offered arguments that the estimator names; all of them if it takes **kwargs.

    ValueError if it requires one that is not there.
    """
    parameters = inspect.signature(estimator).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return {key: make() for key, make in offered.items()}
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in offered]
    if missing:
        raise ValueError(
            f"adv_estimator={name} asks for {', '.join(missing)}, which this step does not have; "
            f"there are: {', '.join(sorted(offered))}"
        )
    return {p.name: offered[p.name]() for p in parameters if p.name in offered}
