"""Managers of the user's own: the names that plug-ins import, and a class that scores rows in a scoring process.

    run: Trajectory ──row_of──→ plain values ──socket──→ process: DataProto ──→ manager.run_single │ manager(data)

With `reward_manager.source=importlib` a class with `run_single` scores one response at a time, as responses finish; any
other is called with a whole batch and returns a reward tensor. Scores are returned and limited as those of a function.
A class that a plug-in registers (`verl.reward.user_function.register`) is treated like one of `source=importlib`. The
built-in managers are settings of `RewardRunner`; the classes of their names are for plug-ins alone.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl import plugins
from verl.reward.outcome import RewardLoadError
from verl.reward.pool import FunctionSpec
from verl.reward.user_function import Function, load_function, load_object, taken

if TYPE_CHECKING:
    from verl.config.schema.base import Map
    from verl.config.schema.entries import Config
    from verl.trajectory import Trajectory

KEY = "reward_manager"
_PROMPT = ("uid", "ids", "messages", "data_source", "ground_truth", "columns")
_RESPONSE = ("index", "response_ids", "response_mask", "text", "num_turns")


class RewardManagerBase(ABC):
    """Base of managers that score one response at a time."""

    def __init__(self, config: Map, tokenizer: Any, compute_score: Function | None = None, **kwargs: Any):
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        self.options = kwargs

    @classmethod
    def init_class(cls, config: Map, tokenizer: Any) -> None:
        """For subclasses that share something between their objects and call it."""
        return

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that `run_single` runs in."""
        return asyncio.get_running_loop()

    @abstractmethod
    async def run_single(self, data: Any) -> dict[str, Any]:
        """`{"reward_score": float, "reward_extra_info": dict}` for a DataProto of one row."""


def load_class(path: str, name: str) -> type:
    """The class `name` of `path` (`file.py` or `pkg://module`). RewardLoadError if there is none."""
    cls = load_object(f"{KEY}.module.path", path, name)
    if not isinstance(cls, type):
        raise RewardLoadError(f"{KEY}.name={name}: in {path} this is a {type(cls).__name__}, not a class")
    if not (hasattr(cls, "run_single") or "__call__" in dir(cls)):
        ways = "run_single (one response at a time) and without __call__ (a whole batch)"
        raise RewardLoadError(f"{KEY}.name={name}: {path} defines it without {ways}")
    return cls


def charges_overlong(kind: type | None) -> bool:
    """True for a class that subtracts the penalty on long responses itself: it takes `overlong_buffer_cfg`."""
    if kind is None:
        return False
    return getattr(kind, "charges_overlong", "overlong_buffer_cfg" in inspect.signature(kind).parameters)


def manager_function(config: Config, offered: dict[str, Any]) -> FunctionSpec:
    """The class that the configuration names, as the function of a pool. RewardLoadError if it cannot be one."""
    path, name = config.reward_manager.module.path, config.reward_manager.name
    if not path:
        raise RewardLoadError(f"{KEY}.source=importlib needs {KEY}.module.path=FILE.py and {KEY}.name=CLASS")
    single = hasattr(load_class(path, name), "run_single")
    return FunctionSpec(path, name, batch=not single, manager=config.to_dict(), offered=offered)


def row_of(trajectory: Trajectory, extra_info: dict[str, Any]) -> dict[str, Any]:
    """The fields of the response and of its prompt from which `Manager` makes them again, as values that travel."""
    prompt = {name: getattr(trajectory.prompt, name) for name in _PROMPT}
    response = {name: getattr(trajectory, name) for name in _RESPONSE}
    response["extra"] = {"reward_scores": trajectory.extra.get("reward_scores", {})}
    return {"prompt": prompt | {"extra_info": extra_info}, "response": response}


def options_of(config: Config | Map) -> dict[str, Any]:
    """Keyword arguments of `verl.reward.default_compute_score` that the checked configuration of a run sets."""
    model = config.reward_model
    options = {"memory_limit_mb": model.sandbox_fusion.memory_limit_mb}
    if model.sandbox_fusion.url:
        share = model.sandbox_fusion.max_concurrent // model.num_workers
        options |= {"sandbox_fusion_url": model.sandbox_fusion.url, "max_concurrent": max(1, share)}
    return options | dict(config.custom_reward_function.reward_kwargs)


class Manager:
    """The user's object in a scoring process. Calling it with `rows` gives a score or, of a batch, a list of them.

    `settings` is the whole configuration as plain values; `judge`: what a served judge offers, as in `FunctionSpec`.
    """

    def __init__(self, path: str, name: str, settings: Mapping[str, Any], judge: Mapping[str, Any]):
        from verl.config import Map
        from verl.data.tokenizer import tokenizer_of

        kind = load_class(path, name)
        config = Map.of(settings)
        model = config.actor_rollout_ref.model
        self._tokenizer = tokenizer_of(model, config.data.tokenizer)
        offered = {
            "config": config,
            "tokenizer": self._tokenizer,
            "compute_score": _compute_score(config, judge),
            "num_examine": 0,
            "reward_fn_key": config.data.reward_fn_key,
            "reward_router_address": None,
            "reward_model_tokenizer": None,
        } | taken(kind, judge)
        self._manager = kind(**_arguments(kind, offered, config.reward_model.reward_kwargs))
        self._single = hasattr(kind, "run_single")
        self.is_async = self._single and inspect.iscoroutinefunction(self._manager.run_single)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        from verl.trajectory import Batch

        data = plugins.batch_view(Batch([self._trajectory(row) for row in rows]))
        if self.is_async:
            return self._awaited(data)
        if self._single:
            return _single(self._manager.run_single(data))
        takes = inspect.signature(self._manager.__call__).parameters
        result = self._manager(data, return_dict=True) if "return_dict" in takes else self._manager(data)
        return _many(result, len(rows))

    async def _awaited(self, data: Any) -> Any:
        return _single(await self._manager.run_single(data))

    def _trajectory(self, row: Mapping[str, Any]) -> Trajectory:
        import numpy as np

        from verl.trajectory import Prompt, Trajectory

        response = dict(row["response"])
        if not response["response_ids"] and response["text"]:  # a text that is tried before the run
            response["response_ids"] = self._tokenizer.encode(response["text"], add_special_tokens=False)
            response["response_mask"] = [True] * len(response["response_ids"])
        ids = np.array(response.pop("response_ids"), np.int64)
        mask = np.array(response.pop("response_mask"), bool)
        prompt = Prompt(**row["prompt"] | {"ids": np.array(row["prompt"]["ids"], np.int64)})
        return Trajectory(prompt, response_ids=ids, response_mask=mask, **response)


def _compute_score(config: Map, judge: Mapping[str, Any]) -> Function:
    """The manager's `compute_score`: the custom function with its kwargs and the judge, else the built-in table."""
    custom = config.custom_reward_function
    if custom.path is None:
        from verl.reward.rules import default_compute_score

        return functools.partial(default_compute_score, **options_of(config))
    function = load_function(custom.path, custom.name)
    kwargs = taken(function, judge) | custom.reward_kwargs
    return functools.partial(function, **kwargs) if kwargs else function


def _arguments(kind: type, offered: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the class names, and with **kwargs what `reward_model.reward_kwargs` holds."""
    signature = inspect.signature(kind)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    values = {**options, **offered}
    chosen = {n: v for n, v in values.items() if n in signature.parameters or (takes_all and n in options)}
    try:
        signature.bind(**chosen)
    except TypeError as error:
        problem = f"{error}; a manager gets {', '.join(values)}"
        raise RewardLoadError(f"{KEY}.name={kind.__name__}: {problem}") from error
    return chosen


def _single(result: Any) -> Any:
    """`{"reward_score", "reward_extra_info"}` as the result of a function; anything else as it is."""
    if not isinstance(result, Mapping) or "reward_score" not in result:
        return result
    extra = result.get("reward_extra_info") or {}
    parts = {n: v[0] if isinstance(v, list) and len(v) == 1 else v for n, v in extra.items()}
    return {**parts, "score": result["reward_score"]}


def _many(result: Any, count: int) -> Any:
    """A reward tensor [N] or [N, L] (rows are summed), or the dict around it, as a list of results."""
    extra: Mapping[str, Any] = {}
    if isinstance(result, Mapping):
        extra = result.get("reward_extra_info") or {}
        result = result.get("reward_tensor")
    if hasattr(result, "dim"):
        result = (result.sum(-1) if result.dim() == 2 else result).tolist()
    if not isinstance(result, list) or not extra or len(result) != count:
        return result
    columns = {name: list(values) for name, values in extra.items() if name != "score"}
    for name, values in columns.items():
        if len(values) != count:
            raise ValueError(f"reward_extra_info[{name!r}] has {len(values)} values for {count} responses")
    return [{"score": score} | {n: v[i] for n, v in columns.items()} for i, score in enumerate(result)]
