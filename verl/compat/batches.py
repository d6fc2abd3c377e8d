"""Advantages of a `verl.DataProto` by any registered estimator: `compute_advantage` of the public system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.compat.core_algos import get_adv_estimator_fn
from verl.compat.data_proto import DataProto
from verl.compat.estimators import named_arguments


def compute_advantage(
    data: DataProto,
    adv_estimator: Any,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Mapping[str, Any] | None = None,
) -> DataProto:
    """The batch with `advantages` and `returns` [N, L], by any registered estimator; groups are `uid`, `num_repeat` is
    not needed.

    An estimator gets what it names of the batch's columns, of the arguments and of `index`, `batch` and
    `non_tensor_batch`.
    """
    estimator = get_adv_estimator_fn(adv_estimator)
    columns, non_tensors = data.batch, data.non_tensor_batch
    arguments: dict[str, Any] = {**columns, "batch": columns, "non_tensor_batch": non_tensors}
    arguments |= {
        "index": non_tensors.get("uid"),
        "gamma": gamma,
        "lam": lam,
        "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
    }
    arguments["config"] = {"gamma": gamma, "lam": lam} if config is None else config
    advantages, returns = estimator(**{name: arguments[name] for name in named_arguments(estimator, arguments)})
    return data.having(advantages=advantages, returns=returns)


def compute_advantage_for_multi_trajectories(
    data: DataProto, batch_keys: Sequence[str], adv_estimator: Any, **settings: Any
) -> DataProto:
    """The same where rows are segments of trajectories: `batch_keys` are "{uid}_{trajectory}_{segment}".

    With GRPO the last segment of a trajectory holds its reward, and its advantage is written on the policy tokens of
    all segments.
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
