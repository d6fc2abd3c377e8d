"""What engines with processes of their own share: their event loop, how their processes end, and their requests."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from verl.engine.rollout.base import Completion
from verl.platform.processes import alive

T = TypeVar("T")
# A process: its id and when it started.
Process = tuple[int, int]
_BYTES_PER_CHARACTER = 4


class LoopThread:
    """A thread with an event loop in which an asynchronous engine lives.

    The engine ties its sockets and tasks to one loop; callers come from any loop, and from none (weights, sleep, close).
    """

    def __init__(self, name: str):
        resource_tracker.ensure_running()  # its start would unblock the signal below
        self._runner, self._stopped = asyncio.Runner(loop_factory=asyncio.new_event_loop), asyncio.Event()
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Its processes inherit this: an interrupt at the terminal is the driver's to handle.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with self._runner:  # its end cancels what was still running
            self._runner.run(self._stopped.wait())

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine. RuntimeError after `stop`."""
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("the sampling engine is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine and wait for what it returns."""
        future = self.submit(work)
        try:
            return future.result(timeout)
        except BaseException:  # nobody waits for it any more
            future.cancel()
            raise

    def stop(self) -> None:
        """End the thread; what was still running is cancelled."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(10)


def end(processes: set[Process], patience: float = 5.0) -> None:
    """Wait for processes to be gone; kill those that are not, and wait again. This process is never among them."""
    remaining = {p for p in processes if p[0] != os.getpid() and p[1]}
    for _ in range(2):
        deadline = time.monotonic() + patience
        while (remaining := {p for p in remaining if alive(*p)}) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid, _ in remaining:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def end_token_ids(model_config: Any, path: str, tokenizer: Any) -> list[int]:
    """Every id that ends a response: the generation config's, the model's and the tokenizer's."""
    from transformers import GenerationConfig

    from verl.models.pretrained import end_token_ids as end_tokens_of

    generation: Any = None
    with contextlib.suppress(OSError):  # a model without one
        generation = GenerationConfig.from_pretrained(path)
    return end_tokens_of(generation, model_config, tokenizer)


def ended_at_seam(
    done: Completion, begun: Sequence[int], stops: Sequence[str], decode: Callable[[list[int]], str]
) -> Completion:
    """A response whose first tokens, `begun`, came with the prompt: cut where a stop string ends that began in those.
    The engine looks for stop strings only in what it writes itself."""
    reach = _BYTES_PER_CHARACTER * max(map(len, stops))
    before, ids = list(begun[-reach:]), done.token_ids.tolist()
    if any(stop in decode(before) for stop in stops):
        return done
    for count in range(1, min(len(ids), reach) + 1):
        text = decode(before + ids[:count])
        if any(stop in text for stop in stops):
            ids, log_probs = done.token_ids[:count], done.log_probs[:count]
            return replace(done, token_ids=ids, log_probs=log_probs, finish_reason="stop")
    return done


class BusyTime:
    """Time with requests running. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running = 0
        self._since = 0.0
        self._sum = 0.0

    def count(self, change: int) -> None:
        """So many more requests are under way (or fewer)."""
        with self._lock:
            now = time.monotonic()
            if self._running:
                self._sum += now - self._since
            self._since, self._running = now, self._running + change

    def take(self) -> float:
        """Seconds since the last call."""
        with self._lock:
            self.count(0)
            out, self._sum = self._sum, 0.0
            return out
