"""The profiler of one process: started and stopped by the loop, step by step; writes files, keeps nothing.

    profiler = open_profiler(config, roles=("actor", "ref"), rank=0, device="cuda")    # None: nothing to profile
    profiler.start(step); …; files = profiler.stop(step)                              # every step; most do nothing

The loop of a run calls both for every step; on a cluster, each worker has one and the driver passes the calls on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from verl.profiling.plan import ProfilePlan, plan_for

F = TypeVar("F", bound=Callable[..., Any])


class Tool(Protocol):
    """Records from `start` to `stop`."""

    def start(self) -> None:
        """Begin."""

    def stop(self, base: Path) -> list[Path]:
        """End, and write files whose paths begin with `base`; returns them."""

    def span(self, name: str) -> AbstractContextManager[Any]:
        """A named stretch of the recording."""


class Profiler(Protocol):
    """What the loop talks to: the profiler of its own process, or of all workers of a cluster."""

    def start(self, step: int) -> None:
        """A step begins."""

    def stop(self, step: int) -> list[str]:
        """A step has ended; returns the files that were written."""

    def close(self) -> list[str]:
        """The run ends, maybe in the middle of a profile: what there is of it is written."""

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Mark a stretch of a step in the profile, if there is one now."""


class StepProfiler:
    """Follows a plan with a tool. `start` and `stop` frame every step; other steps cost nothing."""

    def __init__(self, plan: ProfilePlan, tool: Tool):
        self.plan = plan
        self._tool = tool
        self._first: int | None = None
        self._last = 0

    def start(self, step: int) -> None:
        """A step begins."""
        if self._first is None and self.plan.starts(step):
            self.plan.folder.mkdir(parents=True, exist_ok=True)
            self._tool.start()
            self._first = step
        self._last = step

    def stop(self, step: int) -> list[str]:
        """A step has ended; returns the files that were written."""
        return self._write(step) if self._first is not None and self.plan.ends(step) else []

    def close(self) -> list[str]:
        """The run ends, maybe in the middle of a profile: what there is of it is written."""
        return self._write(self._last) if self._first is not None else []

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Mark a stretch of a step in the profile, if there is one now."""
        return self._tool.span(name) if self._first is not None else nullcontext()

    def _write(self, last: int) -> list[str]:
        first, self._first = self._first, None
        assert first is not None
        return [str(path) for path in self._tool.stop(self.plan.file(first, last))]


class Profiled:
    """What a worker process offers for its profile; `profiler` is set when the worker knows its device."""

    profiler: StepProfiler | None = None

    def start_profile(self, step: int) -> None:
        """A step begins."""
        if self.profiler is not None:
            self.profiler.start(step)

    def stop_profile(self, step: int) -> list[str]:
        """A step has ended; returns the files that were written."""
        return self.profiler.stop(step) if self.profiler is not None else []

    def close_profile(self) -> list[str]:
        """The run ends; returns the files of a profile that was cut short."""
        return self.profiler.close() if self.profiler is not None else []

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Mark a stretch of a step in this worker's profile, if there is one now."""
        return self.profiler.span(name) if self.profiler is not None else nullcontext()


def spanned(name: str) -> Callable[[F], F]:
    """Decorator of a method of a `Profiled`: its calls are a stretch of that name."""

    def decorate(method: F) -> F:
        @wraps(method)
        def call(self: Profiled, *args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return method(self, *args, **kwargs)

        return cast(F, call)

    return decorate


def open_profiler(config: Any, *, roles: Sequence[str], rank: int, device: str) -> StepProfiler | None:
    """The profiler of a process that plays `roles` as rank `rank`; None if the configuration wants none of it.

    device: torch's device type. UserError for a tool that cannot work here, saying what to do.
    """
    plan = plan_for(config, roles, rank)
    if plan is None:
        return None
    from verl.profiling.tools import build

    return StepProfiler(plan, build(plan.tool, device, plan.options))
