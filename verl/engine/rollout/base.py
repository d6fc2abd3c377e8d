"""What every sampling engine offers: tokens in, tokens out, request by request.

The agent loop sits on top and is the only thing that knows of turns and tools. Everything here is
torch-free, so that the driver can hold it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from verl.trajectory import UNKNOWN_EXPERT, Media


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one response is drawn. temperature 0 is greedy; top_k ≤ 0, top_p 1, min_p 0, penalty 1 are off.

    `max_tokens` is the budget of this call. `stop` are strings looked for in the decoded response (kept in
    the output, as are end tokens). `seed` and the token's position decide every draw: a response does not
    depend on what else is being sampled (beyond rounding). `start` is how many tokens of the response the prompt
    ends with already (a response that goes on after a change of weights): positions count from there, so that no
    draw is made twice. `call` is the number of the request within its trajectory: every call draws from a stream of
    its own. An engine whose generator starts anew with each request mixes `start` and `call` into the seed.
    `record_mask`: an engine that can (`Capabilities.sampling_mask`) returns which tokens top-k, top-p and min-p left.
    `grammar`: what the response must follow (`verl.engine.rollout.grammars`), "" for anything; an engine that can
    (`Capabilities.grammars`) returns which tokens it left.
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
    record_mask: bool = False
    grammar: str = ""

    @property
    def truncated(self) -> bool:
        """True if some tokens cannot be drawn."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(slots=True)
class Completion:
    """What came back. token_ids int64 [L], log_probs float32 [L] of the distribution sampled from; routed_experts int16
    [P + L − 1, layers, k], where recorded: the experts that prompt and response tokens went to, without the last token;
    sampling_mask object [L], where recorded: the sets that the tokens were drawn from (`verl.models.sampling_mask`).

    finish_reason: "stop" (end token or stop string), "length" (budget spent), "abort" (partial output kept),
    "moved" (the same: its device is needed, and it goes on in another engine of the pool).
    `parts`: how many requests it took, more than one after changes of weights. `prefilled`: tokens that were computed
    before the first was sampled (recomputed ones too), not those found in the cache. `text`: of the whole response (the
    `start` tokens that the prompt ends with, then token_ids), where the engine has decoded it as
    `verl.data.rows.text_of` does.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: str
    versions: tuple[int, ...] = (0,)
    num_preempted: int = 0
    parts: int = 1
    prefilled: int = 0
    text: str | None = None
    routed_experts: np.ndarray | None = None
    sampling_mask: np.ndarray | None = None


def check_request(request_id: str, prompt_tokens: int, sampling: SamplingParams, max_model_len: int) -> None:
    """ValueError for a request that no engine can sample, naming the numbers."""
    s, problem = sampling, ""
    budgets = s.max_tokens >= 1 and s.temperature >= 0 and s.repetition_penalty > 0
    if prompt_tokens == 0:
        problem = "the prompt must be a non-empty list of token ids"
    elif prompt_tokens + 1 > max_model_len:
        problem = (
            f"a prompt of {prompt_tokens} tokens leaves no room for a response in max_model_len={max_model_len}: "
            "shorten the prompt or raise max_model_len"
        )
    elif not (budgets and 0 < s.top_p <= 1 and 0 <= s.min_p <= 1):
        problem = (
            f"{s} must have max_tokens ≥ 1, temperature ≥ 0, repetition_penalty > 0, top_p in (0, 1] "
            "and min_p in [0, 1]"
        )
    if problem:
        raise ValueError(f"request {request_id!r}: {problem}")


def not_finite(tokens: int, version: int) -> FloatingPointError:
    """The error for a response of which only the first `tokens` have a log-prob. version: of the weights."""
    return FloatingPointError(
        f"the model's logits are not finite after {tokens} tokens of a response, with the weights of "
        f"version {version}: training has blown them up (a lower learning rate, an earlier checkpoint), or the "
        "model cannot be computed in this precision (rollout.dtype=float32)"
    )


class EngineDead(RuntimeError):
    """An engine can answer nothing any more. A host of its own says so and is replaced; in one process the run ends."""

    explained = True
    ends_the_run = True


OnTokens = Callable[[Sequence[int]], None]
"""Called with the ids of tokens as they are sampled."""


class RolloutEngine(ABC):
    """One sampling engine. Calls are made on one event loop; `generate` may be awaited many times at once.

    streams: `generate` takes `on_tokens`, and calls it on that loop with the ids of new tokens as they are sampled, all
    of them before it returns."""

    streams: ClassVar[bool] = False

    @abstractmethod
    async def generate(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
        session: str | None = None,
        media: Media | None = None,
    ) -> Completion:
        """Sample one response. Requests that name the same `group` have the same prompt: it is prefilled once.
        `session`: names the trajectory in all its calls: a call that continues an earlier one reuses its cached keys
        and values. Without it no call follows.

        Raises ValueError for a prompt that cannot fit (prompt + 1 > max_model_len), naming both numbers.
        """

    @abstractmethod
    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Stop requests (None: all); each `generate` returns what it has with finish_reason "abort"."""

    def end_session(self, session: str) -> None:  # noqa: B027
        """No further call of this session comes. The default keeps nothing for one."""

    @abstractmethod
    def sleep(self) -> None:
        """Release memory while training runs (cache; weights too where they are the engine's own)."""

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

    @property
    def each_generate(self) -> Sequence[Callable[..., Awaitable[Completion]]]:
        """`generate` of each engine behind this one, where they are several: that one answers."""
        return (self.generate,)

    def stats(self) -> dict[str, float]:
        """Since the last call: busy_s (time with requests running), and images, how many an engine encoded itself."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Release everything. The default has nothing to release."""


# -- expert routes, as a sampler records them token by token and call by call


@dataclass(slots=True)
class RecordedRoutes:
    """The routes of a sequence's tokens from its first on, in parts [n, layers, k]; the first one of a token counts."""

    parts: list[np.ndarray] = field(default_factory=list)
    count: int = 0

    def add(self, start: int, routes: np.ndarray) -> None:
        """Routes of the tokens from `start` on, of which some may be known already."""
        new = routes[self.count - start :]
        if len(new):
            self.parts.append(new)
            self.count += len(new)

    def cut(self, count: int) -> None:
        """Forget those of all tokens but the first `count`."""
        if count < self.count:
            self.parts, self.count = [np.concatenate(self.parts)[:count]], count


def first_routes(parts: Iterable[np.ndarray], length: int) -> np.ndarray | None:
    """For each of the first `length` tokens of a sequence the routes of the first part that has the token,
    UNKNOWN_EXPERT if none does: int16 [length, layers, k]. Every part begins with the first token. None without parts.
    """
    recorded = RecordedRoutes()
    for part in parts:
        recorded.add(0, part[:length])
    if not recorded.parts:
        return None
    padding = np.full((length - recorded.count, *recorded.parts[0].shape[1:]), UNKNOWN_EXPERT, np.int16)
    return np.concatenate([*recorded.parts, padding])
