"""A time limit that holds: code under `section` runs in a process that somebody else will kill.

In a scoring process the section is announced to the run, which kills the process when the time is up: this
also ends C code that never looks at signals, and works from any thread. Nothing is interrupted in the middle
and nothing is turned into a 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Announce = Callable[[float | None, str], None]

_announce: Announce | None = None
_lock = threading.Lock()
_apart = 0.0


def set_announce(announce: Announce) -> None:
    """Called once by a scoring process: how to tell the run that a limited section starts or ends (None)."""
    global _announce
    _announce = announce


def guarded() -> bool:
    """True in a scoring process."""
    return _announce is not None


@contextmanager
def section(seconds: float, what: str) -> Iterator[None]:
    """Run the body with a limit, one thread at a time; waiting for the turn does not count.

    RuntimeError outside of a scoring process, where nobody would enforce the limit.
    """
    if _announce is None:
        raise RuntimeError("a time-limited section needs a scoring process")
    with _lock:
        _announce(seconds, what)
        try:
            yield
        finally:
            _announce(None, what)


@contextmanager
def apart() -> Iterator[None]:
    """Work done once for all calls (importing a library): its seconds are nobody's, see `seconds_apart`."""
    global _apart
    started = time.perf_counter()
    try:
        yield
    finally:
        _apart += time.perf_counter() - started


def seconds_apart() -> float:
    """Seconds spent under `apart` since this process began."""
    return _apart
