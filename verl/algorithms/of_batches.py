"""Advantages on padded tensors: the estimators of plug-ins for the loop, and any estimator for plug-ins that hold a `verl.DataProto`.

Built-in estimators work on trajectories (`verl.algorithms.driver`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from verl.algorithms import core_algos
from verl.algorithms.advantage import EPSILON
from verl.algorithms.registry import Algorithm
from verl.config.schema.base import setting
from verl.data_proto import DataProto
from verl.trajectory import COLUMNS, Batch

_OFFERED_APART = {"response_ids", "token_rewards", "advantages", "returns"}


def padded(rows: Batch, column: str) -> torch.Tensor:
    """[N, max(1, max L)]: one column at least, so that a response without tokens has a place for its score."""
    width = max(1, int(rows.lengths.max()))
    return torch.from_numpy(rows.padded(column, width=width))


def estimate_on_tensors(
    rows: Batch, estimator: Algorithm, algorithm: Any, baselines: np.ndarray | None
) -> None:
    """Call an estimator of the public form with the arguments that it names; fill `advantages` and `returns` of the rows.

    baselines: scores of greedy responses [N], or None. ValueError if the estimator requires what is not there, and for results of
    another shape.
    """
    mask = padded(rows, "response_mask")
    offered = _offer(rows, algorithm, baselines)
    parameters = inspect.signature(estimator).parameters.values()
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in collecting]
    if missing := [name for name in required if name not in offered]:
        raise ValueError(
            f"adv_estimator={algorithm.adv_estimator} asks for {', '.join(missing)}, which this step does not have; "
            f"there are: {', '.join(sorted(offered))}"
        )
    advantages, returns = estimator(**{name: offered[name]() for name in _named(estimator, offered)})
    for name, result in (("advantages", advantages), ("returns", returns)):
        if tuple(result.shape) != tuple(mask.shape):
            raise ValueError(
                f"adv_estimator={algorithm.adv_estimator} returned {name} of shape {tuple(result.shape)}; "
                f"expected {tuple(mask.shape)} (responses, response length)"
            )
        kept = torch.where(mask.bool(), result.float(), torch.zeros_like(mask))
        rows.fill(name, kept.numpy())


def _offer(rows: Batch, algorithm: Any, baselines: np.ndarray | None) -> dict[str, Callable[[], Any]]:
    """Everything an estimator may ask for, by name; made only when asked for."""
    offered: dict[str, Callable[[], Any]] = {
        "token_level_rewards": lambda: _rewards(rows),
        "index": lambda: rows.uids,
        "config": lambda: algorithm,
        "epsilon": lambda: EPSILON,
        "norm_adv_by_std_in_grpo": lambda: setting(algorithm, "norm_adv_by_std_in_grpo", True),
        "gamma": lambda: setting(algorithm, "gamma", 1.0),
        "lam": lambda: setting(algorithm, "lam", 1.0),
        "non_tensor_batch": lambda: DataProto.from_trajectories(rows).non_tensor_batch,
        "batch": lambda: DataProto.from_trajectories(rows).batch,
    }
    if baselines is not None:
        offered["reward_baselines"] = lambda: torch.from_numpy(baselines).float()
    for name, column in COLUMNS.items():
        if column.public and name not in _OFFERED_APART and rows.has(name):
            offered[column.public] = partial(padded, rows, name)
    return offered


def _rewards(rows: Batch) -> torch.Tensor:
    """Token rewards float32 [N, W], KL penalty taken off.

    The score of a response without a policy token stands in its first column: its mask is 0 there, and the
    row's sum is the score, as for every other.
    """
    rewards = padded(rows, "token_rewards")
    for row, t in zip(rewards, rows, strict=True):
        if t.policy_tokens == 0:
            row[0] = t.score
    return rewards


def _named(estimator: Algorithm, offered: Iterable[str]) -> list[str]:
    """What an estimator receives of the arguments offered: those it names; all of them if it takes **kwargs."""
    parameters = inspect.signature(estimator).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return [name for name in offered if takes_all or name in parameters]


def compute_advantage(
    data: DataProto,
    adv_estimator: Any,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Mapping[str, Any] | None = None,
) -> DataProto:
    """The batch with `advantages` and `returns` [N, L], by any registered estimator; groups are `uid`, `num_repeat` is not needed.

    An estimator gets what it names of the batch's columns, of the arguments and of `index`, `batch` and `non_tensor_batch`.
    """
    estimator = core_algos.get_adv_estimator_fn(adv_estimator)
    columns, others = data.batch, data.non_tensor_batch
    given: dict[str, Any] = {**columns, "batch": columns, "non_tensor_batch": others}
    given |= {
        "index": others.get("uid"),
        "gamma": gamma,
        "lam": lam,
        "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
    }
    given["config"] = {"gamma": gamma, "lam": lam} if config is None else config
    advantages, returns = estimator(**{name: given[name] for name in _named(estimator, given)})
    return data.having(advantages=advantages, returns=returns)


def compute_advantage_for_multi_trajectories(
    data: DataProto, batch_keys: Sequence[str], adv_estimator: Any, **settings: Any
) -> DataProto:
    """The same where rows are segments of trajectories: `batch_keys` are "{uid}_{trajectory}_{segment}".

    With GRPO the last segment of a trajectory holds its reward, and its advantage is written on the policy tokens of all segments.
    """
    if adv_estimator != "grpo":
        return compute_advantage(data, adv_estimator, **settings)
    owners, number = np.unique([key.rpartition("_")[0] for key in batch_keys], return_inverse=True)
    segment = np.array([int(key.rpartition("_")[2]) for key in batch_keys])
    last = [max(np.flatnonzero(number == i), key=lambda row: segment[row]) for i in range(len(owners))]
    final = compute_advantage(data[last], adv_estimator, **settings)
    mask = final.batch["response_mask"]
    of_owner = final.batch["advantages"].gather(1, mask.argmax(1, keepdim=True))
    advantages = of_owner[torch.from_numpy(number)] * data.batch["response_mask"]
    return data.having(advantages=advantages, returns=advantages)
