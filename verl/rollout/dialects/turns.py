"""What the dialects share: which settings of a request take effect, a turn as it is sampled, and the form of
streams."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from verl.engine.rollout.base import Completion
from verl.rollout.event_loop import spawn
from verl.rollout.session import Reply, Session
from verl.rollout.turn_text import Thinking

MODEL = "policy"
Messages = list[dict[str, Any]]


def settings(*, most: Any, stop: Any, grammar: str = "") -> dict[str, Any]:
    """The settings of a request that take effect: most tokens of the turn, stop strings, what it has to follow.
    ValueError for a number of tokens that is none."""
    if most and (not isinstance(most, int) or most < 0):
        raise ValueError(f"the most tokens of a turn must be a number above 0, not {most!r}")
    return {name: value for name, value in (("max_tokens", most), ("stop", stop), ("grammar", grammar)) if value}


async def streamed(
    session: Session, messages: Messages, tools: Any, chosen: Mapping[str, Any], n: int = 1
) -> AsyncGenerator[tuple[int, str | Reply]]:
    """The content of n turns in pieces, each with the number of its turn, and the whole turn after its last piece."""
    queue: asyncio.Queue[tuple[int, str | asyncio.Task[Reply]]] = asyncio.Queue()

    def ask(number: int) -> asyncio.Task[Reply]:
        turn = session.chat(messages, tools, on_text=lambda text: queue.put_nowait((number, text)), **chosen)
        task = spawn(turn)
        task.add_done_callback(lambda done: queue.put_nowait((number, done)))
        return task

    turns = [ask(number) for number in range(n)]
    try:
        while n:
            number, part = await queue.get()
            if isinstance(part, asyncio.Task):
                n -= 1
                yield number, await part
            else:
                yield number, part
    finally:
        for task in turns:
            task.cancel()


Pieces = AsyncGenerator[tuple[str, str] | Reply]
"""A turn as (`thinking` or `text`, what is new of it), then the whole turn."""


def thinking(session: Session) -> Thinking:
    """What splits the next turn."""
    return Thinking(open=session.setup.boundaries.opens_thinking)


async def pieces(
    session: Session, split: Thinking, messages: Messages, tools: Any, chosen: Mapping[str, Any]
) -> Pieces:
    """A turn, split as it comes."""
    async with aclosing(streamed(session, messages, tools, chosen)) as parts:
        async for _, part in parts:
            ended = isinstance(part, Reply)
            for piece in split.feed("" if isinstance(part, Reply) else part, last=ended):
                yield piece
            if isinstance(part, Reply):
                yield part


async def whole(
    session: Session, split: Thinking, messages: Messages, tools: Any, chosen: Mapping[str, Any]
) -> tuple[dict[str, str], Reply]:
    """The thinking and the text of a turn by these names, and the turn."""
    reply = await session.chat(messages, tools, **chosen)
    return dict(split.feed(reply.message["content"], last=True)), reply


def event(data: Any, name: str = "") -> str:
    """A server-sent event; data: what is written as JSON, or a text."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


def new_id(kind: str) -> str:
    """An id of its own."""
    return f"{kind}_{secrets.token_hex(12)}"


def as_json(arguments: Any) -> str:
    """The arguments of a call."""
    return json.dumps(arguments, ensure_ascii=False)


def function_tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool in the form that templates take."""
    about = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in about.items() if value is not None}}


def stop_found(session: Session, completion: Completion, stops: Sequence[str]) -> str | None:
    """The stop string of a request that ended a turn."""
    if completion.finish_reason != "stop" or not stops:
        return None
    text = session.setup.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=False)
    return next((stop for stop in stops if stop in text), None)
