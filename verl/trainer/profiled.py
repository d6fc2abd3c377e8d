"""A step of a loop under the profiler, if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.profiling.profiler import Profiler
    from verl.tracking.timer import Phases


@contextmanager
def profiled(profiler: Profiler | None, step: int, phases: Phases, tracking: Any) -> Iterator[None]:
    """Frame a step; phases become ranges of the profile. Its files are an event, and a notice.

    A step that raises leaves the profile open: whoever closes the profiler writes what there is of it.
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
        tracking.event("profile", step=step, files=files)
        tracking.notice(f"profile of step {step}: {', '.join(files)}")
