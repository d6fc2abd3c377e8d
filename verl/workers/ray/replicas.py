"""Sampling engines in workers of their own, behind the interface of one engine.

    generate ─▶ queue of a replica ─ one call a tick ─▶ RolloutWorker.submit     a group's requests go to one replica,
    future ◀─── responses ◀──── long poll ─────────── RolloutWorker.results        groups to the least loaded replica

A worker that dies is started again, gets the current weights, and its unfinished requests are sent anew; a response is
taken once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import ray
from ray import exceptions as faults

from verl.engine.rollout.base import Completion, RolloutEngine, SamplingParams
from verl.platform.processes import Identity
from verl.trajectory import Media
from verl.workers import payloads
from verl.workers.payloads import GenerateRequest, GenerateResult
from verl.workers.ray import calls
from verl.workers.ray.calls import WorkerHandle, is_dead, reason

_POLL_S = 10.0
_CALL_S = 120.0
_OTHERS_S = 35.0
_PING_S = 5.0
_CLOSE_S = 10.0
_ABORT_AGAIN_S, _LOOK_S = 1.0, 0.01
_SESSIONS = 1 << 16  # the last so many are remembered
MAX_RESTARTS = 3
"""Deaths of one worker between two weight transfers after which the run ends."""


class SamplerLost(RuntimeError):
    """A sampler died again and again, or could not be started again."""

    explained = True
    ends_the_run = True


class SamplingError(RuntimeError):
    """A sampler could not answer a request; its own error's type and text."""


@dataclass(slots=True)
class _Waiting:
    """A request under way, and what its caller waits for."""

    request: GenerateRequest
    future: asyncio.Future[Completion]

    def settle(self, result: GenerateResult) -> None:
        """Hand a result over; one that is not waited for any more is dropped."""
        if result.completion is None:
            kind, text = result.error or ("Error", "")
            self.fail(ValueError(text) if kind == "ValueError" else SamplingError(f"{kind}: {text}"))
        elif not self.future.done():
            self.future.set_result(result.completion)

    def fail(self, error: Exception) -> None:
        """Raise an error where the request was made."""
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class Replica:
    """One engine. `start()` makes a fresh worker in the place of a dead one, blocking; it returns the worker, its node,
    and what `RolloutWorker.start` says. `reader_nodes`: of each reader, where they are not all on `node`. `guest`: on a
    device of the trainers, beside replicas that have their own; `resting`: it gets no requests."""

    number: int
    start: Callable[[], tuple[WorkerHandle, str, dict[str, Any]]]
    worker: WorkerHandle
    node: str
    readers: list[Identity] = field(default_factory=list)
    reader_nodes: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    dtype: str | None = None
    queue: list[GenerateRequest] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # sessions it has not heard of
    submitted: list[Any] = field(default_factory=list)  # calls of `submit` that have not been looked at
    requests: dict[str, _Waiting] = field(default_factory=dict)
    guest: bool = False
    resting: bool = False
    poll: asyncio.Task[None] | None = None
    reviving: bool = False
    deaths: int = 0
    tokens: int = 0  # at most so many has it still to write
    groups: Counter[str | None] = field(default_factory=Counter)  # requests of each
    _claim: threading.Lock = field(default_factory=threading.Lock)

    def claim(self) -> bool:
        """Begin to replace the worker; False if it is being replaced already. Ends with `reviving = False`."""
        with self._claim:
            mine, self.reviving = not self.reviving, True
            return mine

    def replace(self) -> None:
        """A fresh worker; the old one, which may be out of reach and alive, is ended first. Blocking."""
        end_workers([self.worker])
        self.worker, self.node, facts = self.start()
        self.started(facts)

    def started(self, facts: dict[str, Any]) -> None:
        """Note what `RolloutWorker.start` returned."""
        self.worker.pid, self.dtype, self.devices = facts["pid"], facts["dtype"], list(facts["devices"])
        self.readers = [(int(pid), int(start), int(space)) for pid, start, space in facts["readers"]]
        self.reader_nodes = facts.get("nodes", [])

    def count(self, request: GenerateRequest, change: int) -> None:
        """Note that a request is under way here (1) or is no more (-1)."""
        self.tokens += change * request.tokens
        self.groups[request.group] += change
        if not self.groups[request.group]:
            del self.groups[request.group]

    def unfinished(self) -> list[GenerateRequest]:
        """The requests under way whose response has not come."""
        return [pending.request for pending in list(self.requests.values()) if not pending.future.done()]

    def fail(self, error: Exception) -> None:
        """Fail every request that is under way here."""
        for pending in list(self.requests.values()):
            pending.fail(error)

    def from_outside(self, call: Callable[..., object], *args: Any) -> None:
        """A call in the event loop that takes the results, from any thread; nothing if there is none."""
        if self.poll is not None and not self.poll.get_loop().is_closed():
            self.poll.get_loop().call_soon_threadsafe(call, *args)


class ReplicaPool(RolloutEngine):
    """`refill(replica)` gives a fresh worker the current weights and sets `reviving = False`; it returns the reason if
    the worker died again meanwhile. It blocks, and is called from a thread of its own."""

    def __init__(self, replicas: Sequence[Replica], *, event: Callable[..., None]):
        self.replicas = list(replicas)
        self.refill: Callable[[Replica], str | None] | None = None
        self.event = event
        self._sessions: dict[str, Replica] = {}
        self._flushing = False
        self._placing = threading.Lock()  # a request is placed, or guests begin to rest
        self._version = 0
        self._closed = False
        self._ended: Exception | None = None

    # -- requests -------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
        session: str | None = None,
        media: Media | None = None,
        replica: Replica | None = None,
    ) -> Completion:
        """See `RolloutEngine.generate`. replica: the one that answers, None: any."""
        if self._ended is not None:
            raise self._ended
        ids = np.asarray(prompt_ids, np.int64)
        request = GenerateRequest(request_id, ids, sampling, group, media, session)
        if any(request_id in other.requests for other in self.replicas):
            raise ValueError(f"request_id {request_id!r} is being sampled already: ids must be unique")
        loop = asyncio.get_running_loop()
        with self._placing:
            replica = replica or self._place(session, group)
            pending = replica.requests[request_id] = _Waiting(request, loop.create_future())
        replica.count(request, 1)
        replica.queue.append(request)
        if not self._flushing:
            self._flushing = True
            loop.call_soon(self._flush)
        try:
            completion = await pending.future
            moved = replica.resting and completion.finish_reason == "abort"
            return replace(completion, finish_reason="moved") if moved else completion
        except asyncio.CancelledError:
            self.abort([request_id])
            raise
        finally:
            del replica.requests[request_id]
            replica.count(request, -1)

    @property
    def each_generate(self) -> Sequence[Callable[..., Awaitable[Completion]]]:
        """See `RolloutEngine.each_generate`."""
        return [partial(self.generate, replica=replica) for replica in self.replicas if not replica.resting]

    def end_session(self, session: str) -> None:
        """See `RolloutEngine.end_session`. The replica hears of it with its next requests."""
        if (replica := self._sessions.pop(session, None)) is not None:
            replica.ended.append(session)

    def _place(self, session: str | None, group: str | None) -> Replica:
        """The session's replica, else one for the group."""
        replica = self._sessions.get(session or "")
        if replica is not None and replica.resting:
            replica.ended.append(str(session))
            replica = None
        replica = replica or self._replica_for(group)
        if session is not None:  # its later calls find its prefix there
            self._sessions[session] = replica
            if len(self._sessions) > _SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        return replica

    def _replica_for(self, group: str | None) -> Replica:
        """The one that has requests of this group, else the one with least to do."""
        awake = [replica for replica in self.replicas if not replica.resting]
        having = [replica for replica in awake if group is not None and group in replica.groups]
        return min(having or awake, key=lambda replica: (replica.tokens, replica.number))

    def _flush(self) -> None:
        """Send what was asked for in this tick, one call for each replica."""
        self._flushing = False
        loop = asyncio.get_running_loop()
        for replica in self.replicas:
            if replica.reviving or not replica.queue:
                continue
            queue, replica.queue = replica.queue, []
            ended, replica.ended = replica.ended, []
            try:
                payload = payloads.encode_requests(queue)
                inputs = calls.share_media(request.media for request in queue)
                replica.submitted.append(replica.worker.handle.submit.remote(payload, ended, *inputs))
            except calls.STORE_FULL as error:
                self._ended = SamplerLost(calls.store_full(error))
                for other in self.replicas:
                    other.fail(self._ended)
                return
            if replica.poll is None or replica.poll.done() or replica.poll.get_loop() is not loop:
                replica.poll = loop.create_task(self._collect(replica), name=f"sampler-{replica.number}")

    async def _collect(self, replica: Replica) -> None:
        """Take a replica's results for as long as it owes any."""
        while replica.requests and not self._closed:
            try:
                while replica.submitted:
                    await replica.submitted.pop()
                results = payloads.decode_results(await replica.worker.handle.results.remote(_POLL_S))
            except Exception as error:
                if not is_dead(error):
                    replica.fail(SamplingError(f"{replica.worker}: {reason(error)}"))
                    return
                if not await self._revive(replica, reason(error)):
                    return
                continue
            for result in results:
                if result.id in replica.requests:
                    replica.requests[result.id].settle(result)
            await asyncio.sleep(0)

    def end(self, error: Exception) -> None:
        """Fail every request, now and later: the run cannot go on. From any thread."""
        self._ended = error
        for replica in self.replicas:
            replica.from_outside(replica.fail, error)

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `RolloutEngine.abort`."""
        chosen = None if request_ids is None else set(request_ids)
        for replica in self.replicas:
            ids = {name for name in replica.requests if chosen is None or name in chosen}
            unsent = ids if replica.reviving else ids & {request.id for request in replica.queue}
            replica.queue = [request for request in replica.queue if request.id not in unsent]
            nothing = Completion(np.zeros(0, np.int64), np.zeros(0, np.float32), "abort", ())
            for name in unsent:
                replica.requests[name].settle(GenerateResult(name, nothing))
            if begun := ids - unsent:
                replica.worker.handle.abort.remote(sorted(begun))

    # -- death ----------------------------------------------------------------------------------------------

    async def _revive(self, replica: Replica, why: str) -> bool:
        """A fresh worker with the current weights takes over what the dead one owed. False when there will be none."""
        if replica.claim():
            try:
                await asyncio.to_thread(self._replace, replica, why, self.refill)
            except Exception as error:
                # A node that is lost takes a training worker with it, which is what the user should hear of.
                end = time.monotonic() + _OTHERS_S
                while self._ended is None and time.monotonic() < end:
                    await asyncio.sleep(0.2)
                text = f"{replica.worker} died ({why}) and could not be started again: {error}"
                self.end(self._ended or (error if isinstance(error, SamplerLost) else SamplerLost(text)))
                return False
            if self.refill is None:
                replica.reviving = False
        while replica.reviving:  # a weight transfer has found it dead, too, and starts it
            if self._ended is not None:
                return False
            await asyncio.sleep(0.1)
        replica.submitted.clear()
        replica.queue = replica.unfinished()
        self._flush()
        return True

    def _replace(self, replica: Replica, why: str, refill: Callable[[Replica], str | None] | None) -> None:
        """A fresh worker in the place of a dead one, with its weights from `refill`; anew when that one dies. Blocking.

        SamplerLost after too many deaths; NoRoom, UserError, and what `refill` raises.
        """
        while True:
            replica.deaths += 1
            unfinished = len(replica.requests)
            self.event("sampler_died", sampler=str(replica.worker), reason=why, unfinished=unfinished)
            if self._ended is not None:
                raise self._ended
            if replica.deaths > MAX_RESTARTS:
                raise SamplerLost(
                    f"{replica.worker} died {replica.deaths} times since the last weight transfer; the last time: "
                    f"{why}. If memory is short, lower actor_rollout_ref.rollout.gpu_memory_utilization, max_num_seqs "
                    "or max_model_len"
                )
            try:
                replica.replace()
            except calls.NoRoom:
                raise
            except (calls.WorkerDied, calls.WorkerFailed) as error:
                why = str(error)
                continue
            again = refill(replica) if refill is not None else None
            if again is None:
                break
            why = again
        owed, worker = len(replica.unfinished()), replica.worker
        where = {"node": worker.node, "pid": worker.pid}
        self.event("sampler_restarted", sampler=worker.name, asked_again=owed, **where)

    def find_dead(self, replicas: Sequence[Replica]) -> list[tuple[Replica, str]]:
        """Those of `replicas` whose process or engine is gone, and why. One that is too busy to answer lives."""
        return troubles_of({r: r.worker.handle.alive.remote() for r in replicas}, _PING_S)[0]

    def replace_dead(self, replica: Replica, why: str) -> bool:
        """Start a dead replica again for a weight transfer, which brings its weights and then says `reviving = False`.

        False if it is being replaced already: that replica will ask for the weights. Blocking.
        """
        if not replica.claim():
            return False
        self._replace(replica, why, None)
        return True

    # -- weights and memory ---------------------------------------------------------------------------------

    def weights_pushed(self, version: int) -> None:
        """Every replica holds this version now."""
        self._version = version
        for replica in self.replicas:
            if not replica.reviving:
                replica.deaths = 0

    @property
    def version(self) -> int:
        """See `RolloutEngine.version`."""
        return self._version

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`. Where there are guests they alone sleep, and their requests go on in the
        others."""
        guests = self._guests()
        with self._placing:
            for guest in guests:
                guest.resting = True
        self._empty(guests)
        self._everywhere("sleep", guests or self.replicas)

    def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        self._everywhere("wake", self._guests() or self.replicas)
        for guest in self._guests():
            guest.resting = False

    def _guests(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.guest]

    def _empty(self, guests: Sequence[Replica]) -> None:
        """End the requests of these replicas, from another thread than that of the event loop. SamplerLost for one that
        does not end them."""
        end, again = time.monotonic() + _CALL_S, 0.0
        while pending := {name: entry for guest in guests for name, entry in list(guest.requests.items())}:
            loop = next(iter(pending.values())).future.get_loop()
            if not loop.is_running():  # nobody waits for them now
                return
            if time.monotonic() > end:
                raise SamplerLost(f"samplers on the trainers' devices have not ended {len(pending)} requests")
            if time.monotonic() >= again:  # one that reached the engine after the last abort is aborted now
                again = time.monotonic() + _ABORT_AGAIN_S
                loop.call_soon_threadsafe(self.abort, list(pending))
            time.sleep(_LOOK_S)

    def _everywhere(self, method: str, among: Sequence[Replica] | None = None, *, needed: bool = True) -> list[Any]:
        """A call on every replica (of `among`) that lives; a dead one is found, and started again, where it is needed.

        SamplerLost for one that does not answer, if the call is `needed`; else it is recorded and left out.
        """
        replicas = [replica for replica in (self.replicas if among is None else among) if not replica.reviving]
        refs = [getattr(replica.worker.handle, method).remote() for replica in replicas]
        out = []
        for replica, ref in zip(replicas, refs, strict=True):
            try:
                out.append(ray.get(ref, timeout=_CALL_S))
            except faults.GetTimeoutError:
                text = (
                    f"{replica.worker} has not answered {method!r} for {_CALL_S:g} s: "
                    "it hangs, or its node is overloaded"
                )
                if needed:
                    raise SamplerLost(text) from None
                self.event("sampler_silent", sampler=str(replica.worker), call=method)
            except faults.RayError as error:
                if not is_dead(error):
                    raise
        return out

    def stats(self) -> dict[str, float]:
        """Counters added up over replicas; busy_s is the largest of all."""
        out: dict[str, float] = {}
        for counters in self._everywhere("stats", needed=False):
            for name, value in counters.items():
                old = out.get(name, 0.0)
                out[name] = max(old, value) if name == "busy_s" else old + value
        return out

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._closed = True
        for replica in self.replicas:
            if replica.poll is not None:
                replica.from_outside(replica.poll.cancel)
        end_workers([replica.worker for replica in self.replicas])


def end_workers(workers: Sequence[WorkerHandle]) -> None:
    """End processes of samplers; what an engine has outside of its process goes with `close`, in a limited time."""
    closing = [worker.handle.close.remote() for worker in workers]
    calls.within(lambda: ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S), _CLOSE_S)
    for worker in workers:
        calls.kill(worker.handle)


Troubles = list[tuple[Replica, str]]
"""Replicas, and what is wrong with each."""


def troubles_of(asked: Mapping[Replica, Any], timeout: float) -> tuple[Troubles, Troubles]:
    """After at most `timeout` seconds: replicas whose process is gone, and others that raised or are not done."""
    refs = list(asked.values())
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=timeout)
    dead: Troubles = []
    failed: Troubles = []
    for replica, ref in asked.items():
        try:
            ray.get(ref, timeout=0)
        except faults.RayError as error:
            (dead if is_dead(error) else failed).append((replica, reason(error)))
    return dead, failed
