"""The tools of a run, from `tool_config_path` and `function_tool_path`, and the calls of one trajectory.

A call that goes wrong is text for the model: an unknown tool, arguments that cannot be read, an exception, a deadline
passed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from verl.data.files import DataError
from verl.data.load_object import load_extern_object
from verl.data.rows import BadRow
from verl.rollout.event_loop import thread_room, users_code, within
from verl.rollout.record import EnvironmentFailed
from verl.rollout.tools.parsers import ToolCall
from verl.rollout.tools.tool import (
    BaseTool,
    OpenAIFunctionToolSchema,
    Tool,
    ToolError,
    ToolResponse,
    check_schema,
    load_function_tools_from_path,
    normalize_function_tool_return,
)

LIFETIMES = ("call", "trajectory")
Content = str | list[dict[str, Any]]
"""Of a message: a text, or its parts where it holds an image."""


def load_class(path: str, what: str) -> Any:
    """The object of `file.py:Name`, `pkg.module:Name` or `pkg.module.Name`. ToolError if it cannot be loaded."""
    module, _, name = path.rpartition(":" if ":" in path else ".")
    if not module or name == "py":
        raise ToolError(f"{what}: {path} names no class; package.module.Class, or file.py:Class")
    try:
        return load_extern_object(module, name)
    except DataError as error:
        raise ToolError(f"{what}: {error}") from error
    except Exception as error:
        raise ToolError(f"{what}: {module} cannot be imported: {type(error).__name__}: {error}") from error


def made(entry: Mapping[str, Any], where: str, base: type, **arguments: Any) -> Any:
    """The object of an entry's `class_name`, made of these arguments. ToolError for one that cannot be, or is no
    `base`."""
    class_path = entry.get("class_name")
    if not isinstance(class_path, str):
        raise ToolError(f"{where}: it needs class_name: package.module.Class (or file.py:Class)")
    cls = load_class(class_path, where)
    try:
        instance = cls(**arguments)
    except Exception as error:
        raise ToolError(f"{where}: {class_path} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(instance, base) or not hasattr(instance, "config"):
        raise ToolError(f"{where}: {class_path} must derive from {base.__name__}, and call super().__init__")
    return instance


def load_yaml(path: str, key: str, known: Sequence[str]) -> list[dict[str, Any]]:
    """The list under `key` of a YAML file, each entry with some of the keys `known`. ToolError if there is none."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ToolError(f"{path}: cannot be read: {error}") from error
    entries = content.get(key) if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ToolError(f"{path}: it needs a list `{key}:` of mappings")
    checks = ((entry, f" entry {number}", known) for number, entry in enumerate(entries))
    for names, place, allowed in ((content, "", [key]), *checks):
        if unknown := [str(name) for name in names if name not in allowed]:
            cause = f"{path}{place}: {unknown[0]} is no key that is known there; known: {', '.join(allowed)}"
            raise ToolError(f"{cause} (is it indented as it should be?)")
    if odd := [entry["config"] for entry in entries if not isinstance(entry.get("config") or {}, Mapping)]:
        raise ToolError(f"{path}: config must be a mapping, and is {odd[0]!r}")
    return [dict(entry) for entry in entries]


class Toolbox:
    """Tools by name; `tools` is the list of them, as loops of the public system want it."""

    def __init__(self, named: Sequence[tuple[str, Tool]]):
        self.by_name: dict[str, Tool] = {}
        places: dict[str, list[str]] = {}
        for where, tool in named:
            self.by_name[tool.name] = tool
            places.setdefault(tool.name, []).append(where)
        if duplicates := {name: sources for name, sources in places.items() if len(sources) > 1}:
            collisions = [
                f"{len(sources)} tools are called {name!r}: in {' and in '.join(sources)}"
                for name, sources in duplicates.items()
            ]
            raise ToolError(f"the names {sorted(duplicates)} collide: {'; '.join(collisions)}")
        self.tools = list(self.by_name.values())

    def warn_of_unknown(self, kwargs: Mapping[str, Any]) -> None:
        """Say which names in a row's `extra_info.tools_kwargs` are no tools: what a row holds for them reaches
        nothing."""
        tool_names = ", ".join(self.by_name) or "none"
        for name, value in kwargs.items():
            if value is not None and name not in self.by_name:
                warn_once(name, "unknown", f"is in a row's tools_kwargs; the run has no such tool ({tool_names})")

    @classmethod
    def load(cls, tool_config_path: str | None = None, function_tool_path: str | None = None) -> Toolbox:
        """The tools of a tools file and of a file of functions. ToolError for one that cannot be used."""
        tools: list[tuple[str, Tool]] = []
        if path := tool_config_path:
            entries = load_yaml(path, "tools", ("class_name", "config", "tool_schema", "mcp"))
            for number, entry in enumerate(entries):
                tools += _tools(f"{path} entry {number}", entry)
        if path := function_tool_path:
            try:
                functions = load_function_tools_from_path(path)
            except Exception as error:
                raise ToolError(f"function_tool_path={path}: {type(error).__name__}: {error}") from error
            if not functions:
                raise ToolError(f"function_tool_path={path}: no function of it is marked with @function_tool")
            tools += [(f"{path} ({tool.fn.__name__})", tool) for tool in functions]
        return cls(tools)

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Name → OpenAI schema, as templates take it."""
        return {name: tool.tool_schema.model_dump() for name, tool in self.by_name.items()}


def load_all_tools(tool_config_path: str | None = None, function_tool_path: str | None = None) -> list[Tool]:
    """`Toolbox.load`, as loops and tests of the public system call it."""
    return Toolbox.load(tool_config_path, function_tool_path).tools


def _tools(where: str, entry: dict[str, Any]) -> list[tuple[str, BaseTool]]:
    """(place, tool) of an entry: one tool, or those of MCP servers."""
    class_path, config = entry.get("class_name"), entry.get("config") or {}
    timeout = config.get("timeout")
    if timeout is not None and (not isinstance(timeout, int | float) or timeout <= 0):
        raise ToolError(f"{where}: config.timeout is {timeout!r}, it must be seconds, or null for none")
    if config.get("type") == "mcp":
        from verl.rollout.tools.mcp_servers import McpTool, load_tools

        return load_tools(entry, where, load_class(class_path, where) if class_path else McpTool)
    return [(where, _tool(where, entry))]


def _tool(where: str, entry: dict[str, Any]) -> BaseTool:
    schema = entry.get("tool_schema")
    config = dict(entry.get("config") or {})
    if config.get("lifetime", "call") not in LIFETIMES:
        raise ToolError(f"{where}: config.lifetime is {config['lifetime']!r}; known: {', '.join(LIFETIMES)}")
    if schema is not None:
        check_schema(schema, where)
        schema = OpenAIFunctionToolSchema.model_validate(schema)
    tool: BaseTool = made(entry, where, BaseTool, config=config, tool_schema=schema)
    declared = tool.tool_schema
    check_schema(declared.model_dump() if hasattr(declared, "model_dump") else declared, where)
    return tool


_WARNED: set[tuple[str, str]] = set()


def warn_once(name: str, kind: str, what: str, *, of: str = "tool") -> None:
    """Say on the console, in each process once for a kind of error, what is wrong with a tool, or with another part of
    a user's."""
    if (name, kind) not in _WARNED:
        _WARNED.add((name, kind))
        logging.getLogger(__name__).warning("%s %r: %s", of, name, what)


def told(error: Exception) -> str:
    """An error in words; one of a deadline has none of its own."""
    return f"{type(error).__name__}: {str(error) or 'no answer within its deadline'}"


def truncated(text: str, longest: int, side: str) -> str:
    """The text, or of one of more than `longest` characters its end, its start, or both; `side` is cut."""
    if len(text) <= longest:
        return text
    if side == "left":
        return "(truncated)..." + text[-longest:]
    if side == "right":
        return text[:longest] + "...(truncated)"
    half = longest // 2
    return text[:half] + "...(truncated)..." + text[-half:]


class ToolRun:
    """The tools of one trajectory: instances, deadlines, step rewards, metrics.

    kwargs: the row's `extra_info.tools_kwargs`. timeout: seconds of a call where the tool's config has none. longest,
    side: how many characters of a response the model sees, and which part of a longer one is cut. show_images:
    `Boundaries.image_parts` of the session.
    """

    show_images: Any = None

    def __init__(self, tools: Mapping[str, Tool], kwargs: Any, *, timeout: float | None, longest: int, side: str):
        self.names = set(tools)
        self._tools, self._kwargs = tools, kwargs or {}
        self._timeout, self._longest, self._side = timeout, longest, side
        self._instances: dict[str, str] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self.rewards: list[float] = []
        self.metrics: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0

    async def call(self, call: ToolCall) -> Content:
        """What answers a call. What a tool does wrong is text; EnvironmentFailed where its server is gone."""
        started, tool = time.monotonic(), self._tools.get(call.name)
        self.counts["calls"] += 1
        if call.error or tool is None:
            self.counts["invalid"] += 1
            unknown = f"there is no tool {call.name!r}; the tools are {', '.join(self._tools) or 'none'}"
            return f"Error: {call.error or unknown}"
        timeout = self._deadline(tool)
        instances, room = list[str](), thread_room() if tool.runs_in_thread else nullcontext()
        try:
            async with room, (deadline := asyncio.timeout(timeout)):
                result = await users_code(self._execute(tool, call.arguments, instances))
                response, reward, metrics = normalize_function_tool_return(result)
                if response.video:
                    raise ToolError("it gave a video, and videos are not in this release")
                images, response = self._images(tool, response)
                metrics = {"tool": call.name, **metrics}
        except EnvironmentFailed:
            raise
        except Exception as error:
            # Not the text of a BadRow: it may hold an address of memory, another one when a run resumes.
            if isinstance(error, BadRow):
                error = ToolError(f"it gave an image that cannot be shown: {error.problem}")
            late = isinstance(error, TimeoutError) and deadline.expired()
            self.counts["timeouts" if late else "errors"] += 1
            problem = f"no answer within {timeout:g} s" if late else f"{type(error).__name__}: {error}"
            warn_once(call.name, type(error).__name__, f"{problem} (the model is told so)")
            return truncated(f"Error: tool {call.name!r}: {problem}", self._longest, self._side)
        finally:
            for instance in instances:
                await self._release(tool, instance)
            self.seconds += time.monotonic() - started
        self.rewards.append(reward)
        self.metrics.append(metrics)
        text = truncated(response.text or "", self._longest, self._side)
        return [*images, {"type": "text", "text": text}] if images else text

    def _images(self, tool: Tool, response: ToolResponse) -> tuple[list[dict[str, Any]], ToolResponse]:
        """The images of a response as parts of a message, and what is left of it."""
        try:
            return self.show_images(response.image) if response.image else [], response
        except BadRow as error:
            if not tool.images_are_optional:
                raise
            warn_once(tool.name, "image", f"its images are left out, the model gets the text alone: {error.problem}")
            return [], ToolResponse(f"{response.text or ''}\n(image left out)".lstrip())

    async def _execute(self, tool: Tool, arguments: dict[str, Any], for_call: list[str]) -> Any:
        """What a tool gives. for_call: takes the instance that was made for this call alone."""
        shared = tool.config.get("lifetime") == "trajectory"
        execute_kwargs = self._of_row(tool, "execute_kwargs")
        async with self._locks.setdefault(tool.name, asyncio.Lock()) if shared else nullcontext():
            instance = self._instances.get(tool.name)
            if instance is None:
                create_kwargs = self._of_row(tool, "create_kwargs")
                takes = inspect.signature(tool.create).parameters.values()
                if any(p.name == "create_kwargs" or p.kind is p.VAR_KEYWORD for p in takes):
                    create_kwargs = {"create_kwargs": create_kwargs, **create_kwargs}
                instance, _ = await tool.create(**create_kwargs)
                if shared:
                    self._instances[tool.name] = instance
                else:
                    for_call.append(instance)
            return await tool.execute(instance, arguments, **execute_kwargs)

    def _of_row(self, tool: Tool, kind: str) -> dict[str, Any]:
        arguments = (self._kwargs.get(tool.name) or {}).get(kind) or {}
        return {name: value for name, value in arguments.items() if value is not None}

    async def close(self) -> None:
        """Ask the instances that lived through the trajectory for their rewards, and release them."""
        for name, instance in self._instances.items():
            tool = self._tools[name]
            try:
                pending = tool.calc_reward(instance, **self._of_row(tool, "calc_reward_kwargs"))
                reward = await within(self._deadline(tool), pending)
                self.rewards.append(float(reward or 0.0))
            except Exception as error:
                self._failed(tool, "calc_reward", error)
            await self._release(tool, instance)
        self._instances.clear()

    async def _release(self, tool: Tool, instance: str) -> None:
        """Give up an instance, within a deadline of its own: that of the call may have passed. What goes wrong is
        counted and said."""
        try:
            pending = tool.release(instance, **self._of_row(tool, "release_kwargs"))
            await within(self._deadline(tool), pending)
        except Exception as error:
            self._failed(tool, "release", error)

    def _deadline(self, tool: Tool) -> float | None:
        return tool.config.get("timeout", self._timeout)  # type: ignore[no-any-return]

    def _failed(self, tool: Tool, method: str, error: Exception) -> None:
        self.counts["errors"] += 1
        warn_once(tool.name, f"{method} {type(error).__name__}", f"{method}: {told(error)}")
