"""What the paths of a session's URL answer, in the formats of OpenAI's API.

The run decides how tokens are sampled: of a request only `max_tokens`, `stop` and the tools count.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion
from verl.rollout.tools.parsers import before_stop
from verl.rollout.tools.toolbox import warn_once

MODEL = "policy"
Result = dict[str, Any] | list[dict[str, Any]]
"""A body of JSON, or the parts of a stream."""
Handler = Callable[[Any, dict[str, Any]], Awaitable[Result]]


def _checked(session: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a request that take effect. ValueError for those that would be silently wrong."""
    if body.get("echo"):
        raise ValueError("echo is not supported: ask without it")
    if any(body.get(name, 1) not in (None, 1) for name in ("n", "best_of")):
        raise ValueError("n must be 1: a trajectory is one line of tokens")
    if (body.get("response_format") or {}).get("type", "text") != "text":
        raise ValueError("response_format is not supported: what the policy writes is not constrained")
    choice = body.get("tool_choice")
    if choice == "required":
        session.counts["required_tool_choices"] += 1
        effect = "taken as auto: the policy decides whether it calls (counted in agent/required_tool_choices)"
        warn_once("tool_choice=required", "auto", effect, of="request")
    elif choice not in (None, "auto", "none"):
        raise ValueError("tool_choice must be auto, required or none: the policy decides whether it calls")
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    return {name: v for name, v in (("max_tokens", most), ("stop", body.get("stop"))) if v}


async def _chat(session: Any, body: dict[str, Any]) -> Result:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ValueError("messages must be a list of messages")
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    reply = await session.chat(messages, tools, **_checked(session, body))
    message, completion = dict(reply.message), reply.completion
    reason = _reason(completion)
    if "tool_calls" in message:
        message["tool_calls"], reason = [_as_text(call) for call in message["tool_calls"]], "tool_calls"
    log_probs = None
    if body.get("logprobs"):
        log_probs = {"content": _log_probs(session, completion), "refusal": None}
    choice = _choice(0, completion, reason, log_probs, message=message)
    return _result("chat.completion", body, [(reply.prompt_tokens, completion, choice)])


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}


async def _completion(session: Any, body: dict[str, Any]) -> Result:
    prompts, settings = _prompts(session, body.get("prompt")), _checked(session, body)
    count = body.get("logprobs")
    log_probs = count is not None and count is not False  # 0 asks for those of the sampled tokens
    params = [session.fitting(session.place(ids), settings) for ids in prompts]
    completions = await asyncio.gather(*map(session.generate, prompts, params))
    sampled = []
    for number, (ids, completion) in enumerate(zip(prompts, completions, strict=True)):
        text = session.setup.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        entries = _legacy_log_probs(session, completion) if log_probs else None
        text = before_stop(text, completion, settings.get("stop"))
        choice = _choice(number, completion, _reason(completion), entries, text=text)
        sampled.append((len(ids), completion, choice))
    return _result("text_completion", body, sampled)


def _prompts(session: Any, prompt: Any) -> list[np.ndarray]:
    """The ids, each int64 [P], of a text, of ids, or of a list of such. ValueError for anything else."""
    several = isinstance(prompt, list) and not all(type(i) is int for i in prompt)
    prompts = []
    for ids in prompt if several else [prompt]:
        if isinstance(ids, str):
            ids = session.setup.tokenizer(ids, add_special_tokens=False)["input_ids"]
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise ValueError("prompt must be a text, a list of token ids, or a list of such, none empty")
        prompts.append(np.array(ids, np.int64))
    return prompts


async def _tokens(session: Any, body: dict[str, Any]) -> Result:
    if body.get("stream"):
        raise ValueError("stream is not supported here: ask without it")
    settings = _checked(session, body.get("sampling_params") or {})
    (ids,) = _prompts(session, body.get("token_ids"))
    completion = await session.generate(ids, session.fitting(session.place(ids), settings))
    pairs = zip(completion.token_ids.tolist(), completion.log_probs.tolist(), strict=True)
    log_probs = {"content": [{"token": f"token_id:{i}", "logprob": value} for i, value in pairs]}
    choice = _choice(0, completion, _reason(completion), log_probs)
    return _result("generate", body, [(len(ids), completion, choice)])


async def _models(session: Any, body: dict[str, Any]) -> Result:
    model = {"id": MODEL, "object": "model", "owned_by": "verl", "max_model_len": session.setup.longest}
    return {"object": "list", "data": [model]}


def _reason(done: Completion) -> str:
    return "stop" if done.finish_reason == "stop" else "length"


# ------------------------------------------------------------------------------------------------------- log-probs


@cache
def _bytes_of_characters() -> dict[str, int]:
    """What the characters of a byte-level vocabulary stand for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def _bytes(tokenizer: Any, token: int, text: str) -> list[int]:
    """The bytes of a token, which alone may be no text."""
    if "\ufffd" not in text:
        return list(text.encode())
    piece, table = tokenizer.convert_ids_to_tokens(token), _bytes_of_characters()
    if piece.startswith("<0x"):
        return [int(piece[1:-1], 16)]
    return [table[c] for c in piece] if all(c in table for c in piece) else list(text.encode())


def _log_probs(session: Any, done: Completion) -> list[dict[str, Any]]:
    """Of every sampled token, the one that ends the turn too."""
    tokenizer, entries = session.setup.tokenizer, []
    for token, value in zip(done.token_ids.tolist(), done.log_probs.tolist(), strict=True):
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        data = _bytes(tokenizer, token, text)
        entries.append({"token": text, "logprob": value, "bytes": data, "top_logprobs": []})
    return entries


def _legacy_log_probs(session: Any, done: Completion) -> dict[str, Any]:
    """The same in the form of /completions."""
    entries = _log_probs(session, done)
    texts, values = [entry["token"] for entry in entries], [entry["logprob"] for entry in entries]
    offsets = np.cumsum([0, *map(len, texts)])[:-1].tolist()
    top = [{text: value} for text, value in zip(texts, values, strict=True)]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


# ---------------------------------------------------------------------------------------------------------- bodies


def _choice(
    number: int, done: Completion, reason: str, log_probs: dict[str, Any] | None, **content: Any
) -> dict[str, Any]:
    ids = done.token_ids.tolist()
    return {"index": number, **content, "finish_reason": reason, "logprobs": log_probs, "token_ids": ids}


def _result(kind: str, body: Mapping[str, Any], sampled: Sequence[tuple[int, Completion, dict[str, Any]]]) -> Result:
    """The body, or the parts of the stream that was asked for. sampled: tokens of the prompt, completion, choice."""
    before = sum(size for size, _, _ in sampled)
    after = sum(len(completion.token_ids) for _, completion, _ in sampled)
    usage = {"prompt_tokens": before, "completion_tokens": after, "total_tokens": before + after}
    about = {"id": secrets.token_hex(8), "object": kind, "created": int(time.time()), "model": MODEL}
    choices = [choice for _, _, choice in sampled]
    if not body.get("stream"):
        return about | {"choices": choices, "usage": usage}
    if kind == "chat.completion":
        about["object"] = "chat.completion.chunk"
    parts = [about | {"choices": [part]} for choice in choices for part in _streamed(choice)]
    with_usage = (body.get("stream_options") or {}).get("include_usage")
    return [*parts, about | {"choices": [], "usage": usage}] if with_usage else parts


def _streamed(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """A choice as the parts of a stream: the whole turn, then why it ended."""
    turn = choice | {"finish_reason": None}
    end = {"index": choice["index"], "finish_reason": choice["finish_reason"], "logprobs": None}
    if (message := turn.pop("message", None)) is None:
        return [turn, end | {"text": ""}]
    if "tool_calls" in message:
        message = message | {"tool_calls": [{"index": n, **c} for n, c in enumerate(message["tool_calls"])]}
    return [turn | {"delta": message}, end | {"delta": {}}]


ROUTES: dict[str, tuple[str, Handler]] = {
    "v1/chat/completions": ("POST", _chat),
    "v1/completions": ("POST", _completion),
    "v1/models": ("GET", _models),
    "inference/v1/generate": ("POST", _tokens),
    "v1/inference/v1/generate": ("POST", _tokens),
}
"""Path → the method that it takes, and what answers it."""
