"""Load a user's reward function and see how it can be called. Errors name what is there instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.data.files import DataError
from verl.data.load_object import load_module
from verl.reward.errors import RewardLoadError

ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
MANY = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def load_function(path: str, name: str) -> Callable[..., Any]:
    """The callable `name` of the module at `path` (`file.py`, `pkg://module`), imported once per process.

    RewardLoadError if there is no such module, or lists the functions found in it. What the module itself raises while
    it is imported passes through.
    """
    try:
        module = load_module(path)
    except DataError as error:
        raise RewardLoadError(f"custom_reward_function.path={error}") from error
    if not hasattr(module, name):
        found = [
            key
            for key, value in vars(module).items()
            if callable(value)
            and not key.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
        ]
        listed = ", ".join(found[:20]) or "none"
        raise RewardLoadError(
            f"custom_reward_function.name={name}: {path} defines no {name!r}; functions found there: {listed}"
        )
    function = getattr(module, name)
    if not callable(function):
        raise RewardLoadError(
            f"custom_reward_function.name={name}: in {path} this is a {type(function).__name__}, not a function"
        )
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """True for `async def`, also behind functools.partial, a decorator that wraps, or an object's __call__."""
    while hasattr(function, "func") and not inspect.isfunction(function):
        function = function.func
    inner = inspect.unwrap(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def calling_style(
    function: Callable[..., Any], kwargs: Mapping[str, Any], *, batch: bool, positional: bool
) -> str:
    """How to call it: "keyword", or "positional" (allowed for the prime manager only).

    `kwargs` are `custom_reward_function.reward_kwargs`. RewardLoadError shows the signature and what it lacks.
    """
    names: Sequence[str] = MANY if batch else ONE
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "keyword"  # a builtin or C function shows no signature; the first call will tell
    try:
        signature.bind(**dict.fromkeys(names), **kwargs)
        return "keyword"
    except TypeError as error:
        reason = str(error)
    if positional:
        try:
            signature.bind(*names, **kwargs)
            return "positional"
        except TypeError as error:
            reason = str(error)
    label = getattr(function, "__name__", type(function).__name__)
    wanted = f"{label}({', '.join(names)}, **kwargs)"
    hint = ""
    if batch and _binds(signature, ONE, kwargs):
        hint = "; it takes one answer at a time: use reward_model.reward_manager=naive"
    elif not batch and _binds(signature, MANY, kwargs):
        hint = "; it takes a whole batch: use reward_model.reward_manager=batch"
    given = f" with reward_kwargs {', '.join(kwargs)}" if kwargs else ""
    raise RewardLoadError(f"{label}{signature} cannot be called as {wanted}{given}: {reason}{hint}")


def _binds(signature: inspect.Signature, names: Sequence[str], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(**dict.fromkeys(names), **kwargs)
    except TypeError:
        return False
    return True
