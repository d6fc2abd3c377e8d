"""Sessions over HTTP, on loopback: what a program that speaks to an OpenAI-compatible URL is given.

    http://127.0.0.1:PORT/TOKEN/v1            OpenAI's base URL of one session
        /v1/chat/completions  /v1/completions  /v1/models  /inference/v1/generate (beside /v1)

TOKEN is of one session and cannot be guessed. The run decides how is sampled: of what a request says only `max_tokens`, `stop` and
the tools count. The server is asyncio's, one for each event loop, started by the first session that is asked for its URL.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from verl.data.rows import BadRow
from verl.engine.rollout.base import Completion

MODEL = "policy"
_MOST_BYTES = 64 * 2**20


class _Server:
    """The sessions of one event loop."""

    def __init__(self) -> None:
        self.sessions: dict[str, Any] = {}
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._started = asyncio.ensure_future(asyncio.start_server(self._connection, sock=self._socket))

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read(reader)) is not None:
                status, body = await self._answer(*request)
                data = json.dumps(body).encode()
                head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
                writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, ValueError):
            pass  # the client's end
        finally:
            writer.close()

    async def _answer(self, path: str, data: bytes) -> tuple[int, dict[str, Any]]:
        _, token, *rest = [*path.partition("?")[0].split("/"), ""]
        session, route = self.sessions.get(token), _ROUTES.get("/".join(rest).strip("/"))
        if session is None or route is None:
            return 404, _error("no such session or path")
        try:
            return 200, await route(session, json.loads(data) if data else {})
        except (ValueError, TypeError, KeyError, BadRow) as error:
            return 400, _error(f"{type(error).__name__}: {error}", getattr(error, "code", None))
        except Exception as error:
            return 500, _error(f"{type(error).__name__}: {error}")


async def _read(reader: asyncio.StreamReader) -> tuple[str, bytes] | None:
    """(path, body) of the next request; None at the end of the connection."""
    line = await reader.readline()
    if not line.strip():
        return None
    _, path, _ = line.decode("latin-1").split(" ", 2)
    size = 0
    while (header := await reader.readline()).strip():
        name, _, value = header.decode("latin-1").partition(":")
        if name.strip().lower() == "content-length":
            size = int(value)
    if size > _MOST_BYTES:
        raise ValueError("the request is too large")
    return path, await reader.readexactly(size)


_SERVERS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Server] = WeakKeyDictionary()


def open_session(session: Any) -> str:
    """The base URL under which a session answers from now on. Only on an event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _SERVERS:
        _SERVERS[loop] = _Server()
    server, token = _SERVERS[loop], secrets.token_urlsafe(24)
    server.sessions[token] = session
    return f"http://127.0.0.1:{server.port}/{token}/v1"


def close_session(url: str) -> None:
    """The URL answers no more."""
    for server in _SERVERS.values():
        server.sessions.pop(url.split("/")[3], None)


# ------------------------------------------------------------------------------------------------------- the paths


def _error(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}


def _checked(body: dict[str, Any]) -> dict[str, Any]:
    """What of a request's sampling counts. ValueError for what would be silently wrong."""
    for name in ("stream", "echo"):
        if body.get(name):
            raise ValueError(f"{name} is not supported: ask without it")
    if body.get("n", 1) not in (None, 1):
        raise ValueError("n must be 1: a trajectory is one line of tokens")
    if (body.get("response_format") or {}).get("type", "text") != "text":
        raise ValueError("response_format is not supported: what the policy writes is not constrained")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise ValueError("tool_choice must be auto or none: the policy itself decides whether it calls")
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    return {name: v for name, v in (("max_tokens", most), ("stop", body.get("stop"))) if v}


async def _chat(session: Any, body: dict[str, Any]) -> dict[str, Any]:
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    reply = await session.chat(body["messages"], tools, **_checked(body))
    message = dict(reply.message)
    if "tool_calls" in message:
        message["tool_calls"] = [_as_text(call) for call in message["tool_calls"]]
    reason = "tool_calls" if "tool_calls" in message else _reason(reply.completion)
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return _result("chat.completion", session, reply.completion, choice)


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}


async def _completion(session: Any, body: dict[str, Any]) -> dict[str, Any]:
    prompt, tokenizer = body["prompt"], session.runner.tokenizer
    if isinstance(prompt, str):
        prompt = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    done = await _sample(session, prompt, _checked(body))
    text = tokenizer.decode(done.token_ids.tolist(), skip_special_tokens=True)
    choice = {"index": 0, "text": text, "finish_reason": _reason(done)}
    return _result("text_completion", session, done, choice)


async def _tokens(session: Any, body: dict[str, Any]) -> dict[str, Any]:
    done = await _sample(session, body["token_ids"], _checked(body.get("sampling_params") or {}))
    return _result("generate", session, done, {"index": 0, "finish_reason": _reason(done)})


async def _sample(session: Any, ids: list[int], asked: dict[str, Any]) -> Completion:
    prompt = np.asarray(ids, np.int64)
    return await session.generate(prompt, session.fitting(prompt, asked))


async def _models(session: Any, body: dict[str, Any]) -> dict[str, Any]:
    model = {"id": MODEL, "object": "model", "owned_by": "verl", "max_model_len": session.runner.longest}
    return {"object": "list", "data": [model]}


def _reason(done: Completion) -> str:
    return "stop" if done.finish_reason == "stop" else "length"


def _result(kind: str, session: Any, done: Completion, choice: dict[str, Any]) -> dict[str, Any]:
    ids, log_probs = done.token_ids.tolist(), done.log_probs.tolist()
    tokens = [{"token": f"token_id:{i}", "logprob": p} for i, p in zip(ids, log_probs, strict=True)]
    latest = session.latest
    whole = len(latest.context) + len(latest.tokens) if latest is not None else len(ids)
    usage = {"prompt_tokens": whole - len(ids), "completion_tokens": len(ids), "total_tokens": whole}
    about = {"id": secrets.token_hex(8), "object": kind, "created": int(time.time()), "model": MODEL}
    return about | {"choices": [choice | {"token_ids": ids, "logprobs": {"content": tokens}}], "usage": usage}


_ROUTES: dict[str, Callable[[Any, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
    "v1/chat/completions": _chat,
    "v1/completions": _completion,
    "v1/models": _models,
    "inference/v1/generate": _tokens,
    "v1/inference/v1/generate": _tokens,
}
