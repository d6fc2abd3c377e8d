"""One trajectory's way to the sampler, and how its requests outlive a change of weights.

Every call of a trajectory's session goes through its `TrajectoryCalls`, which numbers it and names the group whose prefill it
shares. Below those of a run is one `ResumableGeneration`: `pause` ends every request with its partial output kept; once the weights are
replaced, `resume` lets each go on from prompt + partial output, with the same seed and the positions it had reached. The caller
gets one completion that names every version that wrote a part of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion, RolloutEngine, SamplingParams, first_routes
from verl.trajectory import Media, Prompt

Images = Sequence[Media]
_ABORT_AGAIN_S = 1.0


@dataclass(slots=True, eq=False)
class _Call:
    """A call that came back. context int64 [P]; media: what stood in it."""

    context: np.ndarray
    media: Media | None
    done: Completion

    @property
    def ids(self) -> np.ndarray:
        """Context and response, int64 [P + L]."""
        return np.concatenate((self.context, self.done.token_ids))


class TrajectoryCalls:
    """Numbers the calls of one trajectory, so that no two of them draw from the same random stream.

    The first calls of a group's trajectories share the prefill of the prompt; later ones go on from what the sampler holds of the
    trajectory. `prefill`: of later calls, how many tokens were prefilled, and how many the sampler had not seen.

    number: of the trajectory in its group, and of the attempt where it is sampled again; prefix: keeps requests apart whose prompts
    come from different files; more_follow: there may be more than one call.
    """

    def __init__(
        self, requests: ResumableGeneration, prompt: Prompt, number: int | str, prefix: str, more_follow: bool
    ):
        self.prefill = np.zeros(2, np.int64)
        self._calls: list[_Call] = []
        self._several: dict[tuple[Media, ...], Media] = {}
        self._requests, self._prompt = requests, prompt
        self._group = f"{prefix}{prompt.uid}"
        self.id = f"{self._group}#{number}"
        self._session = self.id if more_follow else None
        self._asked = 0

    async def generate(self, prompt_ids: Any, sampling: SamplingParams, media: Images = ()) -> Completion:
        """Sample a continuation of `prompt_ids`, int64 [P]. Call k of a trajectory draws by (seed, k, position in the call). media: images
        that came after the row's own."""
        seen = self._seen(prompt_ids, media)
        number, self._asked = self._asked, self._asked + 1
        result = await self._requests.generate(
            prompt_ids,
            sampling if sampling.call == number else replace(sampling, call=number),
            request_id=f"{self.id}.{number}" if number else self.id,
            group=None if number or media else self._group_of(prompt_ids),
            session=self._session,
            media=seen,
        )
        context = np.asarray(prompt_ids, np.int64)
        if number:
            # What an earlier call has computed: all of its own but the last token it sampled.
            known = max((common_prefix(context, call.ids[:-1]) for call in self._calls), default=0)
            self.prefill += result.prefilled, max(1, len(context) - known)
        self._calls.append(_Call(context, seen, result))
        return result

    def _group_of(self, ids: Any) -> str:
        """Whose prefill a first call shares: that of the trajectories of its group that begin with the same tokens."""
        if np.array_equal(ids, self._prompt.ids):
            return self._group
        return (
            f"{self._group}/{hashlib.blake2b(np.asarray(ids, np.int64).tobytes(), digest_size=8).hexdigest()}"
        )

    @property
    def completions(self) -> list[Completion]:
        """What came back so far, in the order it did."""
        return [call.done for call in self._calls]

    def _seen(self, ids: Any, media: Images) -> Media | None:
        """The row's images, unless these tokens hold none for them, and these as one; the same object for every call that sees the
        same."""
        own, others = self._prompt.media, sum(one.tokens for one in media)
        absent = own is not None and own.inputs and np.count_nonzero(np.equal(ids, own.token)) == others
        parts = tuple(one for one in (None if absent else own, *media) if one is not None)
        if len(parts) > 1 and parts not in self._several:
            self._several[parts] = Media.joined(parts)
        return self._several.get(parts, parts[0] if parts else None)

    def media_of(self, context: np.ndarray, response: np.ndarray) -> Media | None:
        """The images that stand in a segment's context, int64 [P], by the call that began its response, int64 [L]."""
        for call in self._calls:
            begun = response[: len(call.done.token_ids)]
            if np.array_equal(call.context, context) and np.array_equal(call.done.token_ids, begun):
                return call.media
        return self._seen(context, ())

    def end(self) -> None:
        """No more calls come."""
        if self._session is not None:
            self._requests.engine.end_session(self._session)

    def versions(self, ids: np.ndarray) -> tuple[int, ...]:
        """Versions of the weights that wrote tokens of a sequence, int64 [S], ascending."""
        inside = [call for call in self._calls if np.array_equal(call.ids[: len(ids)], ids[: len(call.ids)])]
        return tuple(sorted({version for call in inside for version in call.done.versions}))

    def routes(self, ids: np.ndarray) -> np.ndarray | None:
        """The experts that the tokens of a sequence, int64 [S], went to, int16 [S, layers, k]: of each token those of the call
        that computed it first, -1 where none did. None if no call recorded any."""
        parts = []
        for call in self._calls:
            if (routes := call.done.routed_experts) is not None:
                seen = call.ids[: min(len(routes), len(ids))]
                parts += [routes] if np.array_equal(seen, ids[: len(seen)]) else []
        return first_routes(parts, len(ids))


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
        written = 0
        while True:
            await self._open.wait()
            pauses = self._pauses
            rest = sampling
            if written:
                rest = replace(
                    sampling, max_tokens=sampling.max_tokens - written, start=sampling.start + written
                )
            part = await self._ask(
                _continued(prompt_ids, parts) if written else prompt_ids,
                rest,
                request_id=f"{request_id}~{len(parts)}" if parts else request_id,
                group=None if written else group,
                **options,
            )
            parts.append(part)
            written += len(part.token_ids)
            interrupted = part.finish_reason == "abort" and pauses != self._pauses
            if not interrupted or written >= sampling.max_tokens:
                done = _joined(parts, "length" if interrupted else part.finish_reason)
                # The text is the whole response's; of a response that began elsewhere these are not all its tokens.
                return replace(done, text=None) if sampling.start else done

    async def _ask(
        self, prompt_ids: Any, sampling: SamplingParams, *, request_id: str, **how: Any
    ) -> Completion:
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


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common beginning of two arrays of ids."""
    size = min(len(a), len(b))
    return int(np.argmin(np.append(a[:size] == b[:size], False)))


def _continued(prompt_ids: Sequence[int] | np.ndarray, parts: list[Completion]) -> np.ndarray:
    return np.concatenate([np.asarray(prompt_ids, np.int64), *(part.token_ids for part in parts)])


def _joined(parts: list[Completion], reason: str) -> Completion:
    """One completion out of its parts; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
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
    )
