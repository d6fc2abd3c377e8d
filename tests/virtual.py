"""Time that passes only when everybody waits, and a sampling engine that lives in it.

`VirtualLoop` is an asyncio event loop whose clock jumps to the next timer instead of waiting for it: hours of
sampling take milliseconds, in the same order every time. `TimedEngine` is a `RolloutEngine` in that time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion, RolloutEngine


class _Jumping(selectors.SelectSelector):
    """Never waits: moves the clock on instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("everything waits and no timer is set: this would hang")
        if not events and timeout is not None and timeout > 0:
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Use as `asyncio.Runner(loop_factory=VirtualLoop)`."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class TimedEngine(RolloutEngine):
    """Writes a token of an answer every `token_s` seconds, at most `slots` answers at a time.

    `length(seed)` is how many tokens an answer has. Token j is a function of the answer's seed and j alone, so an
    interrupted answer must come out as if nothing had happened; its log-prob tells the version that wrote it.
    """

    def __init__(self, length: Callable[[int], int], *, token_s: float = 1.0, slots: int = 10**6):
        self._length = length
        self._token_s = token_s
        self._slots = asyncio.Semaphore(slots)
        self._aborted: set[str] = set()
        self._version = 0
        self.under_way: set[str] = set()
        self.started: list[tuple[float, str, int]] = []
        self.groups: dict[str, tuple[str | None, int]] = {}

    async def generate(self, prompt_ids, sampling, *, request_id, group=None, session=None, media=None):
        assert request_id not in self.under_way, "request ids must be unique"
        loop = asyncio.get_running_loop()
        self.under_way.add(request_id)
        self.groups[request_id] = (group, sampling.start)
        total, tokens, versions = self._length(sampling.seed), [], []
        assert sampling.start < total, "nothing is left to write"
        try:
            async with self._slots:
                self.started.append((loop.time(), request_id, self._version))
                reason = ""
                while not reason:
                    await asyncio.sleep(self._token_s)
                    if request_id in self._aborted:
                        reason = "abort"
                        break
                    tokens.append(self.token(sampling.seed, sampling.start + len(tokens)))
                    versions.append(self._version)
                    if sampling.start + len(tokens) == total:
                        reason = "stop"
                    elif len(tokens) == sampling.max_tokens:
                        reason = "length"
        finally:
            self.under_way.discard(request_id)
            self._aborted.discard(request_id)
        logs = np.array([self.log_prob(v) for v in versions], np.float32)
        kept = tuple(sorted(set(versions))) or (self._version,)
        return Completion(np.array(tokens, np.int64), logs, reason, kept)

    @staticmethod
    def token(seed: int, position: int) -> int:
        """Token number `position` of the answer with this seed."""
        return (seed * 31 + position * 7919) % 1009

    @staticmethod
    def log_prob(version: int) -> float:
        """What tokens of a version carry."""
        return -0.5 - version / 64

    def abort(self, request_ids=None):
        self._aborted |= self.under_way & set(self.under_way if request_ids is None else request_ids)

    def load_weights(self, weights, version):
        assert not self.under_way, "weights may change only while nothing is under way"
        self._version = version

    def sleep(self):
        return None

    def wake(self):
        return None

    @property
    def version(self) -> int:
        return self._version
