"""The batch call of VLLMEngine: prompts in, a list of dicts with "text" out, without an event loop of the caller's."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from verl.config.matching import nearest
from verl.engine.rollout.base import Completion, SamplingParams

if TYPE_CHECKING:
    from verl.engine.rollout.vllm.engine import VLLMEngine

# A text, texts, token ids, or conversations (lists of {"role", "content"}).
Prompts = str | Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[Mapping[str, Any]]]

_NAMES = sorted({f.name for f in fields(SamplingParams)} - {"start", "call"} | {"n", "include_stop_str_in_output"})


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """What the dict of the batch call asks for: `sampling` of each response, n responses per prompt, a seed or None.

    keep_stop: a stop string that ended a response stays in its text.
    """

    sampling: SamplingParams
    n: int = 1
    seed: int | None = None
    keep_stop: bool = False


def batch_sampling(given: Mapping[str, Any] | None) -> BatchSampling:
    """The dict of the batch call, read. ValueError for unknown names."""
    values = dict(given or {})
    for name in values:
        if name not in _NAMES:
            hint = nearest(name, _NAMES) or f"; known: {', '.join(_NAMES)}"
            raise ValueError(f"sampling_params has no {name!r}{hint}")
    n, seed = int(values.pop("n", None) or 1), values.pop("seed", None)
    if n < 1:
        raise ValueError(f"sampling_params: n={n} must be at least 1")
    stop = values.pop("stop", None) or ()
    values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    values["stop_token_ids"] = tuple(values.pop("stop_token_ids", None) or ())
    values["max_tokens"] = int(values.get("max_tokens") or 512)
    keep_stop = bool(values.pop("include_stop_str_in_output", False))
    return BatchSampling(SamplingParams(**values), n, None if seed is None else int(seed), keep_stop)


class BatchCall:
    """Samples responses to lists of prompts. `tokenizer`: of transformers."""

    def __init__(self, tokenizer: Any, seed: int):
        self._tokenizer = tokenizer
        self._seed = seed
        self._calls = 0

    async def run(
        self, engine: VLLMEngine, prompts: Prompts, sampling_params: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        """See `VLLMEngine.generate`."""
        settings = batch_sampling(sampling_params)
        call, self._calls = self._calls, self._calls + 1
        base = f"{self._seed}/call {call}" if settings.seed is None else str(settings.seed)
        rows = [self._ids(prompt) for prompt in as_list(prompts)]

        async def respond(number: int, index: int) -> Completion:
            digest = hashlib.blake2b(f"{base}/{number}/{index}".encode(), digest_size=8).digest()
            seeded = replace(settings.sampling, seed=int.from_bytes(digest, "little") >> 1)
            return await engine.sample(rows[number], seeded, request_id=f"batch {call}/{number}#{index}")

        places = [(number, index) for number in range(len(rows)) for index in range(settings.n)]
        tasks = [asyncio.ensure_future(respond(*place)) for place in places]
        try:
            completions = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        stops = () if settings.keep_stop else settings.sampling.stop
        return [self._response(*pair, stops) for pair in zip(places, completions, strict=True)]

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        if len(prompt) and isinstance(prompt[0], Mapping):
            ids = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True)
            return list(ids["input_ids"] if isinstance(ids, Mapping) else ids)
        return [int(i) for i in prompt]

    def _response(self, place: tuple[int, int], completion: Completion, stops: Sequence[str]) -> dict[str, Any]:
        ids = completion.token_ids.tolist()
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        if completion.finish_reason == "stop":
            text = text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]
        return {
            "text": text,
            "token_ids": ids,
            "log_probs": completion.log_probs.tolist(),
            "finish_reason": completion.finish_reason,
            "prompt_index": place[0],
            "index": place[1],
        }


def as_list(prompts: Any) -> list[Any]:
    """One prompt or several, as several. ValueError for what is neither."""
    items = [prompts] if isinstance(prompts, str) else list(prompts)
    if not all(isinstance(prompt, Sequence) for prompt in items):
        raise ValueError("generate: prompts are texts, lists of token ids, or lists of messages")
    return items
