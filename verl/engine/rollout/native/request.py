"""What the sampler knows of one response and of the prompt that a group of responses shares; when a response is over."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion, SamplingParams

_BYTES_PER_CHARACTER = 4


@dataclass(eq=False, slots=True)
class Group:
    """One prompt in the cache, and how many unfinished responses need it."""

    key: str
    prompt: np.ndarray
    slot: int = -1
    computed: int = 0
    users: int = 0
    last_used: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt)


@dataclass(eq=False, slots=True)
class Request:
    """One response being sampled. `number` is the order of submission, which decides all scheduling."""

    id: str
    number: int
    group_key: str
    prompt: np.ndarray
    sampling: SamplingParams
    future: asyncio.Future[Completion] | None
    max_tokens: int
    stop_ids: frozenset[int]
    group: Group | None = None
    slot: int = -1
    computed: int = 0  # response tokens whose keys and values are in the cache
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_preempted: int = 0
    started: float = field(default_factory=time.monotonic)
    ready: bool = False  # everything but the newest token is in the cache: decode can go on
    reason: str = ""

    @property
    def position(self) -> int:
        """Position of the newest token in prompt + response."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def response(self) -> list[int]:
        """The response's tokens, those that the prompt ends with included."""
        start = self.sampling.start
        return [*self.prompt[len(self.prompt) - start :].tolist(), *self.tokens] if start else self.tokens

    def completion(self) -> Completion:
        return Completion(
            token_ids=np.array(self.tokens, np.int64),
            log_probs=np.array(self.log_probs, np.float32),
            finish_reason=self.reason,
            versions=tuple(self.versions),
            num_preempted=self.num_preempted,
            started=self.started,
            finished=time.monotonic(),
        )


class Stopper:
    """Decides after each token. Stop strings need the tokenizer; the string stays in the response."""

    def __init__(self, tokenizer: Any | None):
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def reason(self, request: Request) -> str:
        """ "stop", "length", or "" to go on."""
        token = request.tokens[-1]
        if token in request.stop_ids:
            return "stop"
        stops = request.sampling.stop
        if stops and self._may_end(token, stops) and self._ended(request.response, stops):
            return "stop"
        return "length" if len(request.tokens) >= request.max_tokens else ""

    def check(self, stops: tuple[str, ...]) -> None:
        """Raises ValueError for stop strings that cannot be looked for."""
        if stops and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give NativeEngine one, or use stop_token_ids")
        if any(not stop for stop in stops):
            raise ValueError("an empty stop string would end every response at once: remove it")

    def _may_end(self, token: int, stops: tuple[str, ...]) -> bool:
        """Whether a stop string can end inside this token. Cheap; a part of a character may end anything."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decode([token])
        return not piece or "\ufffd" in piece or any(stop[-1] in piece for stop in stops)

    def _ended(self, tokens: list[int], stops: tuple[str, ...]) -> bool:
        """Whether the text of the last tokens holds a stop string. As many tokens as its bytes always suffice."""
        window = _BYTES_PER_CHARACTER * (max(map(len, stops)) + 1)
        text = self._decode(tokens[-window:])
        return any(stop in text for stop in stops)

    def _decode(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))
