"""Where the time of a step goes, what the loop is doing right now, and who waits for what when nothing moves.

`Phases` collects `timing_s/*`; `Timeline` writes when the sampler had requests and what the trainer did, step by step,
on one clock; `Watchdog` reports a run that stands still; `profiled` frames what a profile shows, if there is one.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl import interrupt
from verl.tracking.hooks import RunHooks
from verl.tracking.jsonl import JsonLines

if TYPE_CHECKING:
    from verl.tracking.profiler import Profiler, StepProfiler

Span = tuple[float, float]
PhaseSpan = tuple[str, float, float]
WAITING = ("gen", "reward")
"""Phases in which the trainer has nothing to compute."""
_WHOLE = "step"
_MAX_FRAMES = 40


# ------------------------------------------------------------------------------------------------------- phases


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase in progress. `since` is time.monotonic() at its start."""

    name: str
    since: float
    waits_for: str


class Phases:
    """Collects `timing_s/*`: `with phases("gen", waits_for="128 responses"): …`.

    Phases nest ("step" around all others); the time of a name that comes several times in a step adds up. Only
    the loop's thread enters phases; reading `stack` and `idle` is safe from any thread.
    """

    def __init__(self) -> None:
        self.spans: list[PhaseSpan] = []
        """(phase, from, to) of those that ended since `start_step`, on time.monotonic()."""
        self.stack: tuple[Phase, ...] = ()
        """All phases in progress, outermost first."""
        self._progress = time.monotonic()
        self.mark: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Called with each phase's name, entered with it: a profiler's way to see phases."""

    def start_step(self) -> None:
        """Forget the timings of the step before."""
        self.spans = []
        self.beat()

    @contextmanager
    def __call__(self, name: str, waits_for: str = "") -> Iterator[None]:
        """Time a phase; counts also when it ends by an exception. Where a run that was asked to stop stops."""
        interrupt.check()
        since = time.monotonic()
        self.stack = (*self.stack, Phase(name, since, waits_for))
        self.beat()
        try:
            with self.mark(name):
                yield
        finally:
            self.spans.append((name, since, time.monotonic()))
            self.stack = self.stack[:-1]
            self.beat()

    def timings(self) -> dict[str, float]:
        """Seconds by phase since `start_step`."""
        out: dict[str, float] = {}
        for name, begin, end in self.spans:
            out[name] = out.get(name, 0.0) + end - begin
        return out

    def beat(self, count: int = 1) -> None:
        """Something moved on (a response came back, a mini-batch is done): the watchdog starts counting anew.

        Takes and ignores a count, so that it can be a progress callback.
        """
        self._progress = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since anything moved."""
        return time.monotonic() - self._progress


# ---------------------------------------------------------------------------------------------- stretches of a profile


@contextmanager
def profiled(profiler: Profiler | None, step: int, phases: Phases, tracking: Any) -> Iterator[None]:
    """Frame a step of the loop; phases become ranges of the profile. Its files are an event, and a notice.

    A step that raises leaves the profile open: `close` writes what there is of it.
    """
    if profiler is None:
        yield
        return
    phases.mark = profiler.span
    with phases("start_profile"):
        profiler.start(step)
    yield
    with phases("stop_profile"):
        files = profiler.stop(step)
    if files:
        message = f"profile of step {step}: {', '.join(files)}"
        tracking.event("profile", step=step, files=files, message=message)


class Profiled:
    """What a worker process offers for its profile; `profiler` is set when the worker knows its device."""

    profiler: StepProfiler | None = None

    def profile(self, action: str, *step: int) -> list[str]:
        """`start`, `stop` or `close` of this worker's profiler; returns the files that were written."""
        return (getattr(self.profiler, action)(*step) or []) if self.profiler is not None else []

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Mark a stretch of a step in this worker's profile, if there is one now."""
        return self.profiler.span(name) if self.profiler is not None else nullcontext()


# ------------------------------------------------------------------------------------------------------- timeline


class StepTimes:
    """A step on the clock. phases: `Phases.spans`, with the whole "step" once; sampler: spans in which the sampler had
    requests (`ResumableGeneration.busy`)."""

    def __init__(self, phases: Sequence[PhaseSpan], sampler: Sequence[Span]):
        ((self.begin, self.end),) = [(a, b) for name, a, b in phases if name == _WHOLE]
        self.trainer = [span for span in phases if span[0] != _WHOLE]
        self.sampler = sampler

    def metrics(self, samplers: int, trainers: int) -> dict[str, float]:
        """perf/sampler_idle_ratio: share of the step in which the sampler had no request; perf/trainer_idle_ratio: in
        which the trainer waited for responses or scores. Where the sampler has `samplers` devices of its own,
        perf/device_busy_ratio over both."""
        busy = sum(min(b, self.end) - max(a, self.begin) for a, b in self.sampler if b > self.begin)
        waited = sum(b - a for name, a, b in self.trainer if name in WAITING)
        sampler, trainer = self._share(self.end - self.begin - busy), self._share(waited)
        out = {"perf/sampler_idle_ratio": sampler, "perf/trainer_idle_ratio": trainer}
        if samplers:
            idle = samplers * sampler + trainers * trainer
            out["perf/device_busy_ratio"] = 1 - idle / (samplers + trainers)
        return out

    def _share(self, seconds: float) -> float:
        whole = self.end - self.begin
        return min(1.0, max(0.0, seconds / whole)) if whole > 0 else float("nan")


class Timeline:
    """Appends to timeline.jsonl; `notice` reports a failed write once, and the lines are kept and tried again.

    One object per step: {"step", "begin", "end", "sampler": [[from, to], …], "trainer": [[phase, from, to], …]}, in
    unix seconds. `gen` and `reward` among the phases are times in which the trainer waited.
    """

    def __init__(self, path: Path, notice: Callable[[str], None]):
        self._offset = time.time() - time.monotonic()
        self._lines = JsonLines(path, notice)

    def write(self, step: int, times: StepTimes) -> None:
        """One line."""

        def at(*clock: float) -> list[float]:
            return [round(seconds + self._offset, 4) for seconds in clock]

        begin, end = at(times.begin, times.end)
        sampler = [at(*span) for span in times.sampler]
        trainer = [[name, *at(a, b)] for name, a, b in times.trainer]
        self._lines.append({"step": step, "begin": begin, "end": end, "sampler": sampler, "trainer": trainer})


# ------------------------------------------------------------------------------------------------------- watchdog


class Watchdog:
    """Reports after `timeout` seconds without progress, then after 2, 4, 8 … times that, until something moves: the
    phase, for how long, and where every thread stands.

    `on_event("watchdog", …)` gets the report; stderr shows it. `extra()` may add lines, e.g. what workers say of
    themselves. A timeout ≤ 0 or None switches it off. Use it as a context manager.

    A thread looks at `Phases.idle`. When the interpreter itself is stuck (native code that holds its lock), that
    thread cannot run either: then faulthandler, which needs no interpreter, writes the stacks.
    """

    def __init__(
        self,
        phases: Phases,
        timeout: float | None,
        on_event: Callable[..., None],
        *,
        extra: Callable[[], str] = str,
    ):
        self.extra = extra
        self._phases = phases
        self._timeout = float(timeout or 0)
        self._on_event = on_event
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="verl-watchdog", daemon=True)

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

    def hooks(self, tracking: Any) -> RunHooks:
        """What a run's parts tell while this watches it; who they wait for becomes its `extra`."""
        return RunHooks(
            tracking.event_of_step,
            tracking.notice,
            self._phases.beat,
            lambda: next((phase.name for phase in reversed(self._phases.stack)), ""),
            partial(setattr, self, "extra"),
        )

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
        stack, stacks, now = self._phases.stack, all_stacks(), time.monotonic()
        try:
            extra = self.extra()
        except Exception as error:  # costs its own lines, not the report and all later ones
            extra = f"the workers cannot be asked: {type(error).__name__}: {error}"
        name, waits_for = (stack[-1].name, stack[-1].waits_for) if stack else (None, None)
        idle_s = round(idle, 1)
        self._on_event("watchdog", phase=name, waits_for=waits_for, idle_s=idle_s, extra=extra, stacks=stacks)
        waits = [f", waiting for {phase.waits_for}" if phase.waits_for else "" for phase in stack]
        phases = [f"{p.name} since {now - p.since:.0f} s{w}" for p, w in zip(stack, waits, strict=True)]
        where = "in " + " > ".join(phases) if phases else "between phases"
        text = f"verl: watchdog: no progress for {idle:.0f} s: {where}"
        print("\n".join(filter(None, [text, extra, stacks])), file=sys.stderr, flush=True)


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
