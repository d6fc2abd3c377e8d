"""Messages of Anthropic's API.

Thinking is a block of its own, whose signature says how it stood in the turn: a client that sends its blocks back goes
on from the sampled tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from verl.rollout.dialects import turns
from verl.rollout.dialects.demands import grammar_of
from verl.rollout.http_sessions import Result
from verl.rollout.session import Reply, Session
from verl.rollout.turn_text import Thinking, joined

Blocks = list[dict[str, Any]]


async def create(session: Session, body: dict[str, Any]) -> Result:
    """`POST /v1/messages`."""
    messages, tools = _dialogue(body)
    choice = body.get("tool_choice") or {}
    kind = choice.get("type")
    kind = "required" if kind == "any" else choice if kind == "tool" else kind
    form = (body.get("output_config") or {}).get("format") or body.get("output_format")
    stops = body.get("stop_sequences") or []
    grammar = grammar_of(session, kind, form, tools, not choice.get("disable_parallel_tool_use"))
    chosen = turns.settings(most=body.get("max_tokens"), stop=stops, grammar=grammar)
    split = turns.thinking(session)
    if body.get("stream"):
        return _stream(session, split, turns.pieces(session, split, messages, tools, chosen), stops)
    texts, reply = await turns.whole(session, split, messages, tools, chosen)
    blocks = [_block(kind, text, split.form) for kind, text in texts.items()]
    return _message([*blocks, *_uses(reply)], *_stopped(session, reply, stops), _usage(reply))


async def count_tokens(session: Session, body: dict[str, Any]) -> Result:
    """`POST /v1/messages/count_tokens`."""
    return {"input_tokens": len(session.prompt_ids(*_dialogue(body)))}


async def _stream(session: Session, split: Thinking, parts: turns.Pieces, stops: list[str]) -> AsyncGenerator[str]:
    def named(kind: str, **data: Any) -> str:
        return turns.event({"type": kind, **data}, kind)

    number, block, begun = 0, "", False
    async with aclosing(parts):
        async for part in parts:
            if not begun:
                begun = True
                usage = {"input_tokens": 0, "output_tokens": 0}  # message_delta says the turn's
                yield named("message_start", message=_message([], None, None, usage))
            kind, piece = ("", "") if isinstance(part, Reply) else part
            if block and kind != block:
                if block == "thinking":
                    signature = {"type": "signature_delta", "signature": split.form}
                    yield named("content_block_delta", index=number, delta=signature)
                yield named("content_block_stop", index=number)
                number += 1
            if kind and kind != block:
                yield named("content_block_start", index=number, content_block=_block(kind, "", ""))
            block = kind
            if not isinstance(part, Reply):
                yield named("content_block_delta", index=number, delta={"type": f"{kind}_delta", kind: piece})
                continue
            for use in _uses(part):
                yield named("content_block_start", index=number, content_block=use | {"input": {}})
                delta = {"type": "input_json_delta", "partial_json": turns.as_json(use["input"])}
                yield named("content_block_delta", index=number, delta=delta)
                yield named("content_block_stop", index=number)
                number += 1
            reason, stop = _stopped(session, part, stops)
            ended = {"stop_reason": reason, "stop_sequence": stop}
            yield named("message_delta", delta=ended, usage=_usage(part))
            yield named("message_stop")


def _block(kind: str, text: str, form: str) -> dict[str, Any]:
    return {"type": kind, kind: text} | ({"signature": form} if kind == "thinking" else {})


def _message(blocks: Blocks, reason: str | None, stop: str | None, usage: dict[str, int]) -> dict[str, Any]:
    about = {"id": turns.new_id("msg"), "type": "message", "role": "assistant", "model": turns.MODEL, "content": blocks}
    return about | {"stop_reason": reason, "stop_sequence": stop, "usage": usage}


def _stopped(session: Session, reply: Reply, stops: list[str]) -> tuple[str, str | None]:
    """Why a turn ended, and the stop string that ended it."""
    if reply.message.get("tool_calls"):
        return "tool_use", None
    if reply.completion.finish_reason != "stop":
        return "max_tokens", None
    stop = turns.stop_found(session, reply.completion, stops)
    return ("end_turn" if stop is None else "stop_sequence"), stop


def _uses(reply: Reply) -> Blocks:
    calls = reply.message.get("tool_calls") or []
    return [
        {"type": "tool_use", "id": call["id"], "name": f["name"], "input": f["arguments"]}
        for call in calls
        for f in [call["function"]]
    ]


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "input_tokens": reply.prompt_tokens,
        "output_tokens": len(reply.completion.token_ids),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


# -- the request -------------------------------------------------------------------------------------------------------


def _dialogue(body: Mapping[str, Any]) -> tuple[turns.Messages, Any]:
    """Messages and tools of a request."""
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise ValueError("messages must be a list of messages")
    system = body.get("system")
    messages = [{"role": "system", "content": _parts(system)}] if system else []
    for message in body["messages"]:
        messages += _turn(message["role"], message["content"])
    tools = None
    if (body.get("tool_choice") or {}).get("type") != "none":
        tools = [_tool(tool) for tool in body.get("tools") or ()]
    return messages, tools or None


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool:
        raise ValueError(f"the tool {tool.get('type')} runs on Anthropic's servers: give tools with an input_schema")
    return turns.function_tool(tool["name"], tool.get("description"), tool["input_schema"])


def _turn(role: str, content: Any) -> Iterator[dict[str, Any]]:
    """The messages that one of Anthropic's stands for: results of tools are messages of their own."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if role == "assistant":
        yield _assistant(blocks)
        return
    results = [block for block in blocks if block["type"] == "tool_result"]
    for block in results:
        yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _parts(block.get("content") or "")}
    if len(results) < len(blocks) or not blocks:
        yield {"role": role, "content": _parts([block for block in blocks if block["type"] != "tool_result"])}


def _assistant(blocks: Blocks) -> dict[str, Any]:
    content, calls = "", []
    for block in blocks:
        if block["type"] == "thinking":
            content += joined(block["thinking"], block.get("signature"))
        elif block["type"] == "text":
            content += block["text"]
        elif block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block["id"], "type": "function", "function": function})
        else:
            raise ValueError(f"a content block {block['type']} cannot be shown to the policy")
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def _parts(content: Any) -> Any:
    return content if isinstance(content, str) else [_part(block) for block in content]


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    if block["type"] != "image":
        raise ValueError(f"a content block {block['type']} cannot be shown to the policy")
    source = block["source"]
    base64 = source["type"] == "base64"
    return {
        "type": "image",
        "image": f"data:{source['media_type']};base64,{source['data']}" if base64 else source["url"],
    }
