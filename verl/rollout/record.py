"""The one record of a trajectory's tokens: segments that grow by spans as completions arrive.

    session ── place(ids) ─→ Place(segment, length, inserted) ── call ─→ completion ─→ Record.add:
                                                                                      an inserted and a sampled span

Mask, log-probs, versions, images and expert routes of every token are known from its span; nothing is compared
afterwards to find out who wrote a token. The driver has the record that is trained on; a process that runs loops of
users keeps a copy of the ids by the same steps, so that a call says where its tokens go (`Place`) instead of sending
them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from verl.engine.rollout.base import Completion, OnTokens, SamplingParams
from verl.trajectory import UNKNOWN_EXPERT, Media, common_prefix

NO_IDS = np.zeros(0, np.int64)


def merged_routes(parts: Sequence[tuple[int, np.ndarray]], length: int) -> np.ndarray | None:
    """Of each of `length` tokens the experts by the first part, (first token, int16 [tokens, layers, k]), that knows
    them, UNKNOWN_EXPERT where none does: int16 [length, layers, k]. None without parts."""
    if not parts:
        return None
    routes = np.full((length, *parts[0][1].shape[1:]), UNKNOWN_EXPERT, np.int16)
    unknown = np.ones(length, bool)
    for start, values in parts:
        values = values[: max(0, length - start)]
        new = unknown[start : start + len(values)] & (values != UNKNOWN_EXPERT).any((1, 2))
        routes[start : start + len(values)][new] = values[new]
        unknown[start : start + len(values)][new] = False
    return routes


class EnvironmentFailed(RuntimeError):
    """What the policy acts in failed: the trajectory has no score, never one of 0, and is sampled again."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens start … end − 1 of a segment, written together.

    log_probs  float32 [end − start] by the sampler; None for tokens that the loop inserted
    call       number of the completion among those of the record; −1 for inserted tokens
    versions   weight versions that wrote them
    routes     int16 [tokens, layers, k] from token `routes_from` of the segment on, where the call recorded them
    sets       object [end − start], `Completion.sampling_mask`
    """

    start: int
    end: int
    ids: np.ndarray
    log_probs: np.ndarray | None = None
    call: int = -1
    versions: tuple[int, ...] = ()
    routes: np.ndarray | None = None
    routes_from: int = 0
    sets: np.ndarray | None = None

    @property
    def sampled(self) -> bool:
        """True for tokens of the policy."""
        return self.log_probs is not None


class SegmentRecord:
    """A segment as far as it is written. Only `Record` adds to it.

    number     of the segment in its record
    context    int64 [P], what it was opened with
    spans      what follows the context
    shown      images in the context, but for the row's own; media: all of them as the sampler gets them
    parent, shared  the context begins with the first `shared` tokens of another segment
    continued  a call went on from its last span
    withdrawn  its last answer was asked for again and replaced; it counts again when a call goes on from it
    """

    def __init__(
        self,
        number: int,
        context: np.ndarray,
        shown: tuple[Media, ...] = (),
        parent: SegmentRecord | None = None,
        shared: int = 0,
    ):
        self.number, self.context, self.shown = number, context, shown
        self.parent, self.shared = parent, shared
        self.media: Media | None = None
        self.spans: list[Span] = []
        self.length = len(context)
        self.continued = self.withdrawn = False
        self._buffer, self._copied = context, len(context)

    @property
    def start(self) -> int:
        """Where the response begins: what stands in another segment already is context here."""
        return max(len(self.context), self.shared)

    @property
    def response_length(self) -> int:
        """Tokens behind the context."""
        return self.length - self.start

    def append(self, ids: np.ndarray, **of_span: Any) -> None:
        """Add a span of these ids."""
        self.spans.append(Span(self.length, self.length + len(ids), ids, **of_span))
        self.length += len(ids)

    def ids(self, length: int | None = None) -> np.ndarray:
        """The first `length` tokens (None: all), int64. A view that later tokens do not change; the work is that of new
        tokens."""
        if self._copied < self.length:
            if len(self._buffer) < self.length:
                grown = np.empty(2 * self.length, np.int64)
                grown[: self._copied] = self._buffer[: self._copied]
                self._buffer = grown
            for span in reversed(self.spans):
                if span.end <= self._copied:
                    break
                self._buffer[span.start : span.end] = span.ids
            self._copied = self.length
        return self._buffer[: self.length if length is None else length]

    def response(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids int64, mask bool and log-probs float32, each [L], of what follows the context."""
        start, size = self.start, self.response_length
        if len(self.spans) == 1 and self.spans[0].start == start and self.spans[0].log_probs is not None:
            return self.spans[0].ids, np.ones(size, bool), self.spans[0].log_probs  # as most segments
        mask, log_probs = np.zeros(size, bool), np.zeros(size, np.float32)
        for span in self.spans:
            if span.log_probs is not None and span.start >= start:
                mask[span.start - start : span.end - start] = True
                log_probs[span.start - start : span.end - start] = span.log_probs
        return self.ids()[start:].copy(), mask, log_probs

    def sampling_mask(self) -> np.ndarray | None:
        """The sets that the tokens behind the context were drawn from, object [L]; None if no call recorded any."""
        spans = [span for span in self.spans if span.sets is not None and span.start >= self.start]
        if not spans:
            return None
        sets = np.full(self.response_length, b"", object)
        for span in spans:
            sets[span.start - self.start : span.end - self.start] = span.sets
        return sets

    def with_shared_spans(self, length: int | None = None) -> SegmentRecord:
        """Its first `length` tokens (None: all) behind the context in which the first of them was sampled: what was
        sampled in segments that it goes on from is sampled here, too. Images stay in the context."""
        length = self.length if length is None else length
        whole = SegmentRecord(self.number, self.context[:length], self.shown)
        first = len(self.context)
        if self.parent is not None and self.parent.shown == self.shown:
            earlier = self.parent.with_shared_spans(min(self.shared, length))
            if any(span.sampled for span in earlier.spans):
                whole, first = earlier, max(first, earlier.length)
                if len(inserted := self.context[earlier.length : length]):
                    whole.append(inserted)
        for span in self.spans:
            if first <= span.start < length:
                size = min(span.end, length) - span.start
                log_probs = None if span.log_probs is None else span.log_probs[:size]
                sets = None if span.sets is None else span.sets[:size]
                about = {"call": span.call, "versions": span.versions}
                whole.append(span.ids[:size], log_probs=log_probs, sets=sets, **about)
        return whole

    def versions(self) -> tuple[int, ...]:
        """Versions of the weights that wrote its tokens, ascending."""
        return tuple(sorted({version for span in self.spans for version in span.versions}))

    def routes(self, length: int) -> np.ndarray | None:
        """Experts of the first `length` tokens, int16 [length, layers, k]: of each those of the call that computed it
        first, UNKNOWN_EXPERT where none did. None if no call recorded any."""
        lineage: list[tuple[SegmentRecord, int]] = [(self, length)]
        while (parent := lineage[0][0].parent) is not None:
            lineage.insert(0, (parent, min(lineage[0][0].shared, lineage[0][1])))
        parts = [
            (span.routes_from, span.routes[: max(0, end - span.routes_from)])
            for segment, end in lineage
            for span in segment.spans
            if span.routes is not None
        ]
        return merged_routes(parts, length)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the tokens of a call go: behind the first `length` tokens of a segment (None: of none), then `inserted`,
    int64.

    shown: images that have tokens in the context, but for the row's own. replaces: the same was asked before, and the
    answer takes the place of the one that nobody went on from. follows: the dialogue goes on from the end of this
    segment, whatever its tokens go on from.
    """

    segment: SegmentRecord | None
    length: int
    inserted: np.ndarray
    shown: tuple[Media, ...] = ()
    replaces: bool = False
    follows: SegmentRecord | None = None

    @property
    def extends(self) -> bool:
        """True if the tokens go on from the end of the segment as it is now."""
        segment = self.segment
        return segment is not None and segment.length == self.length and segment.shown == self.shown

    def ids(self) -> np.ndarray:
        """What the call is asked with, int64 [P]."""
        if self.segment is None:
            return self.inserted
        prefix = self.segment.ids(self.length)
        return np.concatenate([prefix, self.inserted]) if len(self.inserted) else prefix

    @property
    def total(self) -> int:
        """Number of those tokens."""
        return self.length + len(self.inserted)


class Excerpt(NamedTuple):
    """A token sequence that a loop made of what its session recorded, where it does not hand over whole segments.

    context  int64 [P]
    parts    in order, sampled tokens as (number of the segment, number of the span, how many of its tokens), others as
             ids int64
    routes   int16 [≤ P + L, layers, k] from the first token on, where the loop gives them
    """

    context: np.ndarray
    parts: Sequence[tuple[int, int, int] | np.ndarray] = ()
    routes: np.ndarray | None = None


@dataclass(slots=True)
class Outcome:
    """How a trajectory ended, as its loop says it; the tokens are in the record.

    status    of `verl.trajectory.STATUSES`; None: as the sampler's finish reason says
    reward    what it earned, where no reward function scores it
    fields    kept, dumped, and shown to the reward function
    metrics   seconds of `tool_calls`; `token_scores` and `step_reward` of environments; others are kept
    excerpts  what it consists of, where that is not every segment of the record
    """

    status: str | None = None
    reward: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    num_turns: int = 2
    excerpts: list[Excerpt] | None = None


class Record:
    """The segments of one trajectory, by their numbers. calls: completions so far; row_images: images of the row's
    own."""

    def __init__(self, row_images: int = 0) -> None:
        self.segments: list[SegmentRecord] = []
        self._order: list[SegmentRecord] = []
        self.calls, self.row_images = 0, row_images

    @property
    def written(self) -> list[SegmentRecord]:
        """The segments that make up the trajectory, in the order in which they were opened."""
        return list(self._order)

    @property
    def replaced(self) -> int:
        """Answers that were replaced when the same was asked again."""
        return len(self.segments) - len(self._order)

    async def call(
        self, place: Place, sampling: SamplingParams, on_tokens: OnTokens | None = None
    ) -> tuple[Completion, SegmentRecord]:
        """Sample what follows a place; returns it with the segment that holds it. on_tokens: gets the ids as they are
        sampled, where the engine streams."""
        raise NotImplementedError

    def place(self, ids: np.ndarray, shown: tuple[Media, ...] = (), *, repeatable: bool = False) -> Place:
        """Where a call with these ids, int64 [P], goes. repeatable: where it repeats a call, its answer replaces the
        earlier one."""
        segments = [segment for segment in reversed(self.segments) if segment.shown == shown]
        for segment in segments:
            if segment.length <= len(ids) and np.array_equal(ids[: segment.length], segment.ids()):
                return Place(segment, segment.length, ids[segment.length :].copy(), shown)
        for segment in segments if repeatable else ():
            start = segment.spans[-1].start
            if not (segment.continued or segment.withdrawn) and np.array_equal(ids, segment.ids(start)):
                return Place(segment, start, NO_IDS, shown, replaces=True)
        shared, number = max(((common_prefix(ids, s.ids()), s.number) for s in segments), default=(0, 0))
        # Copies: a slice would keep the caller's whole array, and change with it.
        return Place(self.segments[number] if shared else None, shared, ids[shared:].copy(), shown)

    def begin(self, place: Place) -> None:
        """A call is made: a segment that it goes on from counts, also where its answer was replaced."""
        segment = place.segment
        if segment is not None and segment.spans and place.length >= segment.spans[-1].end:
            self._continue(segment)
        if place.follows is not None:
            self._continue(place.follows)

    def _continue(self, segment: SegmentRecord) -> None:
        segment.continued = True
        if segment.withdrawn:
            segment.withdrawn = False
            self._order.append(segment)

    def add(self, place: Place, completion: Completion, replaced: bool | None = None) -> SegmentRecord:
        """Record what came back of a call; returns the segment that holds it. replaced: whether it takes the place of
        an earlier answer, as another record of the trajectory says; None: as this one finds."""
        segment = place.segment
        if segment is None or not place.extends:
            if self._may_replace(place) if replaced is None else replaced:
                segment = self._replace(place)
            else:
                segment = self._open(place)
        elif len(place.inserted):
            segment.append(place.inserted)
        routes, first = completion.routed_experts, max(0, segment.spans[-1].start - 1) if segment.spans else 0
        segment.append(
            completion.token_ids,
            log_probs=completion.log_probs,
            call=self.calls,
            versions=completion.versions if len(completion.token_ids) else (),
            routes=None if routes is None else routes[first:].copy() if first else routes,
            routes_from=first,
            sets=completion.sampling_mask,
        )
        segment.continued = False
        self.calls += 1
        return segment

    def _open(self, place: Place) -> SegmentRecord:
        parent, shared = place.segment, place.length if place.segment else 0
        ids = place.ids()
        if parent is not None and not len(place.inserted):
            ids = ids.copy()  # not a view of the parent's buffer
        segment = SegmentRecord(len(self.segments), ids, place.shown, parent, shared)
        self.segments.append(segment)
        self._order.append(segment)
        return segment

    def _may_replace(self, place: Place) -> bool:
        """True if no call went on from the answer that the place asks for again."""
        earlier = place.segment
        if earlier is None or not place.replaces or earlier.continued or earlier.withdrawn:
            return False
        return earlier.spans[-1].start == place.length

    def _replace(self, place: Place) -> SegmentRecord:
        """The segment whose last answer is replaced, without it. The answer is withdrawn, unless a call went on from
        it."""
        earlier = place.segment
        assert earlier is not None
        segment = SegmentRecord(len(self.segments), earlier.context, earlier.shown, earlier.parent, earlier.shared)
        segment.media = earlier.media
        segment.spans, segment.length = earlier.spans[:-1], earlier.spans[-1].start
        earlier.withdrawn, earlier.parent, earlier.shared = True, segment, place.length
        self.segments.append(segment)
        self._order[self._order.index(earlier)] = segment
        if earlier.continued:
            self._continue(earlier)
        return segment
