"""Responses of OpenAI's API. A response is kept with its dialogue, to which `previous_response_id` goes back.

Thinking is a reasoning item, whose `encrypted_content` says how it stood in the turn: a client that sends its items
back goes on from the sampled tokens.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from verl.rollout.dialects import turns
from verl.rollout.dialects.demands import grammar_of
from verl.rollout.http_sessions import NotFound, Result
from verl.rollout.session import Reply, Session
from verl.rollout.turn_text import Thinking, joined

_REFUSED = ("background", "conversation", "prompt")
_ECHOED = (
    "instructions",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "reasoning",
    "text",
    "tool_choice",
)
_ECHOED_TOO = ("tools", "truncation", "max_output_tokens", "store", "user")
_DEFAULTS = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "truncation": "disabled", "metadata": {}}


async def create(session: Session, body: dict[str, Any]) -> Result:
    """`POST /v1/responses`."""
    if unknown := [name for name in _REFUSED if body.get(name)]:
        raise ValueError(f"{unknown[0]} is not supported: ask without it")
    before: turns.Messages = []
    if (previous := body.get("previous_response_id")) is not None:
        before = _kept(session, previous)[0]
    dialogue = _with_items(before, body.get("input"))
    opening = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    choice, form = body.get("tool_choice"), (body.get("text") or {}).get("format")
    tools = [_tool(tool) for tool in body.get("tools") or ()] if choice != "none" else []
    grammar = grammar_of(session, choice, form, tools, body.get("parallel_tool_calls") is not False)
    chosen = turns.settings(most=body.get("max_output_tokens"), stop=None, grammar=grammar)
    split = turns.thinking(session)
    echoed = {name: body.get(name, _DEFAULTS.get(name)) for name in (*_ECHOED, *_ECHOED_TOO)}
    about = {
        "id": turns.new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": turns.MODEL,
        **echoed,
    }
    about |= {"status": "in_progress", "error": None, "incomplete_details": None, "output": [], "usage": None}
    if body.get("stream"):
        parts = turns.pieces(session, split, [*opening, *dialogue], tools or None, chosen)
        return _stream(session, about, split, parts, dialogue)
    texts, reply = await turns.whole(session, split, [*opening, *dialogue], tools or None, chosen)
    items = [_item(kind, text, split.form) for kind, text in texts.items()]
    return _finished(session, about, [*items, *_calls(reply)], dialogue, reply)


async def retrieve(session: Session, body: dict[str, Any]) -> Result:
    """`GET /v1/responses/ID`."""
    return _kept(session, body["id"])[1]


def _kept(session: Session, name: str) -> tuple[turns.Messages, dict[str, Any]]:
    if name not in session.responses:
        raise NotFound(f"no response {name} in this session")
    return session.responses[name]


def _finished(
    session: Session, about: dict[str, Any], items: list[dict[str, Any]], dialogue: turns.Messages, reply: Reply
) -> dict[str, Any]:
    """The whole response, kept from now on."""
    cut = reply.completion.finish_reason != "stop" and not reply.message.get("tool_calls")
    sampled = len(reply.completion.token_ids)
    response = about | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + sampled,
        },
    }
    session.responses[about["id"]] = ([*dialogue, reply.message], response)
    return response


def _item(kind: str, text: str, form: str) -> dict[str, Any]:
    if kind == "thinking":
        content = [{"type": "reasoning_text", "text": text}]
        about = {"id": turns.new_id("rs"), "type": "reasoning", "summary": [], "content": content}
        return about | {"encrypted_content": form, "status": "completed"}
    return {
        "id": turns.new_id("msg"),
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [_text(text)],
    }


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _calls(reply: Reply) -> list[dict[str, Any]]:
    calls = reply.message.get("tool_calls") or []
    return [
        {
            "id": turns.new_id("fc"),
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": turns.as_json(call["function"]["arguments"]),
            "status": "completed",
        }
        for call in calls
    ]


class _Events:
    """Numbers the events of a stream."""

    def __init__(self) -> None:
        self._number = -1

    def __call__(self, kind: str, **data: Any) -> str:
        self._number += 1
        return turns.event({"type": f"response.{kind}", "sequence_number": self._number, **data}, f"response.{kind}")


_EVENTS = {"thinking": "reasoning_text", "text": "output_text"}
_LOGS: dict[str, dict[str, Any]] = {"thinking": {}, "text": {"logprobs": []}}


async def _stream(
    session: Session, about: dict[str, Any], split: Thinking, parts: turns.Pieces, dialogue: turns.Messages
) -> AsyncGenerator[str]:
    send, items, open_kind, text = _Events(), list[dict[str, Any]](), "", ""
    where: dict[str, Any] = {}
    async with aclosing(parts):
        async for part in parts:
            if send._number < 0:
                yield send("created", response=about)
                yield send("in_progress", response=about)
            kind, piece = ("", "") if isinstance(part, Reply) else part
            if open_kind and kind != open_kind:
                item = _item(open_kind, text, split.form) | {"id": where["item_id"]}
                yield send(f"{_EVENTS[open_kind]}.done", **where, text=text, **_LOGS[open_kind])
                yield send("content_part.done", **where, part=item["content"][0])
                yield send("output_item.done", output_index=len(items), item=item)
                items.append(item)
            if kind and kind != open_kind:
                item, text = _item(kind, "", ""), ""
                where = {"item_id": item["id"], "output_index": len(items), "content_index": 0}
                opened = item | {"content": [], "status": "in_progress"}
                yield send("output_item.added", output_index=len(items), item=opened)
                yield send("content_part.added", **where, part=item["content"][0])
            open_kind = kind
            if not isinstance(part, Reply):
                text += piece
                yield send(f"{_EVENTS[kind]}.delta", **where, delta=piece, **_LOGS[kind])
                continue
            for call in _calls(part):
                here = {"item_id": call["id"], "output_index": len(items)}
                opened = call | {"arguments": "", "status": "in_progress"}
                yield send("output_item.added", output_index=len(items), item=opened)
                yield send("function_call_arguments.delta", **here, delta=call["arguments"])
                yield send("function_call_arguments.done", **here, arguments=call["arguments"], name=call["name"])
                yield send("output_item.done", output_index=len(items), item=call)
                items.append(call)
            response = _finished(session, about, items, dialogue, part)
            yield send(response["status"], response=response)


# -- the request -------------------------------------------------------------------------------------------------------


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ValueError(f"the tool {tool.get('type')} is not supported: give tools of type function")
    return turns.function_tool(tool["name"], tool.get("description"), tool.get("parameters"))


def _with_items(before: turns.Messages, given: Any) -> turns.Messages:
    """A dialogue that goes on with a text or items. What the model wrote between two other items is one turn."""
    if not given or not isinstance(given, str | list):
        raise ValueError("input must be a text or a list of items")
    messages = list(before)

    def turn() -> dict[str, Any]:
        if not messages or messages[-1]["role"] != "assistant" or messages[-1] in before[-1:]:
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    items: list[dict[str, Any]] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for item in items:
        kind = item.get("type") or "message"
        if kind == "message" and item["role"] == "assistant":
            content = item["content"]
            turn()["content"] += content if isinstance(content, str) else "".join(map(_text_of, content))
        elif kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _parts(item["content"])})
        elif kind == "reasoning":
            thought = "".join(part["text"] for part in item.get("content") or item.get("summary") or ())
            if thought:
                turn()["content"] += joined(thought, item.get("encrypted_content"))
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            turn().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _parts(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        else:
            raise ValueError(f"an input item {kind} is not supported")
    return messages


def _text_of(part: Mapping[str, Any]) -> str:
    return str(part.get("text") or part.get("refusal") or "")


def _parts(content: Any) -> Any:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "input_image" and part.get("image_url"):
        return {"type": "image", "image": part["image_url"]}
    if part["type"] not in ("input_text", "output_text", "text"):
        raise ValueError(f"a content part {part['type']} cannot be shown to the policy")
    return {"type": "text", "text": part["text"]}
