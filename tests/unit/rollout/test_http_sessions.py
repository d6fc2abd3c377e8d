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

from tests.ranks import free_port
from tests.scripted_record import written
from tests.tiny import tiny_tokenizer
from tests.unit.rollout.test_session import _QWEN, CALL, TOOLS, script, session_of
from verl.engine.rollout.base import Completion
from verl.rollout import dialects, http_sessions  # noqa: F401 - what sessions answer
from verl.rollout.session import Session
from verl.rollout.tools import toolbox

HI = [{"role": "user", "content": "Hi"}]
END = "<|im_end|>"


class Client:
    """A program that asks a session. session: for what only the server's side shows."""

    def __init__(self, session: Session):
        self.session, self.url = session, urlsplit(session.base_url)

    def ask(self, path: str, body: Any = None, method: str = "", base: str = "", **how: Any) -> tuple[int, Any]:
        """(status, JSON) of an answer; (status, parts) of a stream."""
        connection = http.client.HTTPConnection(str(self.url.hostname), self.url.port, timeout=20)
        data = body if body is None or isinstance(body, bytes) or how else json.dumps(body)
        connection.request(method or ("GET" if body is None else "POST"), (base or self.url.path) + path, data, **how)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.headers["Content-Type"] != "text/event-stream":
            return answer.status, json.loads(text)
        *parts, rest = text.split("\n\n")
        assert rest == ""
        data = [part.rpartition("data: ")[2] for part in parts]
        assert (data[-1] == "[DONE]") == ("completions" in path)
        return answer.status, [json.loads(part) for part in data if part != "[DONE]"]

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


def serve(
    check: Callable[[Client], None], *texts: str, send: Any = None, port: int = 0, tokenizer: Any = None, **how: Any
) -> Session:
    """Run a check beside a session that says these texts."""
    tokenizer = tokenizer or tiny_tokenizer(template=_QWEN.replace("%THINK%", ""))
    session = session_of(tokenizer, send or script(tokenizer, *texts)[0], longest=4000, **how)
    session.setup.http_address = ("127.0.0.1", port)

    async def go() -> None:
        client = Client(session)
        await asyncio.to_thread(check, client)
        session.close()

    asyncio.run(go())
    return session


def test_a_session_over_http() -> None:
    def check(client: Client) -> None:
        choice = client.chat(tools=TOOLS, temperature=0.1)["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["logprobs"] is None
        call = choice["message"]["tool_calls"][0]
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        second = client.chat([*HI, choice["message"], answer], tools=TOOLS)
        assert second["choices"][0]["message"]["content"] == "3." and len(written(client.session)) == 1
        _, third = client.ask("/completions", {"prompt": "abc", "max_tokens": 2})
        assert third["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
        _, fourth = client.ask("/inference/v1/generate", body, base=client.url.path.removesuffix("/v1"))
        assert len(fourth["choices"][0]["token_ids"]) == len(fourth["choices"][0]["logprobs"]["content"]) == 1
        assert client.ask("/models")[1]["data"][0]["max_model_len"] == 4000

    session = serve(check, CALL + END, "3." + END, "ab", "a")
    assert len(written(session)) == 3


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("chat/completions", {}, "messages must be a list"),
        ("chat/completions", {"messages": HI, "n": 0}, "n must be a number"),
        ("completions", {"prompt": "a", "n": 2}, "n must be 1"),
        ("responses", {"input": "Hi", "tools": [{"type": "web_search"}]}, "the tool web_search"),
        ("responses", {"input": "Hi", "text": {"format": {"type": "json_schema"}}}, "response_format json_schema"),
        ("messages", {"messages": HI, "tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
        ("messages", {"messages": HI, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "the tool bash"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "a content block document"),
        ("chat/completions", {"messages": HI, "tool_choice": {"type": "function"}}, "tool_choice"),
        ("chat/completions", {"messages": HI, "response_format": {"type": "json_object"}}, "response_format"),
        ("completions", {"prompt": []}, "prompt must be a text, a list of token ids"),
        ("completions", {"prompt": "x" * 5000}, "leave no room"),
        ("completions", b"{", "JSONDecodeError"),
        ("completions", [1], "must be a JSON object"),
    ],
)
def test_what_a_session_refuses(path: str, body: Any, message: str) -> None:
    def check(client: Client) -> None:
        status, answer = client.ask(f"/{path}", body)
        error = answer["error"]
        assert status == 400 and message in error["message"] and error["type"] == "invalid_request_error"
        assert error["code"] == ("context_length_exceeded" if "room" in message else None)

    assert not serve(check).segments()


def test_log_probs_only_when_asked_and_whole() -> None:
    def check(client: Client) -> None:
        told = client.chat(logprobs=True)["choices"][0]
        content = told["logprobs"]["content"]
        assert [one["token"] for one in content] == ["A", "\ufffd", "\ufffd", END]
        assert bytes(byte for one in content for byte in one["bytes"]).decode() == "Aé" + END
        assert {(one["logprob"], str(one["top_logprobs"])) for one in content} == {(-0.5, "[]")}
        assert len(content) == len(told["token_ids"])
        for asked, expected in ((0, {"tokens": ["a", "b"], "text_offset": [0, 1]}), (None, None)):
            _, answer = client.ask("/completions", {"prompt": "abc", "logprobs": asked})
            if expected is not None:
                expected |= {"token_logprobs": [-0.5] * 2, "top_logprobs": [{"a": -0.5}, {"b": -0.5}]}
            assert answer["choices"][0]["logprobs"] == expected

    serve(check, "Aé" + END, "ab", "ab")


def test_a_stop_string_is_in_the_tokens_and_not_in_the_message() -> None:
    def check(client: Client) -> None:
        message = client.chat(stop=["never", "STOP"])["choices"][0]["message"]
        assert message["content"] == "One. "
        client.chat([*HI, message, {"role": "user", "content": "More"}])
        _, answer = client.ask("/completions", {"prompt": "abc", "stop": "b"})
        assert answer["choices"][0]["text"] == "a" and len(answer["choices"][0]["token_ids"]) == 2

    session = serve(check, "One. STOP", "Two." + END, "ab")
    dialogue, _ = written(session)
    text = session.setup.tokenizer.decode(dialogue.tokens[dialogue.mask])
    assert text == f"One. STOPTwo.{END}"


def test_a_stream_of_pieces_and_then_its_calls() -> None:
    def check(client: Client) -> None:
        usage = {"include_usage": True}
        *parts, used = client.chat(tools=TOOLS, stream=True, stream_options=usage, logprobs=True)
        assert {part["object"] for part in (*parts, used)} == {"chat.completion.chunk"}
        *texts, turn, logged, end = [part["choices"][0] for part in parts]
        assert [text["delta"]["content"] for text in texts] == list("So:") and turn["finish_reason"] is None
        assert texts[0]["delta"]["role"] == "assistant" and logged["logprobs"]["content"][3]["token"] == "<"
        assert [call["index"] for call in turn["delta"]["tool_calls"]] == [0, 1]
        assert end == {"index": 0, "delta": {}, "finish_reason": "tool_calls", "logprobs": None}
        assert used["choices"] == [] and used["usage"]["completion_tokens"] == len(logged["token_ids"])
        _, parts = client.ask("/completions", {"prompt": ["abc", "d"], "stream": True})
        texts = [(c["index"], c["text"], c["finish_reason"]) for part in parts for c in part["choices"]]
        assert texts == [(0, "ab", None), (0, "", "stop"), (1, "c", None), (1, "", "stop")]

    serve(check, "So:" + CALL * 2 + END, "ab", "c")


@pytest.mark.parametrize("prompt", [["ab", "ab"], [[66, 67], [66, 67]], ["ab"], [66, 67]])
def test_several_prompts(prompt: list[Any]) -> None:
    count = len(prompt) if not isinstance(prompt[0], int) else 1

    def check(client: Client) -> None:
        status, answer = client.ask("/completions", {"prompt": prompt})
        assert status == 200 and [c["text"] for c in answer["choices"]] == ["x", "y"][:count]
        assert answer["usage"]["prompt_tokens"] == 2 * count

    assert len(serve(check, "x", "y").segments()) == count


@pytest.mark.parametrize("without", ["null", "absent", "parts"])
def test_messages_without_content_and_in_parts(without: str) -> None:
    def check(client: Client) -> None:
        message = client.chat(tools=TOOLS)["choices"][0]["message"]
        message |= {"refusal": None, "function_call": None, "content": [] if without == "parts" else None}
        if without == "absent":
            del message["content"]
        parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "3"}]
        answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": parts}
        client.chat([*HI, message, answer], tools=TOOLS)

    session = serve(check, CALL + END, "Yes." + END)
    (segment,) = written(session)
    assert None not in [value for message in session.messages for value in message.values()]
    text = session.setup.tokenizer.decode(segment.tokens)
    assert "<tool_response>\nIt is 3\n</tool_response>" in text and text.endswith(f"Yes.{END}")


def test_a_required_call_is_taken_as_auto(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(toolbox, "_WARNED", set())

    def check(client: Client) -> None:
        for _ in range(2):
            assert "tool_calls" not in client.chat(tools=TOOLS, tool_choice="required")["choices"][0]["message"]

    session = serve(check, "No." + END, "No." + END)
    assert session.counts["required_tool_choices"] == 2 and caplog.text.count("taken as auto") == 1


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


def test_a_body_in_chunks_and_connections_that_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_sessions, "_MOST_CONNECTIONS", 2)  # whatever the number of their requests

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
def test_requests_that_are_too_large_too_slow_or_none(monkeypatch: pytest.MonkeyPatch, text: str, status: int) -> None:
    monkeypatch.setattr(http_sessions, "_READ_SECONDS", 0.3)

    def check(client: Client) -> None:
        assert status_of(client.connect(text)) == status

    serve(check)


def test_a_port_of_the_users() -> None:
    port = free_port()

    def check(client: Client) -> None:
        assert client.url.port == port and client.ask("/models")[0] == 200

    serve(check, port=port)


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
    assert len(written(session)) == 1 and len(ended) == 2
