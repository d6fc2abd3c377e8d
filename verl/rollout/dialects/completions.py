"""Completions of OpenAI's API: prompts that are texts or token ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from verl.rollout.dialects.log_probs import legacy_entries
from verl.rollout.dialects.tokens import prompts_of
from verl.rollout.dialects.turns import MODEL, event, new_id, settings
from verl.rollout.http_sessions import Result
from verl.rollout.session import Session
from verl.rollout.tools.parsers import before_stop


async def create(session: Session, body: dict[str, Any]) -> Result:
    """`POST /v1/completions`: a prompt, or a list of them."""
    if body.get("echo"):
        raise ValueError("echo is not supported: ask without it")
    if any(body.get(name, 1) not in (None, 1) for name in ("n", "best_of")):
        raise ValueError("n must be 1 here: ask with a list of prompts, or chat completions")
    prompts = prompts_of(session, body.get("prompt"))
    chosen = settings(most=body.get("max_tokens"), stop=body.get("stop"))
    count = body.get("logprobs")
    log_probs = count is not None and count is not False  # 0 asks for those of the sampled tokens
    params = [session.fitting(session.place(ids), chosen) for ids in prompts]
    completions = await asyncio.gather(*map(session.generate, prompts, params))
    choices = []
    for number, completion in enumerate(completions):
        text = session.setup.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        choices.append(
            {
                "index": number,
                "text": before_stop(text, completion, chosen.get("stop")),
                "finish_reason": "stop" if completion.finish_reason == "stop" else "length",
                "logprobs": legacy_entries(session, completion) if log_probs else None,
                "token_ids": completion.token_ids.tolist(),
            }
        )
    before, after = sum(map(len, prompts)), sum(len(completion.token_ids) for completion in completions)
    usage = {"prompt_tokens": before, "completion_tokens": after, "total_tokens": before + after}
    about = {"id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": MODEL}
    if body.get("stream"):
        with_usage = (body.get("stream_options") or {}).get("include_usage")
        return _stream(about, choices, usage if with_usage else None)
    return about | {"choices": choices, "usage": usage}


async def _stream(
    about: dict[str, Any], choices: list[dict[str, Any]], usage: dict[str, int] | None
) -> AsyncGenerator[str]:
    """Each text in one piece, then why it ended."""
    for choice in choices:
        end = {"index": choice["index"], "text": "", "logprobs": None}
        yield event(about | {"choices": [choice | {"finish_reason": None}]})
        yield event(about | {"choices": [end | {"finish_reason": choice["finish_reason"]}]})
    if usage is not None:
        yield event(about | {"choices": [], "usage": usage})
    yield event("[DONE]")
