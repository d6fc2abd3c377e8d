"""What tools are made of: schemas, responses, `BaseTool`, and functions as tools (`@function_tool`). The names are the
public system's."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4

from verl.data.files import DataError
from verl.data.load_object import load_module
from verl.errors import UserError
from verl.rollout.event_loop import in_thread

_KINDS = ("object", "string", "number", "integer", "boolean", "array", "null")


class ToolError(UserError, ValueError):
    """A tool cannot be used as it is configured; says which and why."""


class Model:
    """Fields by name, as attributes and as a mapping (`model_dump`); fields that a class does not name are kept."""

    nested: ClassVar[dict[str, Any]] = {}
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, **fields: Any):
        for name, value in {**self.defaults, **fields}.items():
            cls = self.nested.get(name)
            setattr(self, name, cls.model_validate(value) if cls and isinstance(value, Mapping) else value)

    @classmethod
    def model_validate(cls, value: Any) -> Any:
        """`value` as this class: a mapping, or an object of it."""
        return value if isinstance(value, cls) else cls(**value)

    def model_dump(self, *, exclude_none: bool = True, **how: Any) -> dict[str, Any]:
        """Plain nested dicts, without what is None."""
        return {k: plain(v) for k, v in vars(self).items() if v is not None or not exclude_none}


def plain(value: Any) -> Any:
    """Models, mappings and lists as plain dicts and lists."""
    if isinstance(value, Model):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {key: plain(v) for key, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


class OpenAIFunctionPropertySchema(Model):
    """A parameter: type, description, enum."""


class OpenAIFunctionParametersSchema(Model):
    """type, properties (name → schema), required."""

    defaults: ClassVar[dict[str, Any]] = {"type": "object", "properties": {}, "required": []}


class OpenAIFunctionSchema(Model):
    """name, description, parameters."""

    nested: ClassVar[dict[str, Any]] = {"parameters": OpenAIFunctionParametersSchema}
    defaults: ClassVar[dict[str, Any]] = {"description": "", "parameters": {}}


class OpenAIFunctionToolSchema(Model):
    """type ("function"), function."""

    nested: ClassVar[dict[str, Any]] = {"function": OpenAIFunctionSchema}
    defaults: ClassVar[dict[str, Any]] = {"type": "function"}


@dataclass
class ToolResponse:
    """What a tool gives back: text, images, videos. ValueError for an image or video that is not in a list."""

    text: str | None = None
    image: Any = None
    video: Any = None

    def __post_init__(self) -> None:
        for name, value in (("image", self.image), ("video", self.video)):
            if value is not None and not isinstance(value, list):
                raise ValueError(f"ToolResponse.{name} is a list, got {type(value).__name__}")

    def is_empty(self) -> bool:
        """True without text, image and video."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """True without image and video."""
        return not (self.image or self.video)


def check_schema(schema: Any, where: str) -> None:
    """ToolError if this is no schema of a function with JSON-schema parameters."""
    function = schema.get("function") if isinstance(schema, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name.strip():
        raise ToolError(f"{where}: tool_schema is no {{type: function, function: {{name: …}}}}: {schema!r}")
    beside = [key for key in ("name", "description", "parameters", "properties", "required") if key in schema]
    beside += [key for key in ("properties", "required") if key in function]
    if beside:
        misplaced = f"{where}: {beside[0]!r} of tool {name!r} is not where it belongs (is it indented as it should be?)"
        raise ToolError(f"{misplaced}: {{function: {{name, parameters: {{type, properties, required}}}}}}")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    problem = _schema_problem(parameters, "parameters")
    if not problem and parameters.get("type") != "object":
        problem = f"parameters.type is {parameters.get('type')!r}, it must be 'object'"
    if problem:
        raise ToolError(f"{where}: the schema of tool {function['name']!r} is no JSON schema: {problem}")


def _schema_problem(schema: Any, at: str) -> str:
    if not isinstance(schema, Mapping):
        return f"{at} is {schema!r}, a mapping is needed"
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _KINDS:
            return f"{at}.type is {kind!r}; known: {', '.join(_KINDS)}"
    properties = schema.get("properties") or {}
    if not isinstance(properties, Mapping):
        return f"{at}.properties is {properties!r}, a mapping is needed"
    required = schema.get("required") or []
    if not isinstance(required, list):
        return f"{at}.required is {required!r}, a list of names is needed (of the object that has the properties)"
    if unknown := [name for name in required if name not in properties]:
        return f"{at}.required names {unknown[0]!r}, which is not in its properties"
    inside = {f"{at}.properties.{name}": value for name, value in properties.items()}
    if "items" in schema:
        inside[f"{at}.items"] = schema["items"]
    return next((problem for path, value in inside.items() if (problem := _schema_problem(value, path))), "")


class Tool:
    """What a dialogue needs of a tool: `name`, `config`, `tool_schema`, and an instance to `execute` calls on."""

    name: str
    config: dict[str, Any]
    tool_schema: Any
    runs_in_thread: bool = False
    #: A model that sees no images gets the text of a response alone; False: the call is then an error.
    images_are_optional: bool = False

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Make an instance; kwargs: the row's `create_kwargs`."""
        return instance_id or uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """(response, step reward, metrics) of a call; kwargs: the row's `execute_kwargs`."""
        return ToolResponse(text=""), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """A reward for the state that the instance is in."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Give up an instance."""


class BaseTool(Tool):
    """A tool with state: `create` an instance, `execute` calls on it, `release` it.

    config: the entry's `config` in the tools file: `timeout` (seconds of a call), `lifetime` (an instance for each
    call, or one for the trajectory). tool_schema: the entry's, or None where the class gives it by
    `get_openai_tool_schema`.
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any = None):
        self.config = config
        self.tool_schema = tool_schema
        schema = tool_schema or self.get_openai_tool_schema()
        self.tool_schema = OpenAIFunctionToolSchema.model_validate(schema) if isinstance(schema, Mapping) else schema
        if self.tool_schema is None:
            raise ToolError(f"{type(self).__name__} has no schema: set tool_schema or get_openai_tool_schema")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """The schema that the model sees."""
        return self.tool_schema


# --------------------------------------------------------------------------------------------------- functions as tools

FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}
"""Name → the tool that was marked last under it; a file has one of a name."""
_LOADED_FUNCTION_TOOL_PATHS: dict[str, list[FunctionTool]] = {}


class FunctionTool(Tool):
    """A function as a tool. What is not async runs in a thread (`thread_room`), so that one that hangs holds up
    nobody."""

    def __init__(self, function: Callable[..., Any], name: str, schema: Any):
        self.fn, self.config = function, {}
        self.is_async = inspect.iscoroutinefunction(function)
        self.runs_in_thread = not self.is_async
        self.tool_schema = OpenAIFunctionToolSchema.model_validate(schema)
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


def normalize_function_tool_return(returned: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """(response, reward, metrics) of what a tool returned: a ToolResponse, a Pillow image or a list of them, a dict or
    list as JSON, anything else as text, or a tuple of one of these, a reward and metrics, of which None is none.
    TypeError for a tuple of another length, and for bytes."""
    from PIL.Image import Image

    parts = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(f"a tool returns a tuple of length 1, 2, or 3, not of {len(parts)}")
    response, reward, metrics = (*parts, None, None)[:3]
    if not isinstance(response, ToolResponse):
        images = response if isinstance(response, list) else [response]
        shows = bool(images) and all(isinstance(image, Image) for image in images)
        response = ToolResponse(image=images) if shows else ToolResponse(_text(response))
    elif response.text is not None:
        response.text = _text(response.text)
    return response, float(reward or 0.0), metrics or {}


def _text(value: Any) -> str:
    if inspect.isawaitable(value):
        raise TypeError(f"it returned a {type(value).__name__} that nobody awaited: an await is missing in it")
    if isinstance(value, bytes | bytearray):
        raise TypeError("it returned bytes: decode text, and show an image with ToolResponse(text, image=[…])")
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def function_tool(target: Any = None, *, schema: Any = None) -> Any:
    """Decorator: make a function of `function_tool_path` a tool, under its own name or `@function_tool("name")`.

    The schema comes from type hints and a Google-style docstring where it is not given; ToolError says what is missing.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        name = target if isinstance(target, str) else function.__name__
        tool_schema = schema if schema is not None else _schema_of(function, name)
        check_schema(plain(tool_schema), f"function tool {name!r}")
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
