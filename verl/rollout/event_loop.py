"""An event loop in a thread of its own: sampling goes on while the loop's thread updates the model.

It offers what the trainer uses of `asyncio.Runner`, whose coroutines run only while one is waited for.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

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
