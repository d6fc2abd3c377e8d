"""An event loop in a thread of its own: sampling goes on while the loop's thread updates the model. And a user's code,
asked on a loop.

The first offers what the trainer uses of `asyncio.Runner`, whose coroutines run only while one is waited for.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class Loop(Protocol):
    """Runs coroutines for a caller that waits: `asyncio.Runner`, or a `BackgroundLoop`."""

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run to the end and return the result."""
        ...


class BackgroundLoop:
    """Use as a context manager. On leaving, everything that still runs is cancelled and waited for."""

    def __init__(self, name: str = "verl-sampling"):
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._forever, name=name, daemon=True)

    def __enter__(self) -> BackgroundLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run on the loop's thread and wait. Raises what it raises; an interruption of the waiter cancels it."""
        future = asyncio.run_coroutine_threadsafe(coro, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise asyncio.CancelledError from None  # as asyncio.Runner does; the other kind is an Exception
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _forever(self) -> None:
        with self._runner:  # whose end cancels what still runs, waits for it, and closes the loop
            self._loop.run_forever()


def spawn(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose error nobody need ask for: asyncio does not complain of it."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def users_code(code: Awaitable[T]) -> T:
    """What a user's coroutine gives. RuntimeError for what would end more than it: `sys.exit` ends the event loop, and
    whoever waits for a task that was cancelled from inside waits for ever, so the coroutine has a task of its own."""

    async def guarded() -> T:
        try:
            return await code
        except SystemExit as raised:
            raise RuntimeError(repr(raised)) from raised

    try:
        return await asyncio.ensure_future(guarded())
    except asyncio.CancelledError as raised:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError(repr(raised)) from raised


async def within(seconds: float | None, code: Awaitable[T]) -> T:
    """What a user's coroutine gives (`users_code`). TimeoutError after so many seconds, None for no deadline."""
    async with asyncio.timeout(seconds):
        return await users_code(code)


MOST_THREADS = 128
_ROOMS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def thread_room() -> asyncio.Semaphore:
    """What a caller of `in_thread` holds until it has its result, before its deadline begins: an event loop runs at
    most MOST_THREADS such calls at once. One past its deadline gives its room to the next, whatever its thread goes on
    doing."""
    return _ROOMS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MOST_THREADS))


async def in_thread(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Call a function in a daemon thread of its own: threads that are used again would all end up in calls that never
    return."""
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # whoever waits may give up; the thread goes on

    def call() -> None:
        try:
            done.set_result(function(**arguments))
        # sys.exit too: raised on, it would end the event loop; left here, the caller would wait.
        except BaseException as raised:
            done.set_exception(raised if isinstance(raised, Exception) else RuntimeError(repr(raised)))

    threading.Thread(target=call, name="verl-tool", daemon=True).start()
    return await asyncio.wrap_future(done)
