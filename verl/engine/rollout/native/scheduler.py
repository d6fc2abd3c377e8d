"""The responses being sampled: which are computed next, and when one is over. Decides from the order of submission and
the state of the cache alone, never from time.

    waiting ──admit──→ running, not ready ──prefill──→ running, ready ──decode …──→ finished
       ↑                                                    │
       └────────────────── preempt (cache full) ────────────┘

Prefill goes before decode, so that the decode batch is as wide as it can be. When the cache is full the newest
request loses its place: it keeps its tokens, goes back to waiting, and is prefilled again with prompt and tokens.

A finished request of a session keeps its place in the cache. The session's next request takes it over: the tokens that
both share are not computed again. Sessions without a request are the first to leave a full cache, the longest idle
first.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.engine.rollout.base import Completion, OnTokens, RecordedRoutes, SamplingParams
from verl.engine.rollout.grammars import Progress
from verl.engine.rollout.native.cache import KVBlockPool, KVSlotTable
from verl.engine.rollout.native.prefill_plan import PrefillSpan

if TYPE_CHECKING:
    from verl.engine.rollout.native.vision import PromptImages
    from verl.trajectory import Media

_BYTES_PER_CHARACTER = 4
# On a device a pass for a few tokens costs as much as a decode step: responses that wait are admitted together, when so
# large a share of all places is free, or one for each of them.
_ADMITTED_SHARE = 8
_PLACES = 8  # sequences that may be in the cache for each that may be sampled at a time: sessions that wait for a tool


@dataclass(eq=False, slots=True)
class RequestGroup:
    """One prompt in the cache, and how many unfinished responses need it."""

    group_key: str
    prompt: np.ndarray
    slot: int = -1
    images: PromptImages | None = None
    computed: int = 0
    users: int = 0
    last_used: int = 0
    routes: RecordedRoutes = field(default_factory=RecordedRoutes)
    shift: int = 0  # what a response token's position is more than its number in prompt + response

    def __post_init__(self) -> None:
        if self.images is not None:
            self.shift = self.images.context.shift


@dataclass(eq=False, slots=True)
class Request:
    """One response being sampled. `number` is the order of submission, which decides all scheduling."""

    id: str
    number: int
    group_key: str
    prompt: np.ndarray
    sampling: SamplingParams
    future: asyncio.Future[Completion]
    max_tokens: int  # that it may sample
    stop_ids: frozenset[int]
    images: PromptImages | None = None
    group: RequestGroup | None = None
    session: str | None = None
    on_tokens: OnTokens | None = None
    progress: Progress | None = None  # in the grammar that it follows
    slot: int = -1
    computed: int = 0  # of `tokens`: how many have their keys and values in the cache
    tokens: list[int] = field(default_factory=list)  # what follows `prompt`
    prior_tokens: int = 0  # the first of `tokens`: earlier turns of the session, and what came after them
    in_flight: int = 0  # tokens that the device has drawn, or will have, and that are not known here yet
    prefilled: int = 0
    log_probs: list[float] = field(default_factory=list)
    sets: list[bytes] = field(default_factory=list)  # that the tokens were drawn from
    versions: list[int] = field(default_factory=list)
    routes: RecordedRoutes = field(default_factory=RecordedRoutes)
    prompt_routes: RecordedRoutes | None = None  # those that the first token was sampled with
    num_preempted: int = 0
    ready: bool = False  # everything but the newest token is in the cache: decode can go on

    @property
    def written(self) -> int:
        """How many tokens were sampled."""
        return len(self.tokens) - self.prior_tokens

    @property
    def length(self) -> int:
        """How many tokens follow the prompt, those that are being drawn included."""
        return len(self.tokens) + self.in_flight

    @property
    def wants_token(self) -> bool:
        """A decode step can and should draw a token."""
        return self.ready and self.written + self.in_flight < self.max_tokens

    @property
    def response(self) -> list[int]:
        """The response's tokens, those that were sampled before this request included."""
        in_prompt = self.sampling.start - self.prior_tokens
        if in_prompt <= 0:
            return self.tokens[-in_prompt:]
        return [*self.prompt[-in_prompt:].tolist(), *self.tokens]

    def completion(self, reason: str) -> Completion:
        """What there is of the response, and why it is no more."""
        prompt = self.prompt_routes
        routed = [] if prompt is None or not prompt.count else [*prompt.parts, *self.routes.parts]
        return Completion(
            token_ids=np.array(self.tokens[self.prior_tokens :], np.int64),
            log_probs=np.array(self.log_probs, np.float32),
            finish_reason=reason,
            versions=tuple(self.versions),
            num_preempted=self.num_preempted,
            prefilled=self.prefilled,
            routed_experts=np.concatenate(routed) if routed else None,
            sampling_mask=np.array(self.sets, object) if any(self.sets) else None,
        )


@dataclass(slots=True)
class Prefill:
    """One packed forward pass: its spans, and which output rows give whose next token."""

    spans: list[PrefillSpan] = field(default_factory=list)
    sampled: list[tuple[Request, int]] = field(default_factory=list)
    tokens: int = 0

    def add(self, span: PrefillSpan) -> None:
        """One more span at the end."""
        self.spans.append(span)
        self.tokens += len(span.ids)


class Scheduler:
    """State of every unfinished request. Owns both tables."""

    def __init__(self, pool: KVBlockPool, max_num_seqs: int, max_num_batched_tokens: int):
        self.prompts = KVSlotTable(pool, _PLACES * max_num_seqs, from_end=True)
        self.responses = KVSlotTable(pool, _PLACES * max_num_seqs)
        self.most_running = max_num_seqs
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.groups: dict[str, RequestGroup] = {}
        # by session: finished requests that keep their place, longest idle first
        self.idle: dict[str, Request] = {}
        self._budget = max_num_batched_tokens
        self._clock = 0
        self._hold = False
        # True if tokens that were being drawn are known now: tokens of a request that loses its place must be
        self.settle: Callable[[], bool] = lambda: False

    @property
    def _stateful(self) -> bool:
        return self.responses.pool.states is not None

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError when its group is being sampled with another prompt."""
        if (other := self._same_group(request.group_key)) is not None:
            if not _same_prompt(other, request):
                raise ValueError(f"request {request.id!r} differs from its group's: one group, one prompt")
            request.prompt = other.prompt
        self.waiting.append(request)

    def _same_group(self, key: str) -> RequestGroup | Request | None:
        group = self.groups.get(key)
        if group is not None and group.users:
            return group
        return self.waiting[-1] if self.waiting and self.waiting[-1].group_key == key else None

    # ---- prefill

    def prefill(self) -> Prefill | None:
        """The next packed prefill, or None when nothing can be prefilled now."""
        work = Prefill()
        last_row: dict[int, int] = {}
        for request in [r for r in self.running if not r.ready]:
            self._feed(request, work, last_row)
        places = self.most_running - len(self.running)
        if self.responses.pool.paged and places < min(len(self.waiting), self.most_running // _ADMITTED_SHARE):
            return work if work.spans else None
        while self.waiting and work.tokens < self._budget and self._admit(self.waiting[0]):
            self._feed(self.running[-1], work, last_row)
        return work if work.spans else None

    def _admit(self, request: Request) -> bool:
        if (self._hold and self.running) or len(self.running) == self.most_running:
            return False
        self._hold = False
        while not self._place(request):
            if not self._evict_idle(keep=request):
                assert self.running, f"{request.id!r} does not fit an empty cache: a bug in KVCacheLayout.fit"
                return False
        self.waiting.pop(0)
        self.running.append(request)
        return True

    def _place(self, request: Request) -> bool:
        """Give the request its slots and first blocks, or change nothing."""
        if (earlier := self._earlier(request)) is not None:
            return self._go_on(request, earlier)
        group = self.groups.get(request.group_key)
        if group is not None and not _same_prompt(group, request):
            self._evict(group)  # idle by `add`'s check: the key was used before for another prompt
            group = None
        if group is None:
            prompt_slot = self.prompts.acquire(len(request.prompt))
            if prompt_slot is None:
                return False
            # stays, idle, if the response finds no place: it is evicted like any other when space is short
            group = self.groups[request.group_key] = RequestGroup(
                request.group_key, request.prompt, prompt_slot, request.images
            )
        slot = self.responses.acquire(len(request.tokens) + 1)
        if slot is None:
            return False
        group.users += 1
        request.group, request.slot, request.computed, request.ready = group, slot, 0, False
        return True

    def _earlier(self, request: Request) -> Request | None:
        """The idle request of the same session whose prompt this one begins with."""
        earlier = None if request.tokens else self.idle.get(request.session or "")
        if earlier is None or earlier.group is None:
            return None
        shared = earlier.group
        longer = len(request.prompt) > len(shared.prompt) and _media(request) is _media(shared)
        same = np.array_equal(request.prompt[: len(shared.prompt)], shared.prompt)
        return earlier if longer and same else None

    def _go_on(self, request: Request, earlier: Request) -> bool:
        """Give the request the place of an idle one, or change nothing."""
        group = earlier.group
        assert group is not None and request.session is not None
        tokens = request.prompt[len(group.prompt) :].tolist()
        if not self.responses.reserve(earlier.slot, len(tokens) + 1):
            return False
        del self.idle[request.session]
        pairs = enumerate(zip(earlier.tokens, tokens, strict=False))
        common = next((i for i, (old, other) in pairs if old != other), len(tokens))
        # The newest token is always computed: it gives the logits.
        request.computed = min(earlier.computed, common, len(tokens) - 1)
        if self._stateful and request.computed < earlier.computed:
            request.computed = 0  # the state is that after all tokens
        request.routes, request.prompt_routes = earlier.routes, group.routes
        request.routes.cut(request.computed)
        request.prompt, request.images, request.group_key = group.prompt, group.images, group.group_key
        request.tokens, request.prior_tokens = tokens, len(tokens)
        request.group, request.slot, request.ready = group, earlier.slot, False
        return True

    def _feed(self, request: Request, work: Prefill, last_row: dict[int, int]) -> None:
        """Add what the request still needs to the pass, as far as the token budget goes."""
        group = request.group
        assert group is not None
        start, length = group.computed, len(group.prompt)
        if start == length and not request.tokens and id(group) not in last_row:
            # cached earlier: its last token again gives the logits, where there is no state that has passed it
            start = 0 if self._stateful else start - 1
        if start < length:
            ids = group.prompt[start:][: max(0, self._budget - work.tokens)].tolist()
            if not ids:
                return
            work.add(PrefillSpan(self.prompts, group.slot, start, ids, group.routes, images=group.images))
            group.computed = start + len(ids)
            request.prefilled += len(ids)
            last_row[id(group)] = work.tokens - 1
        if group.computed < length:
            return
        if not request.tokens:
            request.ready, request.prompt_routes = True, group.routes
            work.sampled.append((request, last_row[id(group)]))
            return
        ids = request.tokens[request.computed :][: max(0, self._budget - work.tokens)]
        if not ids:
            return
        prompt = self.prompts, group.slot, length
        span = PrefillSpan(self.responses, request.slot, request.computed, ids, request.routes, prompt, group.images)
        work.add(span)
        request.computed += len(ids)
        request.prefilled += len(ids)
        if request.computed == len(request.tokens):
            request.ready = True
            work.sampled.append((request, work.tokens - 1))

    def handed_on(self, work: Prefill) -> list[tuple[int, int]]:
        """States of prompts, and those of the responses that begin with them."""
        begun = [(request, request.group) for request, _ in work.sampled if request.group and not request.tokens]
        return [(int(self.prompts.states[g.slot]), int(self.responses.states[r.slot])) for r, g in begun]

    # ---- decode

    def decode(self) -> list[Request]:
        """Requests that get one token now, by slot, each with room for it in the cache."""
        self._tidy(self.responses, 1.25)
        self._tidy(self.prompts, 1.25)
        for request in sorted((r for r in self.running if r.wants_token), key=lambda r: r.number):
            while request.wants_token and not self.responses.reserve(request.slot, request.length):
                if self._evict_idle() or self._tidy(self.responses, 1.0) or self._tidy(self.prompts, 1.0):
                    continue
                if not self.settle():
                    self.preempt(max(self.running, key=lambda r: r.number))
        return sorted((r for r in self.running if r.wants_token), key=lambda r: r.slot)

    def _tidy(self, table: KVSlotTable, factor: float) -> bool:
        """Repack a table whose blocks are used badly. True if blocks came free."""
        if table.pool.paged:
            return False
        used, needed = table.waste()
        if used <= factor * needed and not table.sparse():
            return False
        moved = table.repack()
        if table is self.responses:
            for request in (*self.running, *self.idle.values()):
                request.slot = moved[request.slot]
        else:
            for group in self.groups.values():
                group.slot = moved[group.slot]
        return used > needed

    def preempt(self, request: Request) -> None:
        """Take the request's place in the cache away; its tokens stay and are prefilled again later."""
        request.num_preempted += 1
        self._hold = True  # until one finishes: else it would come back at once and be thrown out again
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        self.running.remove(request)
        self._leave(request)
        bisect.insort(self.waiting, request, key=lambda r: r.number)

    def _leave(self, request: Request) -> None:
        assert request.group is not None
        self.responses.release(request.slot)
        self._clock += 1
        request.group.users -= 1
        request.group.last_used = self._clock
        request.group, request.slot, request.computed, request.ready = None, -1, 0, False

    def finish(self, request: Request) -> None:
        """Forget a request that is waiting or running."""
        if request.slot < 0:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        if request.session is None:
            self._leave(request)
        else:
            self._keep(request, request.session)
        self._hold = False
        if sum(not g.users for g in self.groups.values()) > max(2, len(self.groups) // 4):
            self._evict_prompt()

    def _keep(self, request: Request, session: str) -> None:
        """Leave a finished request in the cache for the session's next one."""
        self._drop_idle(session)
        if request.ready:
            request.computed, request.ready = len(request.tokens) - 1, False
        self.idle[session] = request

    def end_session(self, session: str) -> None:
        """Nothing goes on from this session any more. A request of it that is not done keeps no place when it is."""
        for request in (*self.waiting, *self.running):
            if request.session == session:
                request.session = None
        self._drop_idle(session)

    def _drop_idle(self, session: str) -> None:
        if (request := self.idle.pop(session, None)) is not None:
            self._leave(request)

    # ---- what is cached and not in use

    def _evict_idle(self, keep: Request | None = None) -> bool:
        """Free the place of a session without a request, else of a prompt; not what `keep` goes on from."""
        needed = self._earlier(keep) if keep is not None else None
        session = next((name for name, request in self.idle.items() if request is not needed), None)
        if session is None:
            return self._evict_prompt(keep.group_key if keep is not None else None)
        self._drop_idle(session)
        return True

    def _evict_prompt(self, keep: str | None = None) -> bool:
        idle = [g for g in self.groups.values() if not g.users and g.group_key != keep]
        if idle:
            self._evict(min(idle, key=lambda g: g.last_used))
        return bool(idle)

    def _evict(self, group: RequestGroup) -> None:
        self.prompts.release(group.slot)
        del self.groups[group.group_key]

    def forget_cache(self) -> None:
        """Nothing in the cache is true any more (new weights): running responses start over from their tokens."""
        for session in list(self.idle):
            self._drop_idle(session)
        for request in list(self.running):
            self._requeue(request)
        for group in list(self.groups.values()):
            self._evict(group)
        self._hold = False


def _same_prompt(holder: RequestGroup | Request, other: Request) -> bool:
    same = holder.prompt is other.prompt or np.array_equal(holder.prompt, other.prompt)
    return same and _media(holder) is _media(other)


def _media(holder: RequestGroup | Request) -> Media | None:
    return None if holder.images is None else holder.images.media


class Stopper:
    """Decides after each token. Stop strings need the tokenizer; the string stays in the response."""

    def __init__(self, tokenizer: Any | None):
        self._tokenizer: Any = tokenizer
        self._piece = functools.cache(lambda token: self._decode([token]))

    def reason(self, request: Request) -> str:
        """ "stop", "length", or "" to go on."""
        token = request.tokens[-1]
        if token in request.stop_ids:
            return "stop"
        stops = request.sampling.stop
        if stops and self._may_end(token, stops) and self._ended(request.response, stops):
            return "stop"
        return "length" if request.written >= request.max_tokens else ""

    def check(self, stops: tuple[str, ...]) -> None:
        """Raises ValueError for stop strings that cannot be looked for."""
        if stops and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give NativeEngine one, or use stop_token_ids")
        if any(not stop for stop in stops):
            raise ValueError("an empty stop string would end every response at once: remove it")

    def _may_end(self, token: int, stops: tuple[str, ...]) -> bool:
        """Whether a stop string can end inside this token. Cheap; a part of a character may end anything."""
        piece = self._piece(token)
        return not piece or "\ufffd" in piece or any(stop[-1] in piece for stop in stops)

    def _ended(self, tokens: list[int], stops: tuple[str, ...]) -> bool:
        """Whether the text of the last tokens holds a stop string. As many tokens as its bytes always suffice."""
        window = _BYTES_PER_CHARACTER * (max(map(len, stops)) + 1)
        text = self._decode(tokens[-window:])
        return any(stop in text for stop in stops)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))
