"""Who is computed next. Decides from the order of submission and the state of the cache alone, never from time.

    waiting ──admit──→ running, not ready ──prefill──→ running, ready ──decode …──→ finished
       ↑                                                    │
       └────────────────── preempt (cache full) ────────────┘

Prefill goes before decode, so that the decode batch is as wide as it can be. When the cache is full the newest
request loses its place: it keeps its tokens, goes back to waiting, and is prefilled again with prompt and tokens.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import numpy as np

from verl.engine.rollout.native.cache import KVBlockPool, KVSlotTable
from verl.engine.rollout.native.prefill_plan import PrefillSpan
from verl.engine.rollout.native.request import Group, Request


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

    def __init__(self, pool: KVBlockPool, *, max_num_seqs: int, max_num_batched_tokens: int):
        self.prompts = KVSlotTable(pool, max_num_seqs, from_end=True)
        self.responses = KVSlotTable(pool, max_num_seqs)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.groups: dict[str, Group] = {}
        self.preempted = 0
        self._budget = max_num_batched_tokens
        self._clock = 0
        self._hold = False

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError when its group is being sampled with another prompt."""
        other = self._same_group(request.group_key)
        if other is not None:
            if not _same_prompt(other, request):
                raise ValueError(
                    f"request {request.id!r} names group {request.group_key!r}, whose prompt has {len(other.prompt)} tokens "
                    f"and differs from its own ({len(request.prompt)} tokens): one group, one prompt"
                )
            request.prompt = other.prompt
        self.waiting.append(request)

    def _same_group(self, key: str) -> Group | Request | None:
        group = self.groups.get(key)
        if group is not None and group.users:
            return group
        return self.waiting[-1] if self.waiting and self.waiting[-1].group_key == key else None

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    # ---- prefill

    def prefill(self) -> Prefill | None:
        """The next packed prefill, or None when nothing can be prefilled now."""
        work = Prefill()
        last_row: dict[int, int] = {}
        for request in [r for r in self.running if not r.ready]:
            self._feed(request, work, last_row)
        while self.waiting and work.tokens < self._budget and self._admit(self.waiting[0]):
            self._feed(self.running[-1], work, last_row)
        return work if work.spans else None

    def _admit(self, request: Request) -> bool:
        if self._hold and self.running:
            return False
        self._hold = False
        while not self._place(request):
            if not self._evict_idle(keep=request.group_key):
                if not self.running:
                    raise RuntimeError(
                        f"request {request.id!r} does not fit an empty cache: a bug in KVCacheLayout.fit"
                    )
                return False
        self.waiting.pop(0)
        self.running.append(request)
        return True

    def _place(self, request: Request) -> bool:
        """Give the request its slots and first blocks, or change nothing."""
        group = self.groups.get(request.group_key)
        if group is not None and not _same_prompt(group, request):
            self._evict(group)  # idle by `add`'s check: the key was used before for another prompt
            group = None
        if group is None:
            prompt_slot = self.prompts.acquire(len(request.prompt))
            if prompt_slot is None:
                return False
            # stays, idle, if the response finds no place: it is evicted like any other when space is short
            group = self.groups[request.group_key] = Group(request.group_key, request.prompt, prompt_slot)
        slot = self.responses.acquire(len(request.tokens) + 1)
        if slot is None:
            return False
        group.users += 1
        request.group, request.slot, request.computed, request.ready = group, slot, 0, False
        return True

    def _feed(self, request: Request, work: Prefill, last_row: dict[int, int]) -> None:
        """Add what the request still needs to the pass, as far as the token budget goes."""
        group = request.group
        assert group is not None
        if group.computed < group.length:
            ids = group.prompt[group.computed :][: max(0, self._budget - work.tokens)].tolist()
            if not ids:
                return
            work.add(PrefillSpan(self.prompts, group.slot, group.computed, ids))
            group.computed += len(ids)
            last_row[id(group)] = work.tokens - 1
        if group.computed < group.length:
            return
        if not request.tokens:
            if id(group) not in last_row:  # cached earlier: its last token again gives the logits
                work.add(PrefillSpan(self.prompts, group.slot, group.length - 1, group.prompt[-1:].tolist()))
                last_row[id(group)] = work.tokens - 1
            request.ready = True
            work.sampled.append((request, last_row[id(group)]))
            return
        ids = request.tokens[request.computed :][: max(0, self._budget - work.tokens)]
        if not ids:
            return
        prompt = self.prompts, group.slot, group.length
        work.add(PrefillSpan(self.responses, request.slot, request.computed, ids, prompt))
        request.computed += len(ids)
        if request.computed == len(request.tokens):
            request.ready = True
            work.sampled.append((request, work.tokens - 1))

    # ---- decode

    def decode(self) -> list[Request]:
        """Requests that get one token now, by slot, each with room for it in the cache."""
        self._tidy(self.responses, 1.25)
        self._tidy(self.prompts, 1.25)
        for request in sorted((r for r in self.running if r.ready), key=lambda r: r.number):
            while request.ready and not self.responses.reserve(request.slot, len(request.tokens)):
                if self._evict_idle() or self._tidy(self.responses, 1.0) or self._tidy(self.prompts, 1.0):
                    continue
                self.preempt(max(self.running, key=lambda r: r.number))
        return sorted((r for r in self.running if r.ready), key=lambda r: r.slot)

    def _tidy(self, table: KVSlotTable, factor: float) -> bool:
        """Repack a table whose blocks are used badly. True if blocks came free."""
        used, needed = table.waste()
        if used <= factor * needed and not table.sparse():
            return False
        moved = table.repack()
        if table is self.responses:
            for request in self.running:
                request.slot = moved[request.slot]
        else:
            for group in self.groups.values():
                group.slot = moved[group.slot]
        return used > needed

    def preempt(self, request: Request) -> None:
        """Take the request's place in the cache away; its tokens stay and are prefilled again later."""
        self.preempted += 1
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
        self._leave(request)
        self._hold = False
        idle = [g for g in self.groups.values() if not g.users]
        if len(idle) > max(2, len(self.groups) // 4):
            self._evict(min(idle, key=lambda g: g.last_used))

    # ---- cached prompts

    def _evict_idle(self, keep: str | None = None) -> bool:
        idle = [g for g in self.groups.values() if not g.users and g.key != keep]
        if idle:
            self._evict(min(idle, key=lambda g: g.last_used))
        return bool(idle)

    def _evict(self, group: Group) -> None:
        self.prompts.release(group.slot)
        del self.groups[group.key]

    def forget_cache(self) -> None:
        """Nothing in the cache is true any more (new weights): running responses start over from their tokens."""
        for request in list(self.running):
            self._requeue(request)
        for group in list(self.groups.values()):
            self._evict(group)
        self._hold = False


def _same_prompt(one: Group | Request, other: Request) -> bool:
    return one.prompt is other.prompt or np.array_equal(one.prompt, other.prompt)
