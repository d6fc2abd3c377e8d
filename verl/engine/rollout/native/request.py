"""What the sampler knows of one response, and of the prompt that a group of responses shares."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np

from verl.engine.rollout.base import Completion, SamplingParams


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
