"""Sampling engines in hosts of their own, behind the interface of one engine.

    generate ─▶ queue of a host ─ one call a tick ─▶ RolloutWorker.submit        a group's requests go to one replica,
    future ◀─── responses ◀──── long poll ─────────── RolloutWorker.results        groups to the replica with least to do

A host that dies is started again, gets the current weights, and its unfinished requests are asked anew; a response is
taken once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray import exceptions as faults

from verl.engine.rollout.base import Completion, RolloutEngine, SamplingParams
from verl.platform.processes import Identity
from verl.workers import codec
from verl.workers.ray.calls import (
    NoRoom,
    WorkerDied,
    WorkerFailed,
    WorkerHandle,
    is_dead,
    kill,
    reason,
    store_full,
    within,
)

_POLL_S = 10.0
_CALL_S = 120.0
_OTHERS_S = 35.0
_PING_S = 5.0
_CLOSE_S = 10.0
_TOGETHER = ("busy_s", "cache_peak")
_SESSIONS = 1 << 16  # the last so many are remembered
MAX_RESTARTS = 3
"""Deaths of one host between two weight transfers after which the run ends."""


class SamplerLost(RuntimeError):
    """A sampler died again and again, or could not be started again."""

    explained = True
    ends_the_run = True


@dataclass(slots=True)
class _Request:
    ask: codec.GenerateRequest
    future: asyncio.Future[Completion]
    host: Replica


@dataclass(slots=True, eq=False)
class Replica:
    """One engine. `start()` makes a fresh worker in the place of a dead one, blocking; it returns the worker, its node,
    and what the host says of itself when it has started."""

    number: int
    start: Callable[[], tuple[WorkerHandle, str, dict[str, Any]]]
    worker: WorkerHandle
    node: str
    readers: list[Identity] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    dtype: str | None = None
    queue: list[codec.GenerateRequest] = field(default_factory=list)
    requests: dict[str, _Request] = field(default_factory=dict)
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

    def owe(self, request: _Request) -> None:
        """Note a request that this host is to answer."""
        self.requests[request.ask.id] = request
        self.tokens += request.ask.tokens
        self.groups[request.ask.group] += 1

    def settled(self, request: _Request) -> bool:
        """Forget a request; True if it was the last of its group here."""
        del self.requests[request.ask.id]
        self.tokens -= request.ask.tokens
        self.groups[request.ask.group] -= 1
        if self.groups[request.ask.group]:
            return False
        del self.groups[request.ask.group]
        return True


class ReplicaPool(RolloutEngine):
    """`refill(host)` gives a fresh host the current weights and says `reviving = False`; it returns why, if the host died
    again meanwhile. Blocking, called from a thread of its own."""

    def __init__(self, hosts: Sequence[Replica], *, event: Callable[..., None]):
        self.hosts = list(hosts)
        self.refill: Callable[[Replica], str | None] | None = None
        self.event = event
        self._homes: dict[str, Replica] = {}
        self._sessions: dict[str, Replica] = {}
        self._flushing = False
        self._version = 0
        self._closed = False
        self._ended: Exception | None = None
        self._sending: set[asyncio.Task[None]] = set()

    # -- requests -------------------------------------------------------------------------------------------

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
        """See `RolloutEngine.generate`."""
        if media:
            raise ValueError(f"request {request_id!r}: media cannot be sent to another process yet")
        if self._ended is not None:
            raise self._ended
        ask = codec.GenerateRequest(request_id, np.asarray(prompt_ids, np.int64), sampling, group)
        host = self._sessions.get(session or "") or self._host_for(ask)
        if session is None:
            self._remember(request_id, host)
        if request_id in host.requests:
            raise ValueError(f"request_id {request_id!r} is being sampled already: ids must be unique")
        loop = asyncio.get_running_loop()
        request = _Request(ask, loop.create_future(), host)
        host.owe(request)
        host.queue.append(ask)
        if not self._flushing:
            self._flushing = True
            loop.call_soon(self._flush)
        try:
            return await request.future
        except asyncio.CancelledError:
            self.abort([request_id])
            raise
        finally:
            if host.settled(request) and group is not None:
                self._homes.pop(group, None)

    def _remember(self, session: str, host: Replica) -> None:
        """Later calls of this session find its prefix there."""
        self._sessions[session] = host
        if len(self._sessions) > _SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    def _host_for(self, ask: codec.GenerateRequest) -> Replica:
        home = self._homes.get(ask.group) if ask.group is not None else None
        if home is None:
            home = min(self.hosts, key=lambda host: (host.tokens, host.number))
            if ask.group is not None:
                self._homes[ask.group] = home
        return home

    def _flush(self) -> None:
        """Send what was asked in this tick, one call for each host."""
        self._flushing = False
        for host in self.hosts:
            if host.reviving or not host.queue:
                continue
            queue, host.queue = host.queue, []
            try:
                sent = host.worker.handle.submit.remote(codec.encode_requests(queue))
            except (faults.ObjectStoreFullError, faults.OutOfDiskError) as error:
                self.end(SamplerLost(store_full(error)))
                assert self._ended is not None
                for each in self.hosts:  # also those that have not been asked for responses yet
                    self._fail(each, self._ended)
                return
            task = asyncio.get_running_loop().create_task(self._sent(host, sent))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
            self._watch(host)

    async def _sent(self, host: Replica, call: Any) -> None:
        """Notice requests that a living host could not take; what a dead one was sent is sent again."""
        try:
            await call
        except Exception as error:
            if not is_dead(error):
                self._fail(host, SamplingError(f"{host.worker}: {reason(error)}"))

    def _watch(self, host: Replica) -> None:
        loop = asyncio.get_running_loop()
        if host.poll is None or host.poll.done() or host.poll.get_loop() is not loop:
            host.poll = loop.create_task(self._collect(host), name=f"sampler-{host.number}")

    async def _collect(self, host: Replica) -> None:
        """Take a replica's results for as long as it owes any."""
        while host.requests and not self._closed:
            try:
                responses = codec.decode_results(await host.worker.handle.results.remote(_POLL_S))
            except Exception as error:
                if not is_dead(error):
                    self._fail(host, SamplingError(f"{host.worker}: {reason(error)}"))
                    return
                if not await self._revive(host, reason(error)):
                    return
                continue
            for response in responses:
                self._settle(host, response)
            await asyncio.sleep(0)

    def _settle(self, host: Replica, response: codec.GenerateResult) -> None:
        """Hand a response over; one that is not waited for any more is dropped."""
        request = host.requests.get(response.id)
        if request is None or request.future.done():
            return
        if response.completion is not None:
            request.future.set_result(response.completion)
        else:
            kind, text = response.error or ("Error", "")
            request.future.set_exception(
                ValueError(text) if kind == "ValueError" else SamplingError(f"{kind}: {text}")
            )

    def _fail(self, host: Replica, error: Exception) -> None:
        for request in list(host.requests.values()):
            if not request.future.done():
                request.future.set_exception(error)

    def end(self, error: Exception) -> None:
        """Fail every request, now and later: the run cannot go on. From any thread."""
        self._ended = error
        for host in self.hosts:
            if host.poll is not None and not host.poll.get_loop().is_closed():
                host.poll.get_loop().call_soon_threadsafe(self._fail, host, error)

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `RolloutEngine.abort`."""
        wanted = None if request_ids is None else set(request_ids)
        for host in self.hosts:
            ids = [name for name in host.requests if wanted is None or name in wanted]
            if not ids:
                continue
            if host.reviving:
                for name in ids:
                    self._settle(host, codec.GenerateResult(name, _nothing()))
            else:
                host.worker.handle.abort.remote(ids)

    # -- death ----------------------------------------------------------------------------------------------

    async def _revive(self, host: Replica, why: str) -> bool:
        """A fresh host with the current weights takes over what the dead one owed. False when there will be none."""
        if host.claim():
            try:
                await asyncio.to_thread(self._replace, host, why, self.refill)
            except Exception as error:
                # A node that is lost takes a training worker with it, which is what the user should hear of.
                end = time.monotonic() + _OTHERS_S
                while self._ended is None and time.monotonic() < end:
                    await asyncio.sleep(0.2)
                text = f"{host.worker} died ({why}) and could not be started again: {error}"
                self.end(self._ended or (error if isinstance(error, SamplerLost) else SamplerLost(text)))
                return False
            if self.refill is None:
                host.reviving = False
        while host.reviving:  # a weight transfer has found it dead, too, and starts it
            if self._ended is not None:
                return False
            await asyncio.sleep(0.1)
        host.queue = [request.ask for request in host.requests.values() if not request.future.done()]
        self._flush()
        return True

    def _replace(self, host: Replica, why: str, refill: Callable[[Replica], str | None] | None) -> None:
        """A fresh worker in the place of a dead one, with its weights from `refill`; anew when that one dies. Blocking.

        SamplerLost after too many deaths; NoRoom, UserError, and what `refill` raises.
        """
        while True:
            host.deaths += 1
            self.event("sampler_died", sampler=str(host.worker), reason=why, unfinished=len(host.requests))
            if self._ended is not None:
                raise self._ended
            if host.deaths > MAX_RESTARTS:
                raise SamplerLost(self._often(host, why))
            try:
                host.replace()
            except NoRoom:
                raise
            except (WorkerDied, WorkerFailed) as error:
                why = str(error)
                continue
            again = refill(host) if refill is not None else None
            if again is None:
                break
            why = again
        owed = sum(not request.future.done() for request in list(host.requests.values()))
        where = {"node": host.worker.node, "pid": host.worker.pid}
        self.event("sampler_restarted", sampler=host.worker.name, asked_again=owed, **where)

    def _often(self, host: Replica, why: str) -> str:
        return (
            f"{host.worker} died {host.deaths} times since the last weight transfer; the last time: {why}. If memory is "
            "short, lower actor_rollout_ref.rollout.gpu_memory_utilization, max_num_seqs or max_model_len"
        )

    def find_dead(self, hosts: Sequence[Replica]) -> list[tuple[Replica, str]]:
        """Those of `hosts` whose process or engine is gone, and why. One that is too busy to answer lives."""
        return dead_among({host: host.worker.handle.alive.remote() for host in hosts}, _PING_S)

    def replace_dead(self, host: Replica, why: str) -> bool:
        """Start a dead host again for a weight transfer, which brings its weights and then says `reviving = False`.

        False if it is being replaced already: that replica will ask for the weights. Blocking.
        """
        if not host.claim():
            return False
        self._replace(host, why, None)
        return True

    # -- weights and memory ---------------------------------------------------------------------------------

    def weights_pushed(self, version: int) -> None:
        """Every host holds this version now."""
        self._version = version
        for host in self.hosts:
            if not host.reviving:
                host.deaths = 0

    @property
    def version(self) -> int:
        """See `RolloutEngine.version`."""
        return self._version

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        self._everywhere("sleep")

    def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        self._everywhere("wake")

    def _everywhere(self, method: str, *, needed: bool = True) -> list[Any]:
        """A call on every host that lives; a dead one is found, and started again, where it is needed.

        SamplerLost for one that does not answer, if the call is `needed`; else it is recorded and left out.
        """
        hosts = [host for host in self.hosts if not host.reviving]
        refs = [getattr(host.worker.handle, method).remote() for host in hosts]
        out = []
        for host, ref in zip(hosts, refs, strict=True):
            try:
                out.append(ray.get(ref, timeout=_CALL_S))
            except faults.GetTimeoutError:
                text = f"{host.worker} has not answered {method!r} for {_CALL_S:g} s: it hangs, or its node is overloaded"
                if needed:
                    raise SamplerLost(text) from None
                self.event("sampler_silent", sampler=str(host.worker), call=method)
            except faults.RayError as error:
                if not is_dead(error):
                    raise
        return out

    def stats(self) -> dict[str, float]:
        """Counters added up over hosts; busy_s and cache_peak are the largest of all."""
        out: dict[str, float] = {}
        for found in self._everywhere("stats", needed=False):
            for name, value in found.items():
                old = out.get(name, 0.0)
                out[name] = max(old, value) if name in _TOGETHER else old + value
        return out

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._closed = True
        for host in self.hosts:
            if host.poll is not None and not host.poll.get_loop().is_closed():
                host.poll.get_loop().call_soon_threadsafe(host.poll.cancel)
        end_workers([host.worker for host in self.hosts])


def end_workers(workers: Sequence[WorkerHandle]) -> None:
    """End processes of hosts; what an engine has outside of its process goes with `close`, in a limited time."""
    closing = [worker.handle.close.remote() for worker in workers]
    within(lambda: ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S), _CLOSE_S)
    for worker in workers:
        kill(worker.handle)


def dead_among(calls: Mapping[Replica, Any], timeout: float) -> list[tuple[Replica, str]]:
    """Hosts whose call has ended within `timeout` seconds because the process is gone, and why."""
    if not calls:
        return []
    ended, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout)
    dead = []
    for host, ref in calls.items():
        try:
            if ref in ended:
                ray.get(ref)
        except faults.RayError as error:
            if is_dead(error):
                dead.append((host, reason(error)))
    return dead


class SamplingError(RuntimeError):
    """A sampler could not answer a request; its own error's type and text."""


def _nothing() -> Completion:
    return Completion(np.zeros(0, np.int64), np.zeros(0, np.float32), "abort", ())
