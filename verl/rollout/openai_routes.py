"""What the paths of a session's URL answer, in the formats of OpenAI's API.

The run decides how is sampled: of what a request says only `max_tokens`, `stop` and the tools count.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion

MODEL = "policy"
Result = dict[str, Any]
Handler = Callable[[Any, dict[str, Any]], Awaitable[Result]]


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


ROUTES: dict[str, tuple[str, Handler]] = {
    "v1/chat/completions": ("POST", _chat),
    "v1/completions": ("POST", _completion),
    "v1/models": ("GET", _models),
    "inference/v1/generate": ("POST", _tokens),
    "v1/inference/v1/generate": ("POST", _tokens),
}
"""Path → the method that it takes, and what answers it."""
