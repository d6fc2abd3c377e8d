"""Functions as tools: `@function_tool`, and the tools of a file. The names are the public system's
(`verl.tools.function_tool`)."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable
from typing import Any

from verl.data.files import DataError
from verl.data.load_object import load_module
from verl.rollout.event_loop import in_thread
from verl.rollout.tools import base
from verl.rollout.tools.base import ToolError, ToolResponse

FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}
"""Name → the tool that was marked last under it; a file has one of a name."""
_LOADED_FUNCTION_TOOL_PATHS: dict[str, list[FunctionTool]] = {}


class FunctionTool(base.Tool):
    """A function as a tool. What is not async runs in a thread (`thread_room`), so that one that hangs holds up
    nobody."""

    def __init__(self, function: Callable[..., Any], name: str, schema: Any):
        self.fn, self.config = function, {}
        self.is_async = inspect.iscoroutinefunction(function)
        self.runs_in_thread = not self.is_async
        self.tool_schema = base.OpenAIFunctionToolSchema.model_validate(schema)
        self.name = self.tool_schema.function.name = name

    async def call(self, parameters: dict[str, Any]) -> Any:
        """What the function returns."""
        result = await (self.fn(**parameters) if self.is_async else in_thread(self.fn, **parameters))
        return await result if inspect.isawaitable(result) else result  # of a function that another one wraps

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Call it; what it may return: `normalize_function_tool_return`."""
        return normalize_function_tool_return(await self.call(parameters))


def normalize_function_tool_return(found: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """(response, reward, metrics) of what a tool returned: a ToolResponse, a dict or list as JSON, anything else as
    text, or a tuple of one of these, a reward and metrics, of which None is none. TypeError for a tuple of another
    length."""
    parts = found if isinstance(found, tuple) else (found,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(f"a tool returns a tuple of length 1, 2, or 3, not of {len(parts)}")
    response, reward, metrics = (*parts, None, None)[:3]
    if not isinstance(response, ToolResponse):
        response = ToolResponse(_text(response))
    elif response.text is not None:
        response.text = _text(response.text)
    return response, float(reward or 0.0), metrics or {}


def _text(said: Any) -> str:
    if inspect.isawaitable(said):
        raise TypeError(f"it returned a {type(said).__name__} that nobody awaited: an await is missing in it")
    return json.dumps(said, ensure_ascii=False) if isinstance(said, dict | list) else str(said)


def function_tool(target: Any = None, *, schema: Any = None) -> Any:
    """Decorator: make a function of `function_tool_path` a tool, under its own name or `@function_tool("name")`.

    The schema comes from type hints and a Google-style docstring where it is not given; ToolError says what is missing.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        name = target if isinstance(target, str) else function.__name__
        tool_schema = schema if schema is not None else _schema_of(function, name)
        base.check_schema(base.plain(tool_schema), f"function tool {name!r}")
        prior = FUNCTION_TOOL_REGISTRY.get(name)
        if prior and prior.fn.__module__ == function.__module__ and _place(prior.fn) != _place(function):
            before = f"{_place(prior.fn)} is already registered"
            raise ToolError(f"two tools are called {name!r}: {before}, then {_place(function)}")
        tool = FUNCTION_TOOL_REGISTRY[name] = FunctionTool(function, name, tool_schema)
        function.function_tool = tool  # type: ignore[attr-defined]
        return function

    return mark(target) if callable(target) else mark


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _schema_of(function: Callable[..., Any], name: str) -> Any:
    from transformers.utils import get_json_schema

    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise ToolError(f"function tool {name!r}: a variadic parameter has no schema; take a list or a dict")
    try:
        return get_json_schema(function)
    except Exception as error:
        raise ToolError(f"function tool {name!r}: no schema can be made of it: {error}") from error


def load_function_tools_from_path(path: str) -> list[FunctionTool]:
    """The tools that a file marks, the same ones again for the same file. FileNotFoundError without the file."""
    try:
        module = load_module(path)
    except DataError as error:
        raise FileNotFoundError(f"function_tool_path does not exist: {error}") from error
    marks = (getattr(value, "function_tool", None) for value in vars(module).values())
    tools = [tool for tool in marks if isinstance(tool, FunctionTool)]
    if not tools:
        logging.getLogger(__name__).warning("%s: no @function_tool decorators found", path)
    return _LOADED_FUNCTION_TOOL_PATHS.setdefault(str(module.__file__), tools)
