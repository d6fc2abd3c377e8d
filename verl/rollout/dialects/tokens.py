"""Paths of servers of open models: the model, token ids in and out, what the tokenizer makes of a text or a
dialogue."""

from __future__ import annotations

from typing import Any

import numpy as np

from verl.rollout.dialects.turns import MODEL, new_id, settings
from verl.rollout.http_sessions import NotFound, Result
from verl.rollout.session import Session


async def models(session: Session, body: dict[str, Any]) -> Result:
    """`GET /v1/models`."""
    return {"object": "list", "data": [await model(session, {"id": MODEL})]}


async def model(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    """`GET /v1/models/ID`."""
    if body["id"] != MODEL:
        raise NotFound(f"no model {body['id']}: the run's model is {MODEL}, whatever name a request gives")
    about = {"id": MODEL, "object": "model", "created": 0, "owned_by": "verl"}
    return about | {"max_model_len": session.setup.longest}


async def generate(session: Session, body: dict[str, Any]) -> Result:
    """`POST /inference/v1/generate`: vLLM's interface of token ids."""
    if body.get("stream"):
        raise ValueError("stream is not supported here: ask without it")
    asked = body.get("sampling_params") or {}
    if asked.get("n") not in (None, 1):
        raise ValueError("n must be 1 here: ask several times")
    chosen = settings(most=asked.get("max_tokens"), stop=asked.get("stop"))
    (ids,) = prompts_of(session, body.get("token_ids"))
    completion = await session.generate(ids, session.fitting(session.place(ids), chosen))
    pairs = zip(completion.token_ids.tolist(), completion.log_probs.tolist(), strict=True)
    choice = {
        "index": 0,
        "finish_reason": "stop" if completion.finish_reason == "stop" else "length",
        "logprobs": {"content": [{"token": f"token_id:{i}", "logprob": value} for i, value in pairs]},
        "token_ids": completion.token_ids.tolist(),
    }
    usage = {"prompt_tokens": len(ids), "completion_tokens": len(completion.token_ids)}
    return {"id": new_id("gen"), "object": "generate", "model": MODEL, "choices": [choice], "usage": usage}


async def tokenize(session: Session, body: dict[str, Any]) -> Result:
    """`POST /tokenize`: of a prompt, or of the dialogue that the next turn would be sampled after."""
    if body.get("messages"):
        ids = session.prompt_ids(body["messages"], body.get("tools")).tolist()
    else:
        special = bool(body.get("add_special_tokens", True))
        ids = session.setup.tokenizer(body["prompt"], add_special_tokens=special)["input_ids"]
    return {"count": len(ids), "max_model_len": session.setup.longest, "tokens": ids, "token_strs": None}


async def detokenize(session: Session, body: dict[str, Any]) -> Result:
    """`POST /detokenize`."""
    return {"prompt": session.setup.tokenizer.decode(body["tokens"], skip_special_tokens=False)}


def prompts_of(session: Session, prompt: Any) -> list[np.ndarray]:
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
