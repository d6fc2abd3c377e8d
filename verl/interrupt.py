"""Ctrl-C, SIGTERM, and SIGHUP of a terminal that closes. An exception at an arbitrary moment could corrupt a
checkpoint, a tensor library or a lock.

So while a run trains, the first signal is only noted and obeyed at the next safe point (a phase begins, a response
arrives); a second one interrupts at once, and so does the first one outside of training. Before there is a run, while a
command imports and checks, nothing needs an orderly end.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

# Under nohup the end of the terminal is nothing to the run.
_CLOSED = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *_CLOSED)
_STRAY = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
"""A run has no use for these: they come from a mistake in a user's code, and would end it."""
_patient = False
_noted = False


def check() -> None:
    """A safe point of the main thread: raises KeyboardInterrupt if a signal was noted."""
    if _noted and _patient and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def noted() -> bool:
    """True once a signal has come in `handled`, until that ends."""
    return _noted


def ends_the_process() -> None:
    """Until `handled` takes over, these signals end the process with one line and status 130."""

    def end(number: int, _: Any) -> None:
        with suppress(OSError):
            os.write(2, b"verl: interrupted\n")
        os._exit(130)

    for number in _SIGNALS:
        signal.signal(number, end)


@contextmanager
def handled() -> Iterator[None]:
    """Handle these signals in this block; the old handlers come back after it. Main thread only. From here on `_STRAY`
    signals do not end the process."""
    global _noted
    _noted = False
    for number in _STRAY:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _stray)  # not SIG_IGN, which programs started from here would inherit
            signal.siginterrupt(number, False)
    old = {number: signal.signal(number, _handler) for number in _SIGNALS}
    try:
        yield
    finally:
        _noted = False
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def kept() -> Iterator[None]:
    """Handlers that a library puts in place of ours in this block are taken out again after it."""
    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _SIGNALS} if here else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not installed from Python, and nothing that Python could put back
                signal.signal(number, handler)


@contextmanager
def patient() -> Iterator[None]:
    """In this block the first signal waits for `check`."""
    global _patient
    before, _patient = _patient, True
    try:
        yield
    finally:
        _patient = before


def _stray(number: int, _: Any) -> None:
    with suppress(OSError):
        os.write(2, f"verl: {signal.Signals(number).name} came from another process and is ignored\n".encode())


def _handler(number: int, _: Any) -> None:
    global _noted
    at_once = _noted or not _patient
    _noted = True
    if at_once:
        raise KeyboardInterrupt
    name = signal.Signals(number).name
    # Not print: the main thread may be inside of it.
    with suppress(OSError):  # a full disk under the log: the run stops all the same
        os.write(2, f"\nverl: {name}: stopping after what is in progress; once more to stop at once\n".encode())
