"""Managers of the user's own (`reward_manager.source=importlib`): a class that scores rows, made in a scoring process.

    run: Trajectory ──row_of──→ plain values ──pipe──→ process: DataProto ──→ manager.run_single │ manager(data)

A class with `run_single` scores one answer at a time, as answers finish; any other is called with a whole batch and
returns a reward tensor. Scores come back as those of a function do, under the same limits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.data.files import DataError
from verl.data.load_object import load_extern_object
from verl.reward.errors import RewardLoadError

if TYPE_CHECKING:
    from verl.data_proto import DataProto
    from verl.trajectory import Trajectory

KEY = "reward_manager"


def load_class(path: str, name: str) -> type:
    """The class `name` of `path` (`file.py` or `pkg://module`). RewardLoadError if there is none."""
    try:
        found = load_extern_object(path, name)
    except DataError as error:
        raise RewardLoadError(f"{KEY}.module.path={error}") from error
    if not isinstance(found, type):
        raise RewardLoadError(f"{KEY}.name={name}: in {path} this is a {type(found).__name__}, not a class")
    if not (hasattr(found, "run_single") or "__call__" in dir(found)):
        raise RewardLoadError(
            f"{KEY}.name={name}: {path} defines it without run_single (one answer at a time) and without __call__ (a "
            "whole batch)"
        )
    return found


def one_by_one(kind: type) -> bool:
    """True for a class that scores single answers."""
    return hasattr(kind, "run_single")


def description(config: Any) -> dict[str, Any]:
    """What a scoring process needs to make the manager; plain values."""
    model, custom = config.actor_rollout_ref.model, config.custom_reward_function
    return {
        "config": config.to_dict(),
        "tokenizer": {
            "model_path": str(model.path),
            "tokenizer_path": config.data.tokenizer or model.tokenizer_path,
            "trust_remote_code": bool(model.trust_remote_code),
            "chat_template": model.custom_chat_template,
        },
        "function": {
            "path": custom.path,
            "name": custom.name,
            "kwargs": _plain(custom.reward_kwargs),
        },
        "options": _plain(config.reward_model.reward_kwargs),
    }


def _plain(value: Any) -> dict[str, Any]:
    return dict(value.to_dict() if hasattr(value, "to_dict") else value or {})


def row_of(trajectory: Trajectory) -> dict[str, Any]:
    """The answer as values that travel."""
    prompt = trajectory.prompt
    return {
        "uid": prompt.uid,
        "index": trajectory.index,
        "prompt_ids": prompt.ids.tolist(),
        "messages": prompt.messages,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": {
            **(prompt.extra_info or {}),
            "num_turns": trajectory.num_turns,
            "rollout_reward_scores": trajectory.extra.get("reward_scores", {}),
        },
        "columns": prompt.columns,
        "response_ids": trajectory.response_ids.tolist(),
        "response_mask": trajectory.response_mask.tolist(),
        "text": trajectory.text,
        "num_turns": trajectory.num_turns,
    }


class Manager:
    """The user's object in a scoring process. Calling it with `rows` gives a score or, of a batch, a list of them."""

    def __init__(self, path: str, name: str, made_of: Mapping[str, Any]):
        from verl.config import Map
        from verl.data.tokenizer import load_tokenizer

        kind = load_class(path, name)
        self._tokenizer = load_tokenizer(**made_of["tokenizer"])
        offered = {
            "config": Map.of(made_of["config"]),
            "tokenizer": self._tokenizer,
            "compute_score": _function(made_of["function"]),
            "num_examine": 0,
            "reward_fn_key": made_of["config"]["data"]["reward_fn_key"],
            "reward_router_address": None,
            "reward_model_tokenizer": None,
        }
        self._manager = kind(**_arguments(kind, offered, made_of["options"]))
        self.single = one_by_one(kind)
        self.is_async = self.single and inspect.iscoroutinefunction(self._manager.run_single)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        data = self._batch(rows)
        if self.is_async:
            return self._awaited(data)
        if self.single:
            return _single(self._manager.run_single(data))
        takes = inspect.signature(self._manager.__call__).parameters
        result = self._manager(data, return_dict=True) if "return_dict" in takes else self._manager(data)
        return _many(result, len(rows))

    async def _awaited(self, data: DataProto) -> Any:
        return _single(await self._manager.run_single(data))

    def _batch(self, rows: Sequence[Mapping[str, Any]]) -> DataProto:
        import numpy as np

        from verl.data_proto import DataProto
        from verl.trajectory import Batch, Prompt, Trajectory

        found = []
        for row in rows:
            ids, mask = list(row["response_ids"]), list(row["response_mask"])
            if not ids and row["text"]:  # a text that is tried before the run
                ids = self._tokenizer.encode(row["text"], add_special_tokens=False)
                mask = [True] * len(ids)
            prompt = Prompt(
                row["uid"],
                np.array(row["prompt_ids"], np.int64),
                row["messages"],
                row["data_source"],
                row["ground_truth"],
                row["extra_info"],
                columns=row["columns"],
            )
            answer = Trajectory(prompt, row["index"], np.array(ids, np.int64), np.array(mask, bool))
            answer.text, answer.num_turns = row["text"], row["num_turns"]
            found.append(answer)
        return DataProto.from_trajectories(Batch(found))


def _function(spec: Mapping[str, Any]) -> Callable[..., Any]:
    """`compute_score` as the manager gets it: the custom function with its kwargs, else the built-in table."""
    if spec["path"] is None:
        from verl.reward.registry import default_compute_score

        return functools.partial(default_compute_score, **spec["kwargs"])
    from verl.reward.load import load_function

    function = load_function(spec["path"], spec["name"])
    return functools.partial(function, **spec["kwargs"]) if spec["kwargs"] else function


def _arguments(kind: type, offered: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the class names, and with **kwargs what `reward_model.reward_kwargs` holds."""
    parameters = inspect.signature(kind).parameters.values()
    given = {**options, **offered}
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in given
    ]
    if missing:
        raise RewardLoadError(
            f"{KEY}.name={kind.__name__} asks for {', '.join(missing)}; a manager gets {', '.join(given)}"
        )
    chosen = {p.name: given[p.name] for p in parameters if p.name in given}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        chosen = {**options, **chosen}
    return chosen


def _single(result: Any) -> Any:
    """`{"reward_score", "reward_extra_info"}` as the result of a function; anything else as it is."""
    if not isinstance(result, Mapping) or "reward_score" not in result:
        return result
    extra = {name: _only(value) for name, value in (result.get("reward_extra_info") or {}).items()}
    extra.pop("score", None)
    return {"score": result["reward_score"], **extra}


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


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
    wrong = [name for name, values in columns.items() if len(values) != count]
    if wrong:
        raise ValueError(
            f"reward_extra_info[{wrong[0]!r}] has {len(columns[wrong[0]])} values for {count} answers"
        )
    return [{"score": score} | {n: v[i] for n, v in columns.items()} for i, score in enumerate(result)]
