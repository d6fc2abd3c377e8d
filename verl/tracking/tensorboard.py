"""Tracker `tensorboard`: event files written with the tensorboard package alone (no torch, no TensorFlow)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.tracking.backend import Session, Unavailable


class TensorBoardBackend:
    """Scalars under TENSORBOARD_DIR, else tensorboard_log/{project}/{experiment}.

    A resumed run tells TensorBoard to forget what an earlier life logged after the saved step.
    """

    def __init__(self, session: Session, say: Callable[[str], None]):
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise Unavailable(
                f"the tensorboard package is not installed ({error}); pip install tensorboard"
            ) from error
        self._event, self._summary = Event, Summary
        place = os.environ.get("TENSORBOARD_DIR") or str(
            Path("tensorboard_log", session.project, session.experiment)
        )
        self.directory = Path(place).expanduser()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self.directory), flush_secs=10)
        if session.resume_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(
                Event(wall_time=time.time(), step=session.resume_step + 1, session_log=start)
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One event with all scalars of the step."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        )
        self._writer.flush()

    def table(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """TensorBoard has no tables."""

    def close(self) -> None:
        """Write everything out."""
        self._writer.close()
