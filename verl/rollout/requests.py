"""One trajectory's way to the sampler, and how its requests outlive a change of weights.

Every call of a trajectory's session goes through its `TrajectoryRecord`, which numbers it, names the group whose
prefill it shares, and records what came back. Below those of a run is one `ResumableGeneration`: `pause` ends every
request with its partial output kept; once the weights are replaced, `resume` lets each go on from prompt + partial
output, with the same seed and the positions it had reached. The caller gets one completion that names every version
that wrote a part of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion, RolloutEngine, SamplingParams, first_routes
from verl.rollout.record import (
    NO_IDS,
    Excerpt,
    Place,
    Record,
    SegmentRecord,
    common_prefix,
    merged_routes,
)
from verl.trajectory import Media, Prompt, Segment

Images = Sequence[Media]
_ABORT_AGAIN_S = 1.0


class TrajectoryRecord(Record):
    """The record of one trajectory on the driver, with its way to the sampler. Calls are numbered, so that no two of
    them draw from the same random stream.

    The first calls of a group's trajectories share the prefill of the prompt; later ones go on from what the sampler
    holds of the trajectory. `prefill`: of later calls, how many tokens were prefilled, and how many the sampler had not
    seen.

    number: of the trajectory in its group, and of the attempt where it is sampled again; prefix: keeps requests apart
    whose prompts come from different files; more_follow: there may be more than one call.
    """

    def __init__(
        self, requests: ResumableGeneration, prompt: Prompt, number: int | str, prefix: str, more_follow: bool
    ):
        super().__init__(0 if prompt.media is None else prompt.media.images)
        self.prefill = np.zeros(2, np.int64)
        self.num_preempted = self.interruptions = 0
        self.last: Completion | None = None
        self._versions: set[int] = set()
        self._several: dict[tuple[Media, ...], Media] = {}
        self._requests, self._prompt = requests, prompt
        self._group = f"{prefix}{prompt.uid}"
        self.id = f"{self._group}#{number}"
        self._session = self.id if more_follow else None
        self._asked = 0

    async def call(self, place: Place, sampling: SamplingParams) -> tuple[Completion, SegmentRecord]:
        """Sample what follows a place; returns it with the segment that holds it. Call k of a trajectory draws by
        (seed, k, position in the call)."""
        self.begin(place)
        ids, number = place.ids(), self._asked
        self._asked += 1
        segment = place.segment
        media = segment.media if segment is not None and place.extends else self.media_of(ids, place.shown)
        completion = await self._requests.generate(
            ids,
            sampling if sampling.call == number else replace(sampling, call=number),
            request_id=f"{self.id}.{number}" if number else self.id,
            group=None if number or place.shown else self._group_of(ids),
            session=self._session,
            media=media,
        )
        if number:  # an earlier call has computed all of its tokens but the last one it sampled
            computed = min(place.length, segment.length - 1) if segment is not None else 0
            self.prefill += completion.prefilled, max(1, place.total - computed)
        self.last = completion
        self._versions.update(completion.versions)
        self.num_preempted += completion.num_preempted
        self.interruptions += completion.parts - 1
        holder = self.add(place, completion)
        holder.media = media
        return completion, holder

    def _group_of(self, ids: np.ndarray) -> str:
        """Whose prefill a first call shares: that of the trajectories of its group that begin with the same tokens."""
        if np.array_equal(ids, self._prompt.ids):
            return self._group
        return f"{self._group}/{hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()}"

    def media_of(self, ids: np.ndarray, shown: Images = ()) -> Media | None:
        """The row's images, unless these tokens hold none for them, and the shown ones as one; the same object for
        every context that holds the same."""
        row, shown_tokens = self._prompt.media, sum(media.tokens for media in shown)
        absent = row is not None and row.inputs and np.count_nonzero(np.equal(ids, row.token)) == shown_tokens
        parts = tuple(media for media in (None if absent else row, *shown) if media is not None)
        if len(parts) > 1 and parts not in self._several:
            self._several[parts] = Media.joined(parts)
        return self._several.get(parts, parts[0] if parts else None)

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions of the weights that answered, ascending."""
        return tuple(sorted(self._versions))

    def end(self) -> None:
        """No more calls come."""
        if self._session is not None:
            self._requests.engine.end_session(self._session)

    def sequences(self, excerpts: Sequence[Excerpt] | None) -> list[Segment]:
        """The segments of the trajectory: what was written, or what its loop made of it."""
        if excerpts is not None:
            return [self._excerpt(excerpt) for excerpt in excerpts]
        records = self.written
        segments = [self._segment(segment) for segment in records] or [self._excerpt(Excerpt(NO_IDS))]
        for segment, recorded in zip(segments, records, strict=False):
            segment.parent, segment.shared = _parent_among(records, recorded)
        return segments

    def _context(self, ids: np.ndarray) -> np.ndarray:
        """A context that is the prompt is its array, so that it is computed once for a group."""
        return self._prompt.ids if np.array_equal(ids, self._prompt.ids) else ids

    def _segment(self, written: SegmentRecord) -> Segment:
        ids, mask, log_probs = written.response()
        context = (
            written.context if written.start == len(written.context) else written.ids(written.start).copy()
        )
        segment = Segment(
            self._context(context),
            ids,
            mask,
            media=written.media,
            versions=written.versions(),
            rollout_log_probs=log_probs,
        )
        _put_routes(segment, written.routes(written.length))
        return segment

    def _excerpt(self, excerpt: Excerpt) -> Segment:
        ids, marks, log_probs = [NO_IDS], [np.zeros(0, bool)], [np.zeros(0, np.float32)]
        versions: set[int] = set()
        for part in excerpt.parts:
            if isinstance(part, tuple):
                number, place, size = part
                span = self.segments[number].spans[place]
                assert span.log_probs is not None
                ids.append(span.ids[:size])
                log_probs.append(span.log_probs[:size])
                versions.update(span.versions)
            else:
                ids.append(part)
                log_probs.append(np.zeros(len(part), np.float32))
            marks.append(np.full(len(ids[-1]), isinstance(part, tuple)))
        context, response = self._context(excerpt.context), np.concatenate(ids)
        whole = np.concatenate([context, response])
        near = max(self.segments, key=lambda s: common_prefix(whole, s.ids()), default=None)
        within = near is not None and common_prefix(context, near.context) == len(near.context)
        segment = Segment(
            context,
            response,
            np.concatenate(marks),
            media=near.media if near is not None and within else self.media_of(context),
            versions=tuple(sorted(versions)),
            rollout_log_probs=np.concatenate(log_probs),
        )
        routes = [s.routes(common_prefix(whole, s.ids())) for s in self.segments]
        parts = [excerpt.routes] if excerpt.routes is not None else [r for r in routes if r is not None]
        _put_routes(segment, merged_routes([(0, part) for part in parts], len(whole)))
        return segment


def _parent_among(written: list[SegmentRecord], segment: SegmentRecord) -> tuple[int | None, int]:
    """Number of the written segment with whose tokens this one begins, and how many; (None, 0) if there is none."""
    parent, shared = segment.parent, segment.shared
    while parent is not None and parent not in written:
        shared = min(shared, parent.shared)
        parent = parent.parent
    return (None, 0) if parent is None else (written.index(parent), shared)


def _put_routes(segment: Segment, routes: np.ndarray | None) -> None:
    """Experts of the tokens of context and response, int16 [P + L, layers, k], as columns."""
    if routes is not None:
        # Copies: the context's part is shared by a group, and must not keep the rest.
        context, response = np.split(routes, [len(segment.context_ids)])
        segment.put("routed_experts", response.copy())
        segment.context_columns["routed_experts"] = context.copy()


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
            remaining = sampling
            if num_sampled:
                remaining = replace(
                    sampling, max_tokens=sampling.max_tokens - num_sampled, start=sampling.start + num_sampled
                )
            part = await self._ask(
                _continued(prompt_ids, parts) if num_sampled else prompt_ids,
                remaining,
                request_id=f"{request_id}~{len(parts)}" if parts else request_id,
                group=None if num_sampled else group,
                **options,
            )
            parts.append(part)
            num_sampled += len(part.token_ids)
            interrupted = part.finish_reason == "abort" and pauses != self._pauses
            if not interrupted or num_sampled >= sampling.max_tokens:
                completion = _joined(parts, "length" if interrupted else part.finish_reason)
                # The text is the whole response's; of a response that began elsewhere these are not all its tokens.
                return replace(completion, text=None) if sampling.start else completion

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
