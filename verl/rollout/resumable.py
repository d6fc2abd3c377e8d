"""Requests that outlive a change of weights.

Below the attempts of a run is one `ResumableGeneration`: `pause` ends every request with its partial output kept; once
the weights are replaced, `resume` lets each go on from prompt + partial output, with the same seed and the positions it
had reached. The caller gets one completion that names every version that wrote a part of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion, RolloutEngine, SamplingParams, first_routes

_ABORT_AGAIN_S = 1.0


class ResumableGeneration:
    """Requests under way in one engine. All calls are made on one event loop."""

    def __init__(self, engine: RolloutEngine, clock: Callable[[], float] = time.monotonic):
        self.engine = engine
        self._clock = clock
        self._under_way: set[str] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._pauses = 0
        self._busy_since = 0.0
        self._busy: list[tuple[float, float]] = []

    async def generate(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
        **options: Any,
    ) -> Completion:
        """`RolloutEngine.generate`, carried on through any number of pauses; `options` are handed on to it."""
        parts: list[Completion] = []
        num_sampled = 0
        while True:
            await self._open.wait()
            pauses = self._pauses
            ids, remaining, shared = prompt_ids, sampling, group
            if num_sampled:
                ids = np.concatenate([np.asarray(prompt_ids, np.int64), *(part.token_ids for part in parts)])
                room, start = sampling.max_tokens - num_sampled, sampling.start + num_sampled
                remaining, shared = replace(sampling, max_tokens=room, start=start), None
            name = f"{request_id}~{len(parts)}" if parts else request_id
            part = await self._ask(ids, remaining, request_id=name, group=shared, **options)
            parts.append(part)
            num_sampled += len(part.token_ids)
            interrupted = part.finish_reason == "moved" or (part.finish_reason == "abort" and pauses != self._pauses)
            if not interrupted or num_sampled >= sampling.max_tokens:
                completion = _joined(parts, "length" if interrupted else part.finish_reason)
                # The text is the whole response's; of a response that began elsewhere these are not all its tokens.
                return replace(completion, text=None) if sampling.start else completion

    async def _ask(self, prompt_ids: Any, sampling: SamplingParams, *, request_id: str, **how: Any) -> Completion:
        if not self._under_way:
            self._busy_since = self._clock()
            self._empty.clear()
        self._under_way.add(request_id)
        try:
            return await self.engine.generate(prompt_ids, sampling, request_id=request_id, **how)
        finally:
            self._under_way.discard(request_id)
            if not self._under_way:
                self._busy.append((self._busy_since, self._clock()))
                self._empty.set()

    async def pause(self) -> int:
        """End every request, partial output kept; returns how many there were. Later ones wait for `resume`."""
        self._open.clear()
        self._pauses += 1
        stopped = len(self._under_way)
        while self._under_way:
            self.engine.abort(list(self._under_way))
            try:
                await asyncio.wait_for(self._empty.wait(), _ABORT_AGAIN_S)
            except TimeoutError:
                continue  # a request that reached the engine after the abort is aborted now
        return stopped

    async def resume(self) -> None:
        """Let requests go on with the weights that the engine holds now."""
        self._open.set()

    async def busy(self) -> list[tuple[float, float]]:
        """Spans of the clock in which the engine had requests, since the last call; one in progress is cut."""
        spans, self._busy = self._busy, []
        if self._under_way:
            now = self._clock()
            spans.append((self._busy_since, now))
            self._busy_since = now
        return spans


def _joined(parts: list[Completion], reason: str) -> Completion:
    """One completion out of its parts; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    sets = [part.sampling_mask for part in parts]
    if any(recorded is not None for recorded in sets):
        whole = [np.full(len(part.token_ids), b"", object) for part in parts]
        sets = [other if recorded is None else recorded for recorded, other in zip(sets, whole, strict=True)]
    routed = [part.routed_experts for part in parts if part.routed_experts is not None]
    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        log_probs=np.concatenate([part.log_probs for part in parts]),
        finish_reason=reason,
        versions=tuple(sorted({v for part in parts if len(part.token_ids) for v in part.versions})),
        num_preempted=sum(part.num_preempted for part in parts),
        parts=len(parts),
        prefilled=sum(part.prefilled for part in parts),
        text=parts[-1].text,
        routed_experts=first_routes(routed, len(routed[-1])) if routed else None,
        sampling_mask=None if sets[0] is None else np.concatenate(sets),  # type: ignore[arg-type]
    )
