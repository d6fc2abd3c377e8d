"""Requests in their order, one worker for all of them, and the futures in which their results wait.

    lane of a model    1 ✓  2 ✓  3 running  4 waits for 3  6 waits for 5, which has not arrived
    sampling           no lane; requests for the same weights run together until one for others or for training is next

A request has an id that follows from what it is (model and number): a client that lost its connection and asks again
gets the same future, and nothing is computed twice. A result is kept until it has been fetched, and then until
`_FETCHED` later ones were.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from verl.errors import UserError
from verl.rollout.http_sessions import NotFound

_FETCHED = 1000
_USER = (UserError, ValueError, TypeError, KeyError, NotFound, FloatingPointError, FileExistsError)
Result = bytes | dict[str, Any]
"""A protobuf message, or the body of a JSON answer."""


@dataclass(slots=True, eq=False)
class Job:
    """A request and, once `done` is set, its result: also an error's, as `{"error": …, "category": …}`.

    shares: what the worker must be set to, by which requests that may run together are alike; None: it runs alone.
    prepare: sets the worker to `shares`. about: what the client is told beside the id.
    """

    id: str
    work: Callable[[], Awaitable[Result]]
    shares: Hashable = None
    prepare: Callable[[], None] = lambda: None
    about: dict[str, Any] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: Result | None = None
    cancelled: bool = False
    task: asyncio.Task[Any] | None = None


@dataclass(slots=True)
class Lane:
    """Requests of one model run by their numbers: `next` is the one that must come now."""

    next: int = 1
    waiting: dict[int, Job] = field(default_factory=dict)


class Work:
    """The futures, and the thread that makes their results. All methods are for the event loop that made it."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._fetched: OrderedDict[str, None] = OrderedDict()
        self._loop = asyncio.get_running_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verl-serve", daemon=True)
        self._thread.start()
        self._started.wait()

    def submit(self, job: Job, lane: Lane | None = None, number: int | None = None) -> Job:
        """The future of a request: that of an earlier one with its id, if there was one. ValueError for a request that
        is over and forgotten."""
        if (earlier := self._jobs.get(job.id)) is not None:
            return earlier
        if lane is None:
            ready = [job]
        else:
            number = lane.next if number is None else number
            if number < lane.next:
                raise ValueError(f"request {job.id} was answered before, and its result is kept no longer")
            lane.waiting[number], ready = job, []
            while lane.next in lane.waiting:
                ready.append(lane.waiting.pop(lane.next))
                lane.next += 1
        self._jobs[job.id] = job
        for ready_job in ready:
            self._worker.call_soon_threadsafe(self._queue.put_nowait, ready_job)
        return job

    async def fetch(self, name: str, patience: float) -> Result | None:
        """The result, None if it is not there within so many seconds. KeyError for an unknown id."""
        job = self._jobs[name]
        try:
            await asyncio.wait_for(job.done.wait(), patience)
        except TimeoutError:
            return None
        self._fetched[name] = None
        self._fetched.move_to_end(name)
        while len(self._fetched) > _FETCHED:
            self._jobs.pop(self._fetched.popitem(last=False)[0], None)
        return job.result

    def cancel(self, name: str) -> None:
        """Nobody waits for this any more; a request that trains runs all the same."""
        if (job := self._jobs.get(name)) is not None and job.shares is not None and self._thread.is_alive():
            self._worker.call_soon_threadsafe(self._cancel, job)

    def pending(self, prefix: str) -> bool:
        """Whether a request is not done whose id begins so."""
        return any(not job.done.is_set() for name, job in self._jobs.items() if name.startswith(prefix))

    def forget(self, prefix: str) -> None:
        """Drop the futures of a session."""
        for name in [name for name in self._jobs if name.startswith(prefix)]:
            self.cancel(name)
            del self._jobs[name]
            self._fetched.pop(name, None)

    def close(self) -> None:
        """Stop the worker after what it is at."""
        self._worker.call_soon_threadsafe(self._queue.put_nowait, None)
        self._thread.join()

    # -- on the worker's thread

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._worker = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Job | None] = asyncio.Queue()
        self._started.set()
        together: set[asyncio.Task[None]] = set()
        current: Hashable = None
        while (job := await self._queue.get()) is not None:
            if job.shares is None or job.shares != current:
                await asyncio.gather(*together)
                together.clear()
                current = job.shares
            task = asyncio.create_task(self._guarded(job))
            if job.shares is None:
                await task
            else:
                together.add(task)
                task.add_done_callback(together.discard)
        for task in together:
            task.cancel()

    async def _guarded(self, job: Job) -> None:
        try:
            if job.cancelled:
                raise asyncio.CancelledError
            job.task = asyncio.current_task()
            job.prepare()
            result = await job.work()
        except asyncio.CancelledError:
            result = {"error": "the request was cancelled", "category": "user"}
        except Exception as error:
            is_server_error = not isinstance(error, _USER)
            if is_server_error:
                traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}", "category": "server" if is_server_error else "user"}
        self._loop.call_soon_threadsafe(self._finish, job, result)

    def _cancel(self, job: Job) -> None:
        job.cancelled = True
        if job.task is not None:
            job.task.cancel()

    @staticmethod
    def _finish(job: Job, result: Result) -> None:
        job.result = result
        job.done.set()
