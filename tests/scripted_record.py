"""A sampler, and a record whose calls a function of the test answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from verl.engine.rollout.base import Completion, OnTokens, RolloutEngine, SamplingParams
from verl.rollout.record import Place, Record, SegmentRecord
from verl.rollout.session import Session


class ScriptedEngine(RolloutEngine):
    """A sampler that holds nothing: a test gives it `version` and `generate`."""

    def abort(self, request_ids=None): ...
    def sleep(self): ...
    def wake(self): ...


class ScriptedRecord(Record):
    """`send` gets the ids, the settings and the images of a call, and gives its completion."""

    def __init__(self, send: Callable[[Any, SamplingParams, Any], Awaitable[Completion]]):
        super().__init__()
        self.send = send

    async def call(
        self, place: Place, sampling: SamplingParams, on_tokens: OnTokens | None = None
    ) -> tuple[Completion, SegmentRecord]:
        self.begin(place)
        completion = await self.send(place.ids(), sampling, place.shown)
        for token in completion.token_ids.tolist() if on_tokens is not None else ():
            on_tokens([token])
        return completion, self.add(place, completion)


def written(session: Session) -> list[SimpleNamespace]:
    """Context, tokens, mask and log-probs of each segment of a session."""
    names = ("tokens", "mask", "log_probs")
    return [
        SimpleNamespace(context=segment.context, **dict(zip(names, segment.response(), strict=True)))
        for segment in session.segments()
    ]
