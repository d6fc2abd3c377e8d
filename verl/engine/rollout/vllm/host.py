"""A thread with an event loop in which vLLM's asynchronous engine lives.

vLLM ties its sockets and tasks to one loop; callers here come from any loop, and from none (weights, sleep, close).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import threading
from collections.abc import Callable, Coroutine
from multiprocessing import resource_tracker
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines in a thread of its own."""

    def __init__(self, name: str):
        resource_tracker.ensure_running()  # its start would unblock the signal below
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # vLLM's processes inherit this: an interrupt at the terminal is the driver's to handle.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine. RuntimeError after `stop`."""
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("the vLLM engine is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine and wait for what it returns."""
        future = self.submit(work)
        try:
            return future.result(timeout)
        except BaseException:  # nobody waits for it any more
            future.cancel()
            raise

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the thread, later."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def stop(self) -> None:
        """End the thread; what was still running is cancelled."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel_all)
            self._thread.join(10)

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)
