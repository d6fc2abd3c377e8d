"""What every sampling engine offers: tokens in, tokens out, request by request.

The agent loop sits on top and is the only thing that knows of turns and tools. Everything here is
torch-free, so that the driver can hold it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one response is drawn. temperature 0 is greedy; top_k ≤ 0, top_p 1, min_p 0, penalty 1 are off.

    `max_tokens` is the budget of this call. `stop` are strings looked for in the decoded response (kept in
    the output, as are end tokens). `seed` and the token's position decide every draw: a response does not
    depend on what else is being sampled (beyond rounding). `start` is how many tokens of the response the prompt
    ends with already (a response that goes on after a change of weights): positions count from there, so that no
    draw is made twice. `call` is the number of the request within its trajectory: every call draws from a stream of
    its own. An engine whose generator starts anew with each request mixes `start` and `call` into the seed.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    start: int = 0
    call: int = 0


@dataclass(slots=True)
class Completion:
    """What came back. token_ids int64 [L], log_probs float32 [L] of the distribution sampled from.

    finish_reason: "stop" (end token or stop string), "length" (budget spent), "abort" (partial output kept).
    `parts`: how many requests it took, more than one after changes of weights. `text`: of the whole response (the `start`
    tokens that the prompt ends with, then token_ids), where whoever sampled it has decoded it as
    `verl.data.tokenizer.text_of` does.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: str
    versions: tuple[int, ...] = (0,)
    num_preempted: int = 0
    started: float = field(default_factory=time.monotonic)
    finished: float = 0.0
    parts: int = 1
    text: str | None = None


class EngineDead(RuntimeError):
    """An engine can answer nothing any more. A host of its own says so and is replaced; in one process the run ends."""

    explained = True
    ends_the_run = True


class RolloutEngine(ABC):
    """One sampling engine. Calls are made on one event loop; `generate` may be awaited many times at once."""

    @abstractmethod
    async def generate(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
        session: str | None = None,
        media: dict[str, Any] | None = None,
    ) -> Completion:
        """Sample one response. Requests that name the same `group` have the same prompt: it is prefilled once.
        `session`: the request_id of the first call of a trajectory, whose prefix this call goes on from.

        Raises ValueError for a prompt that cannot fit (prompt + 1 > max_model_len), naming both numbers.
        """

    @abstractmethod
    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Stop requests (None: all); each `generate` returns what it has with finish_reason "abort"."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Replace weights from (Hugging Face name, full tensor) pairs, asleep or not. Raises on unknown or missing names."""

    @abstractmethod
    def sleep(self) -> None:
        """Give memory back while training runs (cache; weights too where they are the engine's own)."""

    @abstractmethod
    def wake(self) -> None:
        """Undo `sleep`."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The weight version new tokens are written with."""

    @property
    def dead(self) -> bool:
        """True when the engine can answer nothing any more: only a new one helps."""
        return False

    def held_checksums(self) -> dict[str, str] | None:
        """Name → digest of the weights it samples with (`verl.weight_sync.verify.checksums`), under the trainer's names
        and in its data type; None where it holds them in another form."""
        return None

    @property
    def weights_dtype(self) -> Any:
        """The torch data type that floating point weights may be converted to on their way here; None for as they are."""
        return None

    @property
    def readers(self) -> list[str]:
        """The processes that read for `receive_weights`: for each the id of the device it loads to
        (`Platform.memory_id`)."""
        return [""]

    def try_channel(self, places: Sequence[tuple[str, int]], timeout: float) -> list[str]:
        """Read a first, small transfer (`verl.weight_sync.trial`); what went wrong in each reader, "" for nothing."""
        from verl.weight_sync.trial import attempt

        return [attempt(*places[0], timeout)]

    def receive_weights(
        self, places: Sequence[tuple[str, int]], version: int, *, timeout: float, verify: bool
    ) -> dict[str, str]:
        """Load the weights of a transfer. `places`: for each of `readers` the channel and its number there. Blocking.

        Returns checksums with `verify`: of what the engine holds then, or of what came where it cannot tell.
        """
        from verl.weight_sync.shared_memory import receive
        from verl.weight_sync.verify import digesting

        sums: dict[str, str] = {}
        weights = receive(*places[0], timeout=timeout, version=version)
        self.load_weights(digesting(weights, sums) if verify else weights, version)
        held = self.held_checksums() if verify else None
        return sums if held is None else held

    def stats(self) -> dict[str, float]:
        """Counters since the last call: busy_s (time with requests running), prompt_tokens, tokens, preempted."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Release everything. The default has nothing to release."""
