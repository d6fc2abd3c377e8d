"""Sessions over HTTP, on loopback unless told otherwise: what a program that speaks to an OpenAI-compatible URL is
given.

    http://127.0.0.1:PORT/TOKEN/v1      OpenAI's base URL of one session; what its paths answer: `verl.rollout.dialects`

TOKEN is of one session and cannot be guessed; the body of a request is read only after it. A request whose client
closes the connection before the answer is cancelled: nothing of it is recorded. The server is asyncio's, one for each
event loop, started by the first session that is asked for its URL.
"""

from __future__ import annotations

import asyncio
import json
import resource
import secrets
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from verl.data.rows import BadRow
from verl.rollout.event_loop import spawn

_MOST_BYTES = 64 * 2**20  # of a body
_HEAD_BYTES = 2**14
_MOST_CONNECTIONS = 1024  # of one session, and of all clients that have sent no token
_READ_SECONDS = 60.0  # in which a head, a body, and an answer must pass; a connection may be idle for so long
_LINGER_SECONDS = 2.0
PROTOBUF = "application/x-protobuf"


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with a status or a type of its own."""

    status: HTTPStatus
    data: bytes
    kind: str = "application/json"


Result = dict[str, Any] | AsyncGenerator[str] | Reply
"""A body of JSON, the server-sent events of a stream, or a `Reply`."""
Handler = Callable[[Any, dict[str, Any]], Awaitable[Result]]
"""Answers a request: a session, and the body; of a path that ends with an id, the id is in the body. A body that is not
JSON is `{"data": bytes}`."""
ROUTES: dict[str, tuple[str, Handler]] = {}
"""Path → the method that it takes, and what answers it; `verl.rollout.dialects` fills it. ID stands for a path's end
that is not named here."""


class NotFound(LookupError):
    """A path names something that is not there."""

    code = "not_found"


class Refused(Exception):
    """A request that is answered with an error, and whose connection is closed."""

    def __init__(self, status: HTTPStatus, message: str, header: str = ""):
        super().__init__(message)
        self.status, self.header = status, header


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request; headers by their names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    last: bool


class Server:
    """The sessions of one event loop, and how many connections each has ("": clients that have sent no token)."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sessions: dict[str, Any] = {}
        self.connections: Counter[str] = Counter()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a connection is a file
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._socket = socket.create_server(address, backlog=1024)
        self.base = f"http://{address[0]}:{self._socket.getsockname()[1]}"
        serving = asyncio.start_server(self._connected, sock=self._socket, limit=_HEAD_BYTES, backlog=1024)
        self._started = asyncio.ensure_future(serving)

    def find(self, head: Head) -> tuple[str, Any, Handler, str]:
        """Whose request it is (for the limit of connections), the session, the handler and the id at the path's end.
        Refused where one of them is not there."""
        _, token, *parts = [*head.path.partition("?")[0].split("/"), ""]
        session, route = self.sessions.get(token), "/".join(parts).strip("/")
        if session is None:
            problem = "no such session: the base URL is wrong, or its trajectory has ended"
            raise Refused(HTTPStatus.NOT_FOUND, problem)
        name = ""
        if route not in ROUTES:
            above, _, name = route.rpartition("/")
            route = f"{above}/ID"
        if route not in ROUTES:
            raise Refused(HTTPStatus.NOT_FOUND, f"no such path: /{route}; there are /{', /'.join(ROUTES)}")
        method, handler = ROUTES[route]
        if head.method != method:
            message = f"/{route} takes {method}, not {head.method}"
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, message, f"Allow: {method}\r\n")
        return token, session, handler, name

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):  # at the loop's end; asyncio would print it
            await _Connection(self, reader, writer).serve()


class _Connection:
    """One client. token: of the session that it asks, "" before its first request."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._server, self._reader, self._writer = server, reader, writer
        self._token = ""
        self._head: asyncio.Task[Head] | None = None

    async def serve(self) -> None:
        """Answer requests until the client, an error or a limit ends the connection."""
        self._server.connections[self._token] += 1
        try:
            self._check_limit()
            await self._requests()
        except Refused as refused:
            await self._refuse(refused)
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the client's end
        finally:
            if self._head is not None:
                self._head.cancel()
            self._server.connections[self._token] -= 1
            self._server.connections += Counter()  # without those that have none
            self._writer.close()

    async def _requests(self) -> None:
        self._head = spawn(_read_head(self._reader))
        while True:
            head = await asyncio.wait_for(self._head, _READ_SECONDS)
            session, handler, name = self._route(head)
            data = await self._body(head.headers)
            # Read while the answer is made: it fails when the client closes the connection.
            self._head = spawn(_read_head(self._reader))
            answer = spawn(self._answer(session, handler, name, data, head))
            try:
                await asyncio.wait({self._head, answer}, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done() and isinstance(self._head.exception(), EOFError | OSError):
                    return
                await answer
            finally:
                answer.cancel()
            await self._drain()
            if head.last:
                return

    async def _answer(self, session: Any, handler: Handler, name: str, data: bytes, head: Head) -> None:
        """Write what answers a request. An error of a stream that has begun is its last event."""
        header, last = "Connection: close\r\n" * head.last, head.last
        status, result = await _guarded(_answer(session, handler, name, data, head))
        if isinstance(result, dict | Reply):
            self._write(status, result, header)
            return
        async with aclosing(result):
            status, first = await _guarded(anext(result))  # a request that cannot be sampled is refused by its status
            if isinstance(first, dict):
                self._write(status, first, header)
                return
            header += "" if last else "Transfer-Encoding: chunked\r\n"
            self._writer.write(_head_of(status, "text/event-stream", header))
            while first and isinstance(first, str):
                await self._chunk(first, last)
                status, first = await _guarded(anext(result, ""))
            if first:
                await self._chunk(f"event: error\ndata: {json.dumps(first)}\n\n", last)
            await self._chunk("", last)

    async def _chunk(self, text: str, last: bool) -> None:
        data = text.encode()
        self._writer.write(data if last else f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self._drain()

    async def _drain(self) -> None:
        """Wait until the client has taken enough of what was written. TimeoutError for one that takes nothing."""
        async with asyncio.timeout(_READ_SECONDS):
            await self._writer.drain()

    def _route(self, head: Head) -> tuple[Any, Handler, str]:
        """See `Server.find`."""
        token, *route = self._server.find(head)
        self._server.connections[self._token] -= 1
        self._server.connections[token] += 1
        self._token = token
        self._check_limit()
        session, handler, name = route
        return session, handler, name

    def _check_limit(self) -> None:
        if self._server.connections[self._token] > _MOST_CONNECTIONS:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"more than {_MOST_CONNECTIONS} connections")

    async def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("expect", "").lower() == "100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(_READ_SECONDS):
                return await _read_body(self._reader, headers)
        except TimeoutError:
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, f"no whole body within {_READ_SECONDS:g} s") from None
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, f"the body cannot be read: {error}") from error

    def _write(self, status: HTTPStatus, result: dict[str, Any] | Reply, header: str = "") -> None:
        reply = result if isinstance(result, Reply) else Reply(status, json.dumps(result).encode())
        header += f"Content-Length: {len(reply.data)}\r\n"
        self._writer.write(_head_of(reply.status, reply.kind, header) + reply.data)

    async def _refuse(self, refused: Refused) -> None:
        with suppress(OSError, TimeoutError):
            error = _error(refused.status, str(refused))
            self._write(refused.status, error, f"Connection: close\r\n{refused.header}")
            self._writer.write_eof()
            if refused.status == HTTPStatus.SERVICE_UNAVAILABLE:
                return
            # The end of a connection with unread bytes is a reset, by which the client may lose the answer.
            async with asyncio.timeout(_LINGER_SECONDS):
                while await self._reader.read(_HEAD_BYTES):
                    pass


def _head_of(status: HTTPStatus, kind: str, header: str) -> bytes:
    return f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n{header}\r\n".encode()


async def _answer(session: Any, handler: Handler, name: str, data: bytes, head: Head) -> Result:
    if head.headers.get("content-type", "").startswith(PROTOBUF):
        return await handler(session, {"data": data})
    body = json.loads(data) if data else {}
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    return await handler(session, body | ({"id": name} if name else {}))


async def _guarded(answer: Awaitable[T]) -> tuple[HTTPStatus, T | dict[str, Any]]:
    """What is answered, or the error in its place."""
    try:
        return HTTPStatus.OK, await answer
    except (ValueError, TypeError, KeyError, AttributeError, BadRow, NotFound) as error:
        status = HTTPStatus.NOT_FOUND if isinstance(error, NotFound) else HTTPStatus.BAD_REQUEST
        return status, _error(status, f"{type(error).__name__}: {error}", getattr(error, "code", None))
    except Exception as error:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        return status, _error(status, f"{type(error).__name__}: {error}")


def _error(status: HTTPStatus, message: str, code: str | None = None) -> dict[str, Any]:
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    about = {"message": message, "type": kind, "param": None, "code": code}
    return {"type": "error", "error": about}  # as clients of OpenAI and of Anthropic read it


async def _read_head(reader: asyncio.StreamReader) -> Head:
    """The head of the next request. IncompleteReadError at the end of the connection."""
    try:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        raise Refused(status, f"the head of the request has more than {_HEAD_BYTES} bytes") from None
    line, *lines = text.strip().split("\r\n")
    if len(words := line.split(" ")) != 3:
        raise Refused(HTTPStatus.BAD_REQUEST, "this is no request of HTTP")
    pairs = (part.partition(":") for part in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    last = words[2] == "HTTP/1.0" or headers.get("connection", "").lower() == "close"
    return Head(words[0], words[1], headers, last)


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    """The body of a request, which comes as a whole or in chunks. ValueError for one that is neither."""
    if coding := headers.get("transfer-encoding"):
        if coding.lower() != "chunked":
            raise ValueError(f"Transfer-Encoding {coding} is not chunked")
        body = bytearray()
        while size := int((await reader.readline()).partition(b";")[0], 16):
            body += await reader.readexactly(_checked_size(size, len(body)))
            await reader.readline()
        while (await reader.readline()).strip():
            pass
        return bytes(body)
    return await reader.readexactly(_checked_size(int(headers.get("content-length", 0)), 0))


def _checked_size(size: int, before: int) -> int:
    if size < 0:
        raise ValueError(f"it has {size} bytes")
    if before + size > _MOST_BYTES:
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {_MOST_BYTES} bytes")
    return size


_SERVERS: WeakKeyDictionary[asyncio.AbstractEventLoop, Server] = WeakKeyDictionary()


def open_session(session: Any) -> str:
    """The base URL under which a session answers from now on. Only on an event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _SERVERS:
        _SERVERS[loop] = Server(session.setup.http_address)
    server, token = _SERVERS[loop], secrets.token_urlsafe(24)
    server.sessions[token] = session
    return f"{server.base}/{token}/v1"


def close_session(url: str) -> None:
    """The URL answers no more."""
    for server in _SERVERS.values():
        server.sessions.pop(url.split("/")[3], None)
