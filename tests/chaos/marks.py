"""A plugin (`VERL_USE_EXTERNAL_MODULES=tests.chaos.marks`) through which a test sees what a run is doing.

Every phase the loop enters, and a few moments inside of saving and logging, is written to the pipe CHAOS_MARKS as a
line. At the moment named by CHAOS_SLOW the run rests, so that a kill cannot miss a moment of microseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

REST = 0.5


def mark(name: str) -> None:
    """Tell the test; nobody reading is fine."""
    try:
        os.write(_pipe, name.encode() + b"\n")
    except BrokenPipeError:
        return
    if name == os.environ.get("CHAOS_SLOW"):
        time.sleep(REST)


def after(owner: Any, name: str, moment: str) -> None:
    """Mark the moment when owner.name has returned."""
    original: Callable[..., Any] = getattr(owner, name)

    def marked(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        mark(moment)
        return result

    setattr(owner, name, marked)


def watch() -> None:
    """Wrap what is of interest."""
    from verl.checkpoint import manifest, write
    from verl.engine.training.fsdp.engine import FSDPEngine
    from verl.tracking.timer import Phases
    from verl.tracking.tracker import Tracking

    after(FSDPEngine, "save_weights", "half written")
    after(manifest, "write_manifest", "sealed")
    after(write.CheckpointWriter, "_publish", "published")
    after(write, "retire", "retired")
    enter, log = Phases.__call__, Tracking.log

    def entered(self: Phases, name: str, waits_for: str = "") -> AbstractContextManager[None]:
        mark(name)
        return enter(self, name, waits_for)

    def logged(self: Tracking, step: int, metrics: Any) -> None:
        if step > 0:
            mark("saved, not logged")
        log(self, step, metrics)
        if step > 0:
            mark("logged")

    Phases.__call__ = entered  # type: ignore[method-assign, assignment]
    Tracking.log = logged  # type: ignore[method-assign]


_pipe = os.open(os.environ["CHAOS_MARKS"], os.O_WRONLY)
watch()
