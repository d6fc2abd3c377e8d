"""The batch call of VLLMEngine: prompts in, a list of dicts with "text" out, without an event loop of the caller's."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl.engine.rollout.base import Completion
from verl.engine.rollout.vllm.arguments import batch_sampling

if TYPE_CHECKING:
    from verl.engine.rollout.vllm_engine import VLLMEngine

Prompts = str | Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[Mapping[str, Any]]]
"""A text, texts, token ids, or conversations (lists of {"role", "content"})."""


def end_token_ids(model_config: Any, path: str, tokenizer: Any) -> list[int]:
    """Every id that ends a response: the generation config's, the model's and the tokenizer's."""
    from transformers import GenerationConfig

    try:
        generation: Any = GenerationConfig.from_pretrained(path)
    except OSError:
        generation = None
    found: list[int] = []
    for source in (generation, model_config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found += ids if isinstance(ids, list) else [ids] if ids is not None else []
    return sorted(set(found))


class BatchCall:
    """Responses a list of prompts. `tokenizer`: of transformers."""

    def __init__(self, tokenizer: Any, seed: int):
        self._tokenizer = tokenizer
        self._seed = seed
        self._calls = 0

    async def run(
        self, engine: VLLMEngine, prompts: Prompts, sampling_params: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        """See `VLLMEngine.generate`."""
        asked = batch_sampling(sampling_params)
        call, self._calls = self._calls, self._calls + 1
        base = f"{self._seed}/call {call}" if asked.seed is None else str(asked.seed)
        rows = [self._ids(prompt) for prompt in as_list(prompts)]

        async def one(number: int, index: int) -> Completion:
            digest = hashlib.blake2b(f"{base}/{number}/{index}".encode(), digest_size=8).digest()
            own = replace(asked.sampling, seed=int.from_bytes(digest, "little") >> 1)
            name = f"batch {call}/{number}#{index}"
            return await engine.sample(rows[number], own, request_id=name)

        places = [(number, index) for number in range(len(rows)) for index in range(asked.n)]
        tasks = [asyncio.ensure_future(one(*place)) for place in places]
        try:
            done = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        stops = () if asked.keep_stop else asked.sampling.stop
        return [
            self._response(place, completion, stops) for place, completion in zip(places, done, strict=True)
        ]

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        if len(prompt) and isinstance(prompt[0], Mapping):
            ids = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True)
            return list(ids["input_ids"] if isinstance(ids, Mapping) else ids)
        return [int(i) for i in prompt]

    def _response(
        self, place: tuple[int, int], completion: Completion, stops: Sequence[str]
    ) -> dict[str, Any]:
        ids = completion.token_ids.tolist()
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return {
            "text": without_stop(text, stops) if completion.finish_reason == "stop" else text,
            "token_ids": ids,
            "log_probs": completion.log_probs.tolist(),
            "finish_reason": completion.finish_reason,
            "prompt_index": place[0],
            "index": place[1],
        }


def without_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of the stop strings that is in it."""
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return text[: min(places)] if places else text


def as_list(prompts: Any) -> list[Any]:
    """One prompt or several, as several. ValueError for what is neither."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or any(not isinstance(p, str | Sequence) for p in prompts):
        raise ValueError(
            "generate: prompts are texts, lists of token ids, or lists of messages; one request of the asynchronous "
            "interface is generate(prompt_ids, sampling, request_id=...)"
        )
    return list(prompts)
