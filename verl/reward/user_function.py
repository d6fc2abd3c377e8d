"""A user's reward function or manager class: registered by name, or loaded from a file, and how it can be called.

Errors name what is there instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.data.files import DataError
from verl.data.load_object import load_extern_object
from verl.reward.outcome import RewardLoadError

Function = Callable[..., Any]
ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
# Given beside the others where a judge is served.
OF_JUDGES = ("reward_router_address", "reward_model_tokenizer")
MANY = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


REWARD_MANAGER_REGISTRY: dict[str, type] = {}


def register(name: str) -> Callable[[type], type]:
    """Class decorator: make a manager known under a name. ValueError if another class has it."""

    def add(cls: type) -> type:
        registered = REWARD_MANAGER_REGISTRY.setdefault(name, cls)
        if registered is not cls:
            raise ValueError(f"reward manager {name!r}: already registered by {registered.__qualname__}")
        return cls

    return add


def get_reward_manager_cls(name: str) -> type:
    """The class registered under a name. ValueError naming the known ones."""
    if name not in REWARD_MANAGER_REGISTRY:
        names = ", ".join(sorted(REWARD_MANAGER_REGISTRY)) or "none"
        raise ValueError(f"Unknown reward manager: {name}. Registered classes: {names}")
    return REWARD_MANAGER_REGISTRY[name]


def load_object(key: str, path: str, name: str) -> Any:
    """The object `name` of `path` (`file.py`, `pkg://module`), which the configuration's `key` names.

    RewardLoadError if there is none. What the module itself raises while it is imported passes through.
    """
    try:
        return load_extern_object(path, name)
    except DataError as error:
        raise RewardLoadError(f"{key}={error}") from error


def load_function(path: str, name: str) -> Function:
    """The callable `name` of the module at `path`, imported once per process. RewardLoadError as `load_object`."""
    function = load_object("custom_reward_function.path", path, name)
    if not callable(function):
        problem = f"in {path} this is a {type(function).__name__}, not a function"
        raise RewardLoadError(f"custom_reward_function.name={name}: {problem}")
    return function


def taken(function: Function, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the `offered` arguments that the function names (`FunctionSpec`)."""
    names = inspect.signature(function).parameters if offered else {}
    arguments = {name: value for name, value in offered.items() if name in names}
    if "reward_model_tokenizer" in arguments:
        from verl.data.tokenizer import load_tokenizer

        path, trusted = arguments["reward_model_tokenizer"]
        arguments["reward_model_tokenizer"] = load_tokenizer(path, trust_remote_code=trusted)
    return arguments


def misplaced(parameters: Sequence[str], names: Sequence[str] = ONE) -> bool:
    """True if a parameter has the name of an argument that is passed in another place."""
    return any(name in names and names.index(name) != place for place, name in enumerate(parameters))


def is_async(function: Function) -> bool:
    """True for `async def`, also behind functools.partial, a decorator that wraps, or an object's __call__."""
    while hasattr(function, "func") and not inspect.isfunction(function):
        function = function.func
    inner = inspect.unwrap(function)
    call = getattr(inner, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(call)


def calling_style(function: Function, kwargs: Mapping[str, Any], *, batch: bool, positional: int) -> int:
    """The number of arguments to pass by position: 0 where the function takes them by keyword, else `positional`, which
    is 0 where that is not allowed.

    `kwargs` are `custom_reward_function.reward_kwargs`. RewardLoadError shows the signature and what it lacks.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return 0  # a builtin or C function shows no signature; the first call will tell
    names, other_names = (MANY, ONE) if batch else (ONE, MANY)
    problem = _problem(signature, (), {**dict.fromkeys(names), **kwargs})
    if problem is None:
        return 0
    if positional and (problem := _problem(signature, names[:positional], kwargs)) is None:
        if not misplaced(list(signature.parameters), names):
            return positional
        problem = f"by position it would get {', '.join(names[:positional])}; give it these names, or **kwargs"
    hint = ""
    if _problem(signature, (), {**dict.fromkeys(other_names), **kwargs}) is None:
        takes, manager = ("one response at a time", "naive") if batch else ("a whole batch", "batch")
        hint = f"; it takes {takes}: use reward_model.reward_manager={manager}"
    label = getattr(function, "__name__", type(function).__name__)
    suffix = f" with reward_kwargs {', '.join(kwargs)}" if kwargs else ""
    raise RewardLoadError(
        f"{label}{signature} cannot be called as {label}({', '.join(names)}, **kwargs){suffix}: {problem}{hint}"
    )


def _problem(signature: inspect.Signature, values: Sequence[str], keywords: Mapping[str, Any]) -> str | None:
    try:
        signature.bind(*values, **keywords)
    except TypeError as error:
        return str(error)
    return None
