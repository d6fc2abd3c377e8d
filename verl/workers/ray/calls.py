"""Calls to a group of Ray actors: all at once, all results, and a clear account of who died and why."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import exceptions as faults

from verl.engine.rollout.base import EngineDead
from verl.errors import UserError
from verl.trajectory import Media
from verl.workers.group import Each
from verl.workers.payloads import distinct_media

STORE_FULL = (faults.ObjectStoreFullError, faults.OutOfDiskError)
_REACH_S = 25.0
_GRACE_S = 10.0  # how long the true cause may lag behind: a peer notices a broken connection before Ray a dead process


class WorkerDied(RuntimeError):
    """A worker is gone. Of a training worker: the run cannot go on without it."""

    explained = True
    ends_the_run = True


class NoRoom(WorkerDied):
    """A node is lost, and no other has room for what was on it."""


_lost: list[WorkerDied] = []


def lose(error: WorkerDied) -> None:
    """The Ray that this process is connected to is lost: the calls that are waited for, and all later ones, fail so."""
    _lost.append(error)


def joined() -> None:
    """This process is connected to a Ray that works."""
    _lost.clear()


def within(call: Callable[[], object], seconds: float = 5.0) -> None:
    """Make a call that Ray never returns from when its head is gone: at most so long, and not where that is known.

    What it raises in time is raised here.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    if _lost:
        return
    thread = threading.Thread(target=run, name="verl-within", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]


def kill(handle: Any) -> None:
    """End an actor at once."""
    within(lambda: ray.kill(handle))


def share_media(media: Iterable[Media | None]) -> list[Any]:
    """References to the inputs of images, each once: an image is put into the object store once, and goes to a node
    once, whichever worker there reads it. One of STORE_FULL if there is no room."""
    distinct = distinct_media(media)
    for item in distinct:
        if item.stored is None:
            item.stored, item.puts = ray.put(item.inputs), item.puts + 1
    return [item.stored for item in distinct]


class WorkerFailed(RuntimeError):
    """A worker raised an error that is not the user's."""


@dataclass(slots=True)
class WorkerHandle:
    """An actor with what messages say of it. pid 0: its process is not there yet."""

    handle: Any
    name: str
    node: str
    pid: int = 0

    def __str__(self) -> str:
        return f"{self.name} (node {self.node}{f', process {self.pid}' if self.pid else ''})"


class RayCalls:
    """Workers that are called together (`verl.workers.group.Calls`). `beat` is told when a result comes.

    `calling` says what is waited for, `waiting` are those that have not answered; from any thread.
    """

    shares_rows = False

    def __init__(self, workers: Sequence[WorkerHandle], beat: Callable[[], None] | None = None):
        self.workers = list(workers)
        self.calling = ""
        self.waiting: list[WorkerHandle] = []
        self._beat = beat

    def __len__(self) -> int:
        return len(self.workers)

    def call(self, method: str, *args: Any, each: Each = None, doing: str = "") -> list[Any]:
        """method(*args) on every worker, or method(*each[i]) on worker i; results in the workers' order.

        `doing` names the phase in messages. Raises UserError that a worker raised, WorkerDied, WorkerFailed.
        """
        return self.wait(self.start(method, *args, each=each), doing or method)

    def share(self, value: Any, media: Iterable[Media | None] = ()) -> list[Any]:
        """References into the object store, to pass to several workers. UserError if it is full."""
        try:
            return [ray.put(value), *share_media(media)]
        except STORE_FULL as error:
            raise UserError(store_full(error)) from error

    def start(self, method: str, *args: Any, each: Each = None) -> list[Any]:
        """Begin a call; returns its references, for `wait`. UserError if the object store is full."""
        arguments = each if each is not None else [args] * len(self.workers)
        calls = zip(self.workers, arguments, strict=True)
        try:
            return [getattr(worker.handle, method).remote(*values) for worker, values in calls]
        except STORE_FULL as error:
            raise UserError(store_full(error)) from error

    def wait(self, refs: Sequence[Any], doing: str, limit: float = math.inf) -> list[Any]:
        """The results of `start`. The first failure ends the wait: others may wait for the one that failed.

        WorkerFailed after `limit` seconds; what `lose` was given as soon as it was.
        """
        end = time.monotonic() + limit
        place = {ref: i for i, ref in enumerate(refs)}
        results: list[Any] = [None] * len(refs)
        pending = list(refs)
        while pending:
            self.waiting = [self.workers[place[ref]] for ref in pending]
            self.calling = f"{doing}: waiting for {', '.join(map(str, self.waiting[:4]))}"
            if _lost:
                raise _lost[-1]
            if time.monotonic() > end:
                raise WorkerFailed(f"no answer within {limit:g} s; {self.calling}")
            ready, pending = ray.wait(pending, num_returns=1, timeout=1.0)
            for ref in ready:
                try:
                    results[place[ref]] = ray.get(ref)
                except faults.RayError as error:
                    self._explain(place[ref], error, {place[p]: p for p in pending}, doing)
                if self._beat is not None:
                    self._beat()
        self.calling, self.waiting = "", []
        return results

    def _explain(self, number: int, error: Exception, pending: dict[int, Any], doing: str) -> None:
        """Raise what happened, from the point of view of the user; a dead worker beats its peers' errors."""
        failed = {number: error}
        end = time.monotonic() + _GRACE_S
        while not any(is_dead(e) for e in failed.values()) and pending and time.monotonic() < end:
            ready, _ = ray.wait(list(pending.values()), num_returns=1, timeout=0.5)
            for i in [i for i, ref in pending.items() if ref in ready]:
                try:
                    ray.get(pending.pop(i))
                except faults.RayError as other:
                    failed[i] = other
        for i, failure in failed.items():
            if is_dead(failure):
                gone = died(self.workers[i], doing, failure)
                raise (_lost[-1] if _lost else gone) from None
        for failure in failed.values():
            cause = getattr(failure, "cause", None)
            if isinstance(cause, UserError):
                raise UserError(str(cause)) from None
            if isinstance(failure, STORE_FULL):
                raise UserError(store_full(failure)) from None
        raise WorkerFailed(f"{self.workers[number]} failed in {doing}: {reason(error)}") from error

    def kill(self) -> None:
        """End every worker at once."""
        for worker in self.workers:
            kill(worker.handle)


def died(worker: WorkerHandle, doing: str, error: BaseException) -> WorkerDied:
    """What to raise for a training worker that is gone, or out of reach; waits a little to know which."""
    end = time.monotonic() + _REACH_S
    while isinstance(error, faults.ActorUnavailableError) and time.monotonic() < end:
        time.sleep(0.5)
        try:
            ray.get(worker.handle.__ray_ready__.remote(), timeout=max(0.5, end - time.monotonic()))
            break
        except faults.RayError as other:
            error = other
    return WorkerDied(f"{worker} died in {doing}: {reason(error)}")


def is_dead(error: BaseException) -> bool:
    """True for an error that says that the actor, or the engine in it, is gone, not that it raised something."""
    gone = (faults.RayActorError, faults.NodeDiedError, faults.OutOfMemoryError, faults.WorkerCrashedError)
    return isinstance(error, gone) or isinstance(getattr(error, "cause", None), EngineDead)


def reason(error: BaseException) -> str:
    """Why, in one line: the worker's own error, or what Ray knows of its end."""
    cause = getattr(error, "cause", None)
    if cause is not None and isinstance(error, faults.RayTaskError):
        return str(cause) if isinstance(cause, EngineDead) else f"{type(cause).__name__}: {cause}"
    text = " ".join(str(error).split())
    if isinstance(error, (faults.ActorUnavailableError, faults.GetTimeoutError)):
        return "it cannot be reached any more: its node, its process or the network between failed"
    if "node has died" in text or ("node was" in text.lower() and "dead" in text):
        return "its node is lost"
    if isinstance(error, faults.OutOfMemoryError) or "running low on memory" in text:
        return f"the node ran out of memory and Ray ended it: {text[:300]}"
    detail = re.search(r"Worker exit detail: (.*?)(?:\. There are|\s*$)", text)
    if "ray.kill" in text:
        return "it was ended by ray.kill"
    if detail and "connection error code 2" in detail[1]:
        return "its process ended without a word (killed by a signal or for memory, or crashed)"
    return (detail[1] if detail else text)[:400]


def store_full(error: BaseException) -> str:
    """What to do about a full object store."""
    return (
        "Ray's object store is full: the batch on its way to the workers does not fit. Give it more memory "
        "(+ray_kwargs.ray_init.object_store_memory=BYTES, or ray start --object-store-memory), make /dev/shm larger, "
        f"or lower data.train_batch_size or rollout.n ({' '.join(str(error).split())[:200]})"
    )
