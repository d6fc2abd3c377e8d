"""Keeps a run's report page current without costing the run: it is rewritten only when that is cheap by comparison."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

_SHARE = 0.02
_LEAST_PAUSE_S = 5.0


class LiveReport:
    """Writes `report.html` of a run folder, at most every few seconds and for at most 2 % of the time."""

    def __init__(self, run_dir: Path, flush: Callable[[], None], event: Callable[..., None]):
        self._run_dir = run_dir
        self._flush = flush
        self._event = event
        self._not_before = 0.0

    def write(self, *, last: bool = False) -> None:
        """Rewrite the page if it is time (`last`: in any case). A failure is an event, never the end of a run."""
        from verl.report.build import write_report

        started = time.monotonic()
        if started < self._not_before and not last:
            return
        try:
            if last:
                self._flush()
            write_report(self._run_dir)
        except (OSError, ValueError, KeyError) as error:
            self._event("report_failed", error=f"{type(error).__name__}: {error}")
        took = time.monotonic() - started
        self._not_before = started + max(_LEAST_PAUSE_S, took / _SHARE)
