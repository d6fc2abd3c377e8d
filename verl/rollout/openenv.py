"""OpenEnv servers as environments: `environment.name=openenv`, `path` their URL, through the package's
`GenericEnvClient`.

What an action looks like is the server's to say (its `/schema`): an action with one required text is the turn's text;
any other is offered to the policy as a tool `act` with the action's schema; a server of MCP tools offers these.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Mapping
from functools import cache
from typing import Any

from verl.errors import UserError
from verl.rollout.environments import Observation, StepResult, opening, seed_of
from verl.rollout.event_loop import in_thread
from verl.rollout.record import EnvironmentFailed

ACT = "act"
_PAUSE = 0.2  # seconds between two attempts at a server that has no room for another session, or is being started again


def check(url: str) -> None:
    """UserError if the package is missing, or nothing like an OpenEnv server answers at `url`."""
    try:
        import openenv  # noqa: F401
    except ImportError as error:
        raise UserError("environment.name=openenv needs openenv: pip install 'verl[openenv]'") from error
    _action_schema.cache_clear()
    try:
        _action_schema(url)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"no OpenEnv server answers at {url} ({type(error).__name__}: {error}): start it there, or correct the URL"
        ) from error


@cache
def _action_schema(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=10) as answer:
        return dict(json.loads(answer.read())["action"])


def text_field(schema: Mapping[str, Any]) -> str | None:
    """The field of an action that is one text and nothing else that must be given."""
    required = list(schema.get("required") or ())
    kinds = [schema["properties"].get(name, {}).get("type") for name in required]
    return required[0] if kinds == ["string"] else None


class OpenEnv:
    """A session with a server. url: its address. reset: keywords of its `reset`, with those of the row's
    `extra_info.reset_kwargs` and a seed that follows from the row's uid. action: the field of an action that is the
    turn's text. observation: the field of an observation that the policy sees; not given: all of them, as JSON."""

    def __init__(
        self,
        url: str,
        reset: Mapping[str, Any] | None = None,
        action: str | None = None,
        observation: str | None = None,
    ):
        from openenv import GenericEnvClient

        self._url, self._reset, self._field, self._shown = url, dict(reset or {}), action, observation
        self._client = GenericEnvClient(base_url=url)
        self._socket: Any = None

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """The row's prompt, and what the server says at its end."""
        row_kwargs = (row["extra_info"] or {}).get("reset_kwargs") or {}
        result = await self._begin({"seed": seed_of(row), **self._reset, **row_kwargs})
        self._socket = self._client._ws
        schema = await in_thread(_action_schema, url=self._url)
        tools = await self._tools(schema)
        return Observation(opening(row, self._text(result.observation)), tools)

    async def _begin(self, keywords: dict[str, Any]) -> Any:
        while True:
            try:
                return await self._client.reset(**keywords)
            except RuntimeError as error:
                if "CAPACITY_REACHED" not in str(error):
                    raise
            except ConnectionError:
                pass  # the server is being started again; tool_timeout ends the wait
            await asyncio.sleep(_PAUSE)

    async def _tools(self, schema: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        if "tool_name" in schema["properties"]:
            tools = (await self._client.step({"type": "list_tools"})).observation["tools"]
            return [_tool(tool["name"], tool["description"], tool["input_schema"]) for tool in tools]
        self._field = self._field or text_field(schema)
        if self._field:
            return None
        properties = {name: value for name, value in schema["properties"].items() if name != "metadata"}
        return [_tool(ACT, schema.get("description") or "Acts.", {**schema, "properties": properties})]

    async def step(self, message: Mapping[str, Any]) -> StepResult:
        """Act: the turn's text, or its calls one after the other. A turn that should call and does not is the last."""
        if self._field:
            text, reward, done = await self._act({self._field: message["content"]})
            return StepResult([{"role": "user", "content": text}], reward, done)
        answers, total, done = [], 0.0, not message.get("tool_calls")
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            called = {"type": "call_tool", "tool_name": name, "arguments": arguments}
            text, reward, done = await self._act(arguments if name == ACT else called)
            total += reward
            answers.append({"role": "tool", "content": text, "name": name, "tool_call_id": call["id"]})
            if done:
                break
        return StepResult(answers, total, done)

    async def _act(self, action: Mapping[str, Any]) -> tuple[str, float, bool]:
        """(what the policy sees, reward, done). An action that the server refuses as such is the policy's mistake."""
        try:
            result = await self._client.step(dict(action))
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):
                raise
            return "Error: the action does not fit its schema", 0.0, False
        # The client connects again by itself: to an environment that was never reset.
        if self._client._ws is not self._socket:
            raise EnvironmentFailed("the connection to the server was lost within the episode")
        return self._text(result.observation), float(result.reward or 0.0), bool(result.done)

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._shown:
            return str(observation[self._shown])
        left_out = ("metadata", "tool_name")
        fields = {k: v for k, v in observation.items() if k not in left_out and v is not None}
        only = next(iter(fields.values())) if len(fields) == 1 else fields
        if isinstance(only, Mapping) and isinstance(only.get("content"), list):  # the result of a tool
            return "\n".join(part.get("text") or f"({part.get('type')} left out)" for part in only["content"])
        return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False)

    async def close(self) -> None:
        """Leave the server."""
        await self._client.close()


def _tool(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}
