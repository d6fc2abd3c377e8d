"""Tracker `file`: a second JSON-lines file at a place of the user's choice, `{"step": n, "data": {…}}`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.tracking.backend import Session, Unavailable
from verl.tracking.jsonl import JsonLines


class FileBackend:
    """Appends to VERL_FILE_LOGGER_PATH, else VERL_FILE_LOGGER_ROOT/{project}/{experiment}.jsonl."""

    def __init__(self, session: Session, say: Callable[[str], None]):
        path = os.environ.get("VERL_FILE_LOGGER_PATH")
        root = os.environ.get("VERL_FILE_LOGGER_ROOT")
        if not path and not root:
            raise Unavailable("set VERL_FILE_LOGGER_PATH or VERL_FILE_LOGGER_ROOT to say where it writes")
        self.path = Path(path) if path else Path(str(root), session.project, f"{session.experiment}.jsonl")
        self.path = self.path.expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = JsonLines(self.path, lambda error: say(f"{self.path} cannot be written ({error})"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line."""
        self._lines.append({"step": step, "data": dict(metrics)})

    def table(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """No tables here."""

    def close(self) -> None:
        """Sync and close."""
        self._lines.close()
