"""Sessions over HTTP: OpenAI's formats, and what a client may send."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.tiny import tiny_tokenizer
from tests.unit.test_session import _QWEN, script, session_of
from verl.engine.rollout.base import Completion
from verl.rollout import http_sessions
from verl.rollout.session import Session

HI = [{"role": "user", "content": "Hi"}]
END = "<|im_end|>"


class Client:
    """A program that asks a session. session: for what only the server's side shows."""

    def __init__(self, session: Session):
        self.session, self.url = session, urlsplit(session.base_url)

    def ask(
        self, path: str, body: Any = None, method: str = "", base: str = "", **how: Any
    ) -> tuple[int, Any]:
        """(status, JSON) of an answer; (status, parts) of a stream."""
        connection = http.client.HTTPConnection(str(self.url.hostname), self.url.port, timeout=20)
        data = body if body is None or isinstance(body, bytes) or how else json.dumps(body)
        connection.request(
            method or ("GET" if body is None else "POST"), (base or self.url.path) + path, data, **how
        )
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.headers["Content-Type"] != "text/event-stream":
            return answer.status, json.loads(text)
        *parts, done, rest = text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return answer.status, [json.loads(part.removeprefix("data: ")) for part in parts]

    def chat(self, messages: Any = HI, **body: Any) -> Any:
        status, answer = self.ask("/chat/completions", {"messages": messages, **body})
        assert status == 200, answer
        return answer

    def connect(self, text: str = "") -> socket.socket:
        """A connection on which a text is sent: PATH stands for that of the session."""
        connection = socket.create_connection((str(self.url.hostname), self.url.port), timeout=20)
        connection.sendall(text.replace("PATH", self.url.path).replace("\n", "\r\n").encode())
        return connection


def status_of(connection: socket.socket) -> int:
    """The status of the answer, 0 for a connection that is closed without one."""
    text = b""
    while part := connection.recv(2**16):
        text += part
        if b"\r\n\r\n" in text:
            break
    return int(text.split()[1]) if text else 0


def serve(check: Callable[[Client], None], *texts: str, send: Any = None) -> Session:
    """Run a check beside a session that says these texts."""
    tokenizer = tiny_tokenizer(template=_QWEN.replace("%THINK%", ""))
    session = session_of(tokenizer, send or script(tokenizer, *texts)[0], longest=4000)

    async def go() -> None:
        client = Client(session)
        await asyncio.to_thread(check, client)
        session.close()

    asyncio.run(go())
    return session


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/chat/completions", 405),
        ("POST", "/models", 405),
        ("POST", "/embeddings", 404),
        ("GET", "", 404),
    ],
)
def test_wrong_methods_and_paths(method: str, path: str, status: int) -> None:
    def check(client: Client) -> None:
        found, answer = client.ask(path, {"a": "b" * 2**20}, method)
        assert found == status and set(answer["error"]) == {"message", "type", "param", "code"}
        connection = client.connect("HEAD PATH/models HTTP/1.1\n\n")
        assert b"\r\nAllow: GET\r\n" in connection.recv(2**16)

    serve(check)


def test_a_body_in_chunks_and_connections_that_stay_open() -> None:
    def check(client: Client) -> None:
        text = json.dumps({"messages": HI}).encode()
        how = {"headers": {"Transfer-Encoding": "chunked"}, "encode_chunked": True}
        status, answer = client.ask("/chat/completions", iter([text[:9], text[9:]]), "POST", **how)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Yes.")
        asked = "GET PATH/models HTTP/1.1\n\n"
        connection = client.connect(asked * 2 + asked.replace("1.1", "1.0"))
        text = b""
        while part := connection.recv(2**16):
            text += part
        assert text.count(b"HTTP/1.1 200") == 3 and text.count(b"Connection: close") == 1

    serve(check, "Yes." + END)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (
            "POST /wrong/v1/completions HTTP/1.1\nContent-Length: 60000000\n\n",
            404,
        ),  # no byte of the body is needed
        ("POST PATH/completions HTTP/1.1\nContent-Length: 100000000\n\n", 413),
        ("POST PATH/completions HTTP/1.1\nTransfer-Encoding: chunked\n\nfffffffff\n", 413),
        ("POST PATH/completions HTTP/1.1\nTransfer-Encoding: chunked\n\nx\n", 400),
        ("POST PATH/completions HTTP/1.1\nContent-Length: 9\n\n{", 408),
        ("POST PATH/completions HTTP/1.1\nX: " + "x" * 2**15, 431),
        ("Hello\n\n", 400),
        ("GET PATH/mod", 0),
        ("", 0),
    ],
)
def test_requests_that_are_too_large_too_slow_or_none(
    monkeypatch: pytest.MonkeyPatch, text: str, status: int
) -> None:
    monkeypatch.setattr(http_sessions, "_READ_SECONDS", 0.3)
    serve(lambda client: _is(status_of(client.connect(text)), status))


def _is(found: int, expected: int) -> None:
    assert found == expected


def test_the_number_of_connections_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_sessions, "_MOST_CONNECTIONS", 2)

    def check(client: Client) -> None:
        asked = "GET PATH/models HTTP/1.1\n\n"
        first = [client.connect(asked) for _ in range(2)]
        assert [status_of(connection) for connection in first] == [200, 200]
        silent = [client.connect() for _ in range(2)]  # those without a token are counted by themselves
        assert [status_of(client.connect(asked)) for _ in range(2)] == [503, 503]
        silent.pop().close()
        assert status_of(client.connect(asked)) == 503, "the session has two"
        first.pop().close()
        until = time.monotonic() + 10
        while (found := status_of(client.connect(asked))) == 503 and time.monotonic() < until:
            time.sleep(0.01)
        assert found == 200

    serve(check)


def test_a_request_whose_client_is_gone_is_cancelled() -> None:
    ended = []

    async def send(ids: Any, sampling: Any, media: Any) -> Completion:
        try:
            await asyncio.sleep(0 if ended else 60)
        finally:
            ended.append(True)
        return Completion(np.array([66]), np.full(1, -0.5, np.float32), "stop")

    def check(client: Client) -> None:
        body = json.dumps({"prompt": "abc"})
        connection = client.connect(f"POST PATH/completions HTTP/1.1\nContent-Length: {len(body)}\n\n{body}")
        time.sleep(0.2)
        connection.close()
        until = time.monotonic() + 10
        while not ended and time.monotonic() < until:
            time.sleep(0.01)
        assert client.ask("/completions", {"prompt": "abc"})[0] == 200

    session = serve(check, send=send)
    assert len(session.segments()) == 1 and len(ended) == 2
