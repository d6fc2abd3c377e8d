"""Chat Completions of OpenAI's API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from verl.rollout.dialects.demands import grammar_of
from verl.rollout.dialects.log_probs import entries
from verl.rollout.dialects.turns import MODEL, as_json, event, new_id, settings, streamed
from verl.rollout.http_sessions import Result
from verl.rollout.session import Reply, Session

_ROLES = {"developer": "system"}


async def create(session: Session, body: dict[str, Any]) -> Result:
    """`POST /v1/chat/completions`. n turns are branches: each stands behind the same dialogue."""
    messages = body.get("messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, dict) and m.get("role") for m in messages)
    ):
        raise ValueError("messages must be a list of messages, each with a role")
    if body.get("functions"):
        raise ValueError("functions is the form of an older API: give tools")
    messages = [m | {"role": _ROLES.get(m.get("role"), m.get("role"))} for m in messages]
    n = 1 if body.get("n") is None else body["n"]
    if not isinstance(n, int) or not 1 <= n <= 128:
        raise ValueError(f"n must be a number from 1 to 128, not {n!r}")
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    if not all(isinstance(tool, dict) and (tool.get("function") or {}).get("name") for tool in tools or ()):
        raise ValueError('tools must be like {"type": "function", "function": {"name": …, "parameters": …}}')
    form = body.get("response_format") or {}
    form = {**form, **(form.get("json_schema") or {})}
    several = body.get("parallel_tool_calls") is not False
    grammar = grammar_of(session, body.get("tool_choice"), form, tools, several)
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    chosen = settings(most=most, stop=body.get("stop"), grammar=grammar)
    about = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": MODEL}
    if body.get("stream"):
        return _stream(session, body, about, streamed(session, messages, tools, chosen, n))
    replies = await asyncio.gather(*(session.chat(messages, tools, **chosen) for _ in range(n)))
    choices = [{"index": i, **_end(session, body, r), "message": _message(r)} for i, r in enumerate(replies)]
    return about | {"object": "chat.completion", "choices": choices, "usage": _usage(replies)}


async def _stream(
    session: Session, body: Mapping[str, Any], about: dict[str, Any], parts: AsyncGenerator[tuple[int, str | Reply]]
) -> AsyncGenerator[str]:
    about = about | {"object": "chat.completion.chunk"}
    replies: dict[int, Reply] = {}
    begun: set[int] = set()

    def chunk(number: int, delta: dict[str, Any], **more: Any) -> str:
        if number not in begun:
            begun.add(number)
            delta = {"role": "assistant", "content": ""} | delta
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return event(about | {"choices": [choice]})

    async with aclosing(parts):
        async for number, part in parts:
            if not isinstance(part, Reply):
                yield chunk(number, {"content": part})
                continue
            replies[number] = part
            end = _end(session, body, part)
            if calls := _message(part).get("tool_calls"):
                yield chunk(number, {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
            yield chunk(number, {}, logprobs=end["logprobs"], token_ids=end["token_ids"])
            yield chunk(number, {}, finish_reason=end["finish_reason"])
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event(about | {"choices": [], "usage": _usage([replies[number] for number in sorted(replies)])})
    yield event("[DONE]")


def _message(reply: Reply) -> dict[str, Any]:
    """A turn as OpenAI's clients take it: the arguments of calls are text."""
    message = dict(reply.message)
    if calls := message.get("tool_calls"):
        texts = [as_json(call["function"]["arguments"]) for call in calls]
        pairs = zip(calls, texts, strict=True)
        message["tool_calls"] = [call | {"function": call["function"] | {"arguments": text}} for call, text in pairs]
    return message


def _end(session: Session, body: Mapping[str, Any], reply: Reply) -> dict[str, Any]:
    completion = reply.completion
    reason = "stop" if completion.finish_reason == "stop" else "length"
    log_probs = {"content": entries(session, completion), "refusal": None} if body.get("logprobs") else None
    reason = "tool_calls" if reply.message.get("tool_calls") else reason
    return {"finish_reason": reason, "logprobs": log_probs, "token_ids": completion.token_ids.tolist()}


def _usage(replies: list[Reply]) -> dict[str, int]:
    before, after = replies[0].prompt_tokens, sum(len(reply.completion.token_ids) for reply in replies)
    return {"prompt_tokens": before, "completion_tokens": after, "total_tokens": before + after}
