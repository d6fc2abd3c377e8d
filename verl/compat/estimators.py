"""Advantage estimators under the signatures of the public system, with padded tensors [N, L].

a public function ─ flat_form ─→ a function of EstimatorInputs, which the loop calls
a function of EstimatorInputs ─ padded_form ─→ a public signature, for users who call ours
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from verl.algorithms.advantage import EPSILON, Arrays, Estimator, EstimatorInputs, Result
from verl.algorithms.registry import Algorithm, Declaration
from verl.compat.data_proto import DataProto
from verl.compat.losses import once, takes_inputs
from verl.config.schema.base import setting
from verl.trajectory import COLUMNS, Batch

Tensors = tuple[torch.Tensor, torch.Tensor]
COLUMN_OF = {column.public: name for name, column in COLUMNS.items() if column.public}
_SETTINGS = (
    "index",
    "config",
    "epsilon",
    "norm_adv_by_std_in_grpo",
    "gamma",
    "lam",
    "non_tensor_batch",
    "batch",
)
_PUBLIC_NAMES = {*COLUMN_OF, *_SETTINGS, "reward_baselines"}
_OFFERED_APART = {"response_ids", "token_rewards", "advantages", "returns"}
_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


# -- ours, for users ---------------------------------------------------------------------------------------------


def padded_form(estimator: Estimator, *required: str, **optional: Any) -> Callable[..., Tensors]:
    """An estimator under a signature of the public interface, of these parameters in this order; more are ignored.

    token_level_rewards, response_mask, loss_mask (None: the response mask), and columns under their public names:
    padded tensors [N, L]. index: group keys [N]. reward_baselines [N]. non_tensor_batch: what the reward function
    returned, by key. Returns advantages and returns [N, L] in the dtype of the rewards.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in required]
    parameters += [inspect.Parameter(name, kind, default=value) for name, value in optional.items()]
    signature = inspect.Signature([*parameters, inspect.Parameter("_", inspect.Parameter.VAR_KEYWORD)])

    def call(*args: Any, **kwargs: Any) -> Tensors:
        return _on_tensors(estimator, signature.bind(*args, **kwargs).arguments)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = estimator.__doc__
    return call


def _on_tensors(estimator: Estimator, arguments: Mapping[str, Any]) -> Tensors:
    """Call an estimator with arguments of its public form."""
    rewards, response_mask = arguments["token_level_rewards"], arguments["response_mask"]
    mask = response_mask.bool().cpu().numpy()
    config, baselines = arguments.get("config"), arguments.get("reward_baselines")

    def column(name: str) -> Arrays:
        tensor = arguments.get(COLUMNS[name].public)
        if tensor is None and name == "loss_mask":
            tensor = response_mask
        if tensor is None:
            raise ValueError(f"this estimator needs {name}")
        return [row[chosen] for row, chosen in zip(_float64(tensor), mask, strict=True)]

    inputs = EstimatorInputs(
        scores=_float64(rewards).sum(-1),
        index=arguments.get("index", ()),
        lengths=mask.sum(-1),
        column=column,
        part=(arguments.get("non_tensor_batch") or {}).__getitem__,
        baselines=None if baselines is None else _float64(baselines),
        config=config,
        epsilon=arguments.get("epsilon", EPSILON),
        divide=arguments.get("norm_adv_by_std_in_grpo", True),
        gamma=arguments.get("gamma", setting(config, "gamma", 1.0)),
        lam=arguments.get("lam", 1.0),
    )
    result = estimator(inputs)
    advantages, returns = result if isinstance(result, tuple) else (result, result)
    return _on_tokens(advantages, mask, rewards), _on_tokens(returns, mask, rewards)


def _float64(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(tensor.detach().double().cpu().numpy())


def _on_tokens(values: np.ndarray | Arrays, mask: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    out = np.zeros(mask.shape)
    for row, chosen, value in zip(out, mask, values, strict=True):
        row[chosen] = value
    return torch.from_numpy(out).to(like.device, like.dtype)


# -- users', for the loop ----------------------------------------------------------------------------------------


def padded(rows: Batch, column: str) -> torch.Tensor:
    """[N, max(1, max L)]: one column at least, so that a response without tokens has a place for its score."""
    width = max(1, int(rows.lengths.max()))
    return torch.from_numpy(rows.padded(column, width=width))


def required_parameters(function: Algorithm) -> list[str]:
    """Names of the parameters without a default."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in _COLLECTING]


def declaration(function: Algorithm) -> Declaration:
    """What the signature of a user's estimator says: columns that required parameters name, and whether it asks for
    group keys."""
    offered = {*COLUMN_OF.values(), "reward_baselines"}
    columns = {COLUMN_OF.get(name, name) for name in required_parameters(function)} & offered
    return Declaration(frozenset(columns), compares_groups="index" in inspect.signature(function).parameters)


@once
def flat_form(function: Algorithm) -> Estimator:
    """An estimator that a user registers, as a function of `EstimatorInputs`: one of a single argument that names no
    column as it is, any other with the padded tensors that it names."""
    if takes_inputs(function, _PUBLIC_NAMES):
        return function

    def call(inputs: EstimatorInputs) -> Result:
        assert inputs.batch is not None
        return _on_batch(function, inputs.batch, inputs.config, inputs.baselines)

    call.__module__ = getattr(function, "__module__", __name__)
    call.__qualname__ = getattr(function, "__qualname__", "estimator")
    call.public = function  # type: ignore[attr-defined]
    return call


def _on_batch(function: Algorithm, rows: Batch, algorithm: Any, baselines: np.ndarray | None) -> tuple[Arrays, Arrays]:
    """(advantages, returns) of the policy tokens of each row, float32, by a function of the public form.

    baselines: scores of greedy responses [N], or None. ValueError if the function requires what is not there, and for
    results of another shape.
    """
    mask = padded(rows, "response_mask")
    offered = _offer(rows, algorithm, baselines)
    if missing := [name for name in required_parameters(function) if name not in offered]:
        raise ValueError(
            f"adv_estimator={algorithm.adv_estimator} asks for {', '.join(missing)}, which this step does not have; "
            f"there are: {', '.join(sorted(offered))}"
        )
    results = function(**{name: offered[name]() for name in named_arguments(function, offered)})
    columns = []
    for name, result in zip(("advantages", "returns"), results, strict=True):
        if tuple(result.shape) != tuple(mask.shape):
            raise ValueError(
                f"adv_estimator={algorithm.adv_estimator} returned {name} of shape {tuple(result.shape)}; "
                f"expected {tuple(mask.shape)} (responses, response length)"
            )
        values = result.detach().float().cpu().numpy()
        columns.append([row[chosen] for row, chosen in zip(values, mask.bool().numpy(), strict=True)])
    advantages, returns = columns
    return advantages, returns


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


def named_arguments(estimator: Algorithm, offered: Iterable[str]) -> list[str]:
    """What an estimator receives of the arguments offered: those it names; all of them if it takes **kwargs."""
    parameters = inspect.signature(estimator).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return [name for name in offered if takes_all or name in parameters]
