"""Requests under way in vLLM, and for how long there were any."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion, not_finite
from verl.trajectory import Media

_BYTES_PER_CHARACTER = 4


@dataclass(slots=True)
class Live:
    """One request: the weight versions it has lived under, its images, and whether it was aborted."""

    id: str
    prompt: list[int]
    versions: list[int]
    media: Media | None = None
    aborted: bool = False

    def completion(self, output: Any) -> Completion:
        """What vLLM's final output says. None: it was aborted before it began.

        RuntimeError when vLLM gave the request up; FloatingPointError when a log-prob is not a number.
        """
        response = output.outputs[0] if output is not None else None
        ids = np.asarray(list(response.token_ids) if response else [], np.int64)
        reason = (response.finish_reason if response else None) or "abort"
        if reason not in ("stop", "length", "abort"):
            raise RuntimeError(f"vLLM gave up request {self.id!r} after {len(ids)} tokens: {reason}")
        values = response.logprobs.logprobs if response is not None and len(ids) else []
        log_probs = np.asarray(values, np.float32)
        if len(log_probs) != len(ids):
            raise RuntimeError(f"vLLM returned {len(log_probs)} log-probs for {len(ids)} tokens")
        if np.isnan(log_probs).any():
            raise not_finite(int(np.isnan(log_probs).argmax()), self.versions[-1])
        metrics = getattr(output, "metrics", None)
        return Completion(
            token_ids=ids,
            log_probs=log_probs,
            finish_reason=reason,
            versions=tuple(self.versions),
            num_preempted=int(getattr(metrics, "num_preemptions", 0) or 0),
        )


def ended_at_seam(
    done: Completion, begun: Sequence[int], stops: Sequence[str], decode: Callable[[list[int]], str]
) -> Completion:
    """A response whose first tokens, `begun`, came with the prompt: cut where a stop string ends that began in those.
    vLLM looks for stop strings only in what it writes itself."""
    reach = _BYTES_PER_CHARACTER * max(map(len, stops))
    before, ids = list(begun[-reach:]), done.token_ids.tolist()
    if any(stop in decode(before) for stop in stops):
        return done
    for count in range(1, min(len(ids), reach) + 1):
        text = decode(before + ids[:count])
        if any(stop in text for stop in stops):
            ids, log_probs = done.token_ids[:count], done.log_probs[:count]
            return replace(done, token_ids=ids, log_probs=log_probs, finish_reason="stop")
    return done


class BusyTime:
    """Time with requests running. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running = 0
        self._since = 0.0
        self._sum = 0.0

    def count(self, change: int) -> None:
        """So many more requests are under way (or fewer)."""
        with self._lock:
            now = time.monotonic()
            if self._running:
                self._sum += now - self._since
            self._since, self._running = now, self._running + change

    def take(self) -> float:
        """Seconds since the last call."""
        with self._lock:
            self.count(0)
            out, self._sum = self._sum, 0.0
            return out
