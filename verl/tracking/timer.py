"""Where the time of a step goes, and what the loop is doing right now (the watchdog reads it from its thread)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from verl import interrupt


def _nothing(name: str) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase in progress. `since` is time.monotonic() at its start."""

    name: str
    since: float
    waits_for: str


class Phases:
    """Collects `timing_s/*`: `with phases("gen", waits_for="128 responses"): …`.

    Phases nest ("step" around all others); the time of a name that comes several times in a step adds up. Only
    the loop's thread enters phases; reading `current`, `stack` and `idle` is safe from any thread.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._spans: list[tuple[str, float, float]] = []
        self._stack: tuple[Phase, ...] = ()
        self._progress = time.monotonic()
        self.mark: Callable[[str], AbstractContextManager[object]] = _nothing
        """Called with each phase's name, entered with it: a profiler's way to see phases."""

    def start_step(self) -> None:
        """Forget the timings of the step before."""
        self._seconds = {}
        self._spans = []
        self.beat()

    @contextmanager
    def __call__(self, name: str, waits_for: str = "") -> Iterator[None]:
        """Time a phase; counts also when it ends by an exception. Where a run that was asked to stop stops."""
        interrupt.check()
        since = time.monotonic()
        self._stack = (*self._stack, Phase(name, since, waits_for))
        self.beat()
        started = time.perf_counter()
        try:
            with self.mark(name):
                yield
        finally:
            self.add(name, time.perf_counter() - started)
            self._spans.append((name, since, time.monotonic()))
            self._stack = self._stack[:-1]
            self.beat()

    def add(self, name: str, seconds: float) -> None:
        """Count seconds measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def timings(self) -> dict[str, float]:
        """Seconds by phase since `start_step`, a copy."""
        return dict(self._seconds)

    def spans(self) -> list[tuple[str, float, float]]:
        """(phase, from, to) of those that ended since `start_step`, on time.monotonic()."""
        return list(self._spans)

    def beat(self, count: int = 1) -> None:
        """Something moved on (a response came back, a mini-batch is done): the watchdog starts counting anew.

        Takes and ignores a count, so that it can be a progress callback.
        """
        self._progress = time.monotonic()

    def waiting_for(self, text: str) -> None:
        """Say more exactly what the innermost phase waits for. Not progress by itself."""
        if self._stack:
            inner = self._stack[-1]
            self._stack = (*self._stack[:-1], Phase(inner.name, inner.since, text))

    @property
    def current(self) -> Phase | None:
        """The innermost phase in progress."""
        stack = self._stack
        return stack[-1] if stack else None

    @property
    def stack(self) -> tuple[Phase, ...]:
        """All phases in progress, outermost first."""
        return self._stack

    @property
    def idle(self) -> float:
        """Seconds since anything moved."""
        return time.monotonic() - self._progress
