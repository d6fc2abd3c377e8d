"""Says who waits for what when nothing moves: the phase, for how long, and where every thread stands.

A thread looks at `Phases.idle`. When the interpreter itself is stuck (native code that holds its lock), that
thread cannot run either: then faulthandler, which needs no interpreter, writes the stacks.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from verl.tracking.timer import Phases

_MAX_FRAMES = 40


class Watchdog:
    """Reports after `timeout` seconds without progress, then after 2, 4, 8 … times that, until something moves.

    `on_event("watchdog", …)` gets the report; stderr shows it. `extra()` may add lines, e.g. what workers say of
    themselves. A timeout ≤ 0 or None switches it off. Use it as a context manager.
    """

    def __init__(
        self,
        phases: Phases,
        timeout: float | None,
        on_event: Callable[..., None],
        *,
        extra: Callable[[], str] = str,
    ):
        self._phases = phases
        self._timeout = float(timeout or 0)
        self._on_event = on_event
        self._extra = extra
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="verl-watchdog", daemon=True)
        self.reports = 0

    def __enter__(self) -> Watchdog:
        if self._timeout > 0:
            self._phases.beat()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timeout > 0:
            self._stop.set()
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        pause, due = min(1.0, self._timeout / 4), self._timeout
        while not self._stop.wait(pause):
            idle = self._phases.idle
            if idle < self._timeout:
                due = self._timeout
            elif idle >= due:
                self._report(idle)
                due = idle * 2
            with suppress(AttributeError, ValueError, OSError):  # a stderr without a file descriptor
                faulthandler.dump_traceback_later(self._timeout + 2 * pause, file=sys.stderr)

    def _report(self, idle: float) -> None:
        self.reports += 1
        stacks, extra, phase = all_stacks(), self._asked(), self._phases.current
        self._on_event(
            "watchdog",
            phase=phase.name if phase else None,
            waits_for=phase.waits_for if phase else None,
            idle_s=round(idle, 1),
            extra=extra,
            stacks=stacks,
        )
        text = f"verl: watchdog: no progress for {idle:.0f} s: {self._describe()}"
        print("\n".join(filter(None, [text, extra, stacks])), file=sys.stderr, flush=True)

    def _asked(self) -> str:
        """What `extra` says; an error of it costs its own lines, not the report and all later ones."""
        try:
            return self._extra()
        except Exception as error:
            return f"the workers cannot be asked: {type(error).__name__}: {error}"

    def _describe(self) -> str:
        """One line: the phases in progress, outermost first, each with its age and what it waits for."""
        now = time.monotonic()
        stack = self._phases.stack
        if not stack:
            return "between phases"
        parts = [
            f"{p.name} since {now - p.since:.0f} s" + (f", waiting for {p.waits_for}" if p.waits_for else "")
            for p in stack
        ]
        return "in " + " > ".join(parts)


def all_stacks() -> str:
    """Where every thread of this process stands, by name; the caller's own thread is left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: list[str] = []
    frames: dict[int, Any] = sys._current_frames()
    for ident, frame in sorted(frames.items(), key=lambda item: item[0] != threading.main_thread().ident):
        if ident == threading.get_ident():
            continue
        lines = traceback.format_list(traceback.extract_stack(frame)[-_MAX_FRAMES:])
        parts.append(f"thread {names.get(ident, '?')} ({ident}) of process {os.getpid()}:\n{''.join(lines)}")
    return "\n".join(parts)
