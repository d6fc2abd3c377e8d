"""What a loop does for the profiler: its steps are framed, and steps that never come are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def announce(config: Any, total_steps: int, notice: Callable[[str], None]) -> None:
    """How many steps the run has; a notice of those that were to be profiled and never come."""
    print(f"Total training steps: {total_steps}", flush=True)
    profiler = config.global_profiler
    late = [step for step in profiler.steps or [] if step > total_steps]
    if profiler.tool and late:
        notice(
            f"global_profiler.steps={late}: the run ends with step {total_steps} and has no profile of them"
        )
