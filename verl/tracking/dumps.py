"""Writes files of answers in a thread of its own; a write that fails is an event, not an end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.tracking.jsonl import write_lines

Rows = Callable[[], Sequence[Mapping[str, Any]]]
_BACKLOG = 8


class Dumper:
    """Queue and thread. Up to a few files wait in memory; then `submit` waits for the disk.

    `on_event(kind, **fields)` hears `dump_failed` with path and error.
    """

    def __init__(self, on_event: Callable[..., None]):
        self._on_event = on_event
        self._queue: queue.Queue[tuple[Path, Rows] | None] = queue.Queue(_BACKLOG)
        self._thread: threading.Thread | None = None

    def submit(self, path: Path, rows: Rows) -> None:
        """Write `rows()` to `path` as JSON lines, later, in the thread; the file appears whole or not at all."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="verl-dumps", daemon=True)
            self._thread.start()
        self._queue.put((path, rows))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            path, rows = job
            try:
                write_lines(path, rows())
            except Exception as error:
                self._on_event(
                    "dump_failed",
                    path=str(path),
                    error=f"{type(error).__name__}: {error}",
                    message=f"{path} could not be written ({type(error).__name__}: {error}); the run goes on",
                )
            finally:
                self._queue.task_done()

    def flush(self) -> None:
        """Wait until everything submitted so far is written or reported."""
        self._queue.join()

    def close(self) -> None:
        """Flush and end the thread. May be called twice."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
