"""Tools of MCP servers (`config.type: mcp` in the tools file): over the stdio of a program, or over HTTP.

    tool loop ── McpTool.execute ──→ the process's MCP thread: one event loop, a connection for each server ──→ server

A connection is opened by the first call and shared by all trajectories of the process. A server that is gone ends the
trajectory with status environment_error; the next call starts it again. A server's process ends with the process that
started it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from verl.rollout.programs import Output, piped
from verl.rollout.record import EnvironmentFailed
from verl.rollout.tools.tool import BaseTool, OpenAIFunctionToolSchema, ToolError, ToolResponse, check_schema

START_SECONDS = 60.0
"""A server must have said within this time what tools it has."""
_ANSWER_SECONDS = 5.0
_RUN_AND_DIE_WITH_PARENT = (
    "import ctypes, os, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, 9)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


class McpTool(BaseTool):
    """One tool of a server. A subclass (`class_name`) may read results its own way."""

    server: McpServer
    images_are_optional = True

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Call it: text, images and no reward. RuntimeError with what the server says is wrong, EnvironmentFailed if it
        is gone."""
        result = await asyncio.wrap_future(_on_thread(self.server.call(self.name, parameters)))
        images = [part for part in result.content if part.type == "image"]
        text, metrics = self._parse_tool_result([part for part in result.content if part not in images])
        if result.is_error:
            raise RuntimeError(text)
        return ToolResponse(text, [f"data:{i.mime_type};base64,{i.data}" for i in images] or None), 0.0, metrics

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        """(text for the model, metrics) of a result's parts. The name is the public system's."""
        return "\n".join(_text(part) for part in content), {}


def _text(part: Any) -> str:
    text = getattr(getattr(part, "resource", part), "text", None)
    return f"({part.type} left out)" if text is None else str(text)


class McpServer:
    """One server, as a process talks to it. Its coroutines run in the MCP thread.

    spec: `command`, `args`, `env`, `cwd`; or `url`, `headers`, `auth_token`.
    """

    def __init__(self, name: str, spec: Mapping[str, Any]):
        self.name, self._spec = name, spec
        self._connection: asyncio.Task[Any] | None = None
        self._end = asyncio.Event()
        self._checks: set[asyncio.Task[bool]] = set()
        self._stderr: Output | None = None
        self.offered: list[Any] | None = None

    async def tools(self) -> list[Any]:
        """What the server offers; the connection ends afterwards."""
        try:
            client, tools, cursor = await self._client(), [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                if not (cursor := page.next_cursor):
                    return tools
        finally:
            self._disconnect(self._connection)

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """The server's result, an error of the tool's among them. EnvironmentFailed where there is no server any
        more."""
        try:
            client = await self._client()
            return await client.call_tool(tool, arguments)
        except asyncio.CancelledError:  # past its deadline: one that hangs would let all others wait too
            check = asyncio.ensure_future(self._answers())
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)
            raise
        except Exception as error:
            if await self._answers():
                raise
            gone = f"MCP server {self.name!r} ({self.target}) is gone: {reason(error)}{await self.last_lines()}"
            raise EnvironmentFailed(gone) from error

    @property
    def target(self) -> str:
        """Its URL or command."""
        spec = self._spec
        return str(spec.get("url") or " ".join(map(str, (spec["command"], *(spec.get("args") or ())))))

    async def last_lines(self) -> str:
        """See `Output.last_lines`; "" for a server over HTTP."""
        return "" if self._stderr is None else await self._stderr.last_lines()

    async def _answers(self) -> bool:
        """True if the server still does. One that does not is ended."""
        connection = self._connection
        if connection is None or not connection.done():
            return connection is not None
        with suppress(Exception):
            async with asyncio.timeout(_ANSWER_SECONDS):
                await connection.result().list_tools(cache_mode="bypass")
                return True
        self._disconnect(connection)
        return False

    async def _client(self) -> Any:
        if self._connection is None:
            self._end = asyncio.Event()
            self._connection = asyncio.ensure_future(self._connect(self._end))
        connection = self._connection
        try:
            return await asyncio.shield(connection)
        except Exception:
            self._disconnect(connection)
            raise

    async def _connect(self, end: asyncio.Event) -> Any:
        ready = asyncio.get_running_loop().create_future()
        self._stderr, errlog = await piped()
        holder = asyncio.ensure_future(_hold(self._spec, errlog, ready, end))
        try:
            async with asyncio.timeout(START_SECONDS):
                return await ready
        except BaseException:
            holder.cancel()
            raise

    def _disconnect(self, connection: asyncio.Task[Any] | None) -> None:
        if self._connection is connection:  # not one that was opened meanwhile
            self._end.set()
            self._connection = None


async def _hold(spec: Mapping[str, Any], errlog: TextIO, ready: asyncio.Future[Any], end: asyncio.Event) -> None:
    """Keep a connection open until `end`: what opens it has to close it, in the same task."""
    try:
        async with AsyncExitStack() as stack:
            with errlog:  # the server has it, too
                client = await _open(spec, errlog, stack)
            ready.set_result(client)
            await end.wait()
    except Exception as error:
        if not ready.done():
            ready.set_exception(error)


async def _open(spec: Mapping[str, Any], errlog: TextIO, stack: AsyncExitStack) -> Any:
    """A client, which `stack` closes. errlog: takes what a program writes to stderr."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    target: Any
    if "command" in spec:
        started = [str(word) for word in (spec["command"], *(spec.get("args") or ()))]
        parameters = StdioServerParameters(
            command=sys.executable,
            args=["-c", _RUN_AND_DIE_WITH_PARENT, *started],
            env={name: str(value) for name, value in (spec.get("env") or {}).items()},
            cwd=spec.get("cwd"),
        )
        target = stdio_client(parameters, errlog)
    else:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = dict(spec.get("headers") or {})
        if token := spec.get("auth_token"):
            headers["Authorization"] = f"Bearer {token}"
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=None))
        target = streamable_http_client(spec["url"], http_client=http)
    return await stack.enter_async_context(Client(target))


def reason(error: BaseException) -> str:
    """What went wrong in one line: of a group, its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of the MCP thread. The first, which asks servers for their tools, starts it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verl-mcp", daemon=True).start()
    return loop


# ---------------------------------------------------------------------------------------------------- the tools file

_SERVERS: dict[str, McpServer] = {}


def load_tools(entry: Mapping[str, Any], where: str, tool_class: Any = McpTool) -> list[tuple[str, BaseTool]]:
    """(place, tool) for what the servers of an entry offer: those of `mcp.mcp_servers_config_path`, a JSON file of
    `mcpServers`. ToolError for a file, a server or a schema that cannot be used."""
    try:
        from mcp import Client  # noqa: F401
    except ImportError as error:
        raise ToolError(
            f"{where}: tools of MCP servers need the package mcp, version 2: pip install 'verl[mcp]'"
        ) from error
    if not (isinstance(tool_class, type) and issubclass(tool_class, McpTool)):
        raise ToolError(
            f"{where}: class_name must be {McpTool.__name__} of verl.rollout.tools.mcp_servers, or a subclass"
        )
    options = entry.get("mcp") or {}
    chosen, config = options.get("tool_selected_list"), dict(entry.get("config") or {})
    tools: list[tuple[str, BaseTool]] = []
    for name, spec in _server_specs(options.get("mcp_servers_config_path"), where).items():
        place = f"{where} (MCP server {name!r})"
        server = _server(name, spec, place)
        for offered in server.offered or ():
            if chosen is None or offered.name in chosen:
                parameters = {"description": offered.description or "", "parameters": offered.input_schema}
                schema = {"type": "function", "function": {"name": offered.name, **parameters}}
                check_schema(schema, place)
                tool = tool_class(config=config, tool_schema=OpenAIFunctionToolSchema.model_validate(schema))
                tool.server = server
                tools.append((place, tool))
    if missing := [name for name in chosen or () if name not in {tool.name for _, tool in tools}]:
        raise ToolError(f"{where}: tool_selected_list names {missing[0]!r}, which no server of the entry has")
    return tools


def _server_specs(path: Any, where: str) -> dict[str, dict[str, Any]]:
    if not path:
        raise ToolError(f"{where}: type mcp needs mcp: {{mcp_servers_config_path: servers.json}}")
    try:
        servers = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))["mcpServers"]
        assert all(isinstance(spec, dict) for spec in servers.values())
    except (OSError, ValueError) as error:
        raise ToolError(f"{where}: {path} cannot be read: {error}") from error
    except (AssertionError, AttributeError, KeyError, TypeError) as error:
        shape = '{"mcpServers": {"NAME": {"command": …, "args": […]} or {"url": …}}}'
        raise ToolError(f"{where}: {path} must hold {shape}") from error
    for name, spec in servers.items():
        if problem := _problem(spec):
            raise ToolError(f"{path}: MCP server {name!r}: {problem}")
    return dict(servers)


def _problem(spec: Mapping[str, Any]) -> str:
    command, url = spec.get("command"), spec.get("url")
    if bool(command) == bool(url):
        return "it needs command (a program that speaks MCP on stdin and stdout) or url (streamable HTTP), one of them"
    if spec.get("type") == "sse" or spec.get("transport") == "sse":
        return "servers of the older SSE transport are not supported: give the url of its streamable HTTP endpoint"
    if command and shutil.which(str(command), path=(spec.get("env") or {}).get("PATH")) is None:
        return f"the command {command!r} is not found: install it, or give its full path"
    return ""


def _on_thread(code: Coroutine[Any, Any, Any]) -> Future[Any]:
    return asyncio.run_coroutine_threadsafe(code, _loop())


def _server(name: str, spec: Mapping[str, Any], place: str) -> McpServer:
    """A server that has said what tools it has; asked once in a process."""
    server = _SERVERS.setdefault(json.dumps([name, spec], sort_keys=True), McpServer(name, spec))
    if server.offered is None:
        try:
            server.offered = _on_thread(server.tools()).result(START_SECONDS + _ANSWER_SECONDS)
        except Exception as error:
            by_hand = "does it end, or speak no MCP, when started by hand?"
            hint = "does nobody listen there?" if "url" in spec else by_hand
            problem = f"{server.target} gave no list of tools ({reason(error)}): {hint}"
            raise ToolError(f"{place}: {problem}{_on_thread(server.last_lines()).result()}") from error
    return server
