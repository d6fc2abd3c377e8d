"""A reward by several reward functions together: verifiers, rubrics, judges; how far they agree, and abstention where
they do not.

    custom_reward_function.path=pkg://verl.reward.ensemble
    custom_reward_function.reward_kwargs.members={name:{path,name,weight,reward_kwargs}, …}
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from verl.reward.outcome import normalise
from verl.reward.user_function import load_function, taken

COMBINATIONS = ("mean", "majority", "min", "max")


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    members: Mapping[str, Mapping[str, Any]],
    combine: str = "mean",
    min_agreement: float = 0.0,
    reward_router_address: str | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """`{score, agreement, …}`: the score of the members together, and each member's under its name.

    A member is a reward function, `name` (compute_score) of `path` with its `reward_kwargs`; functions that wait, as
    judges do, wait together. `combine`: mean, weighted by the members' `weight` (1); majority: 1 where more than half
    of the weight gives ½ or more, else 0; min; max. `agreement` is 1 − the mean difference of two members' scores, 1
    for one member: scores are to be from 0 to 1. Below `min_agreement` the reward abstains. A member may abstain: it is
    left out; so is the response if all do. `reward_router_address` and `model`, as of a judge that the run
    serves, go to members that take them.

    A member that fails fails the response. ValueError for another `combine`.
    """
    if combine not in COMBINATIONS:
        raise ValueError(f"combine={combine!r}; there are: {', '.join(COMBINATIONS)}")
    row = (data_source, solution_str, ground_truth, extra_info)
    judge = {"reward_router_address": reward_router_address, "model": model}
    results = await asyncio.gather(*(call(member, row, judge) for member in members.values()))
    abstained = [isinstance(result, Mapping) and result.get("abstain") for result in results]
    scores = {n: normalise(r)[0] for n, r, left_out in zip(members, results, abstained, strict=True) if not left_out}
    if not scores:
        return {"abstain": f"all members abstain: {abstained[0]}"}
    differences = [abs(a - b) for a, b in combinations(scores.values(), 2)]
    agreement = 1 - sum(differences) / len(differences) if differences else 1.0
    parts = {**scores, "agreement": agreement}
    if agreement < min_agreement:
        return {"abstain": f"the members' agreement is {agreement:.2f}, below {min_agreement:g}", **parts}
    weights = {name: float(members[name].get("weight", 1.0)) for name in scores}
    half = sum(weights.values()) / 2
    score = {
        "mean": sum(weights[name] * score for name, score in scores.items()) / (2 * half),
        "majority": float(sum(weights[name] for name, score in scores.items() if score >= 0.5) > half),
        "min": min(scores.values()),
        "max": max(scores.values()),
    }[combine]
    return {"score": score, **parts}


async def call(function: Mapping[str, Any], row: tuple[Any, ...], judge: Mapping[str, Any]) -> Any:
    """What a reward function, `{path, name, reward_kwargs}`, returns for (data_source, solution_str, ground_truth,
    extra_info); it gets those arguments of `judge` that it names and that are not None."""
    loaded = load_function(function["path"], function.get("name", "compute_score"))
    offered = {name: value for name, value in judge.items() if value is not None}
    value = loaded(*row, **taken(loaded, offered) | dict(function.get("reward_kwargs") or {}))
    return await value if inspect.isawaitable(value) else value
