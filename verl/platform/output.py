"""Standard output and error that may be lost: neither a full disk under a log nor a reader that has gone ends a run."""

from __future__ import annotations

import sys
from typing import Any, TextIO, cast


class Spared:
    """A text stream whose failed writes are dropped: there is nowhere to tell of them, and records are kept elsewhere."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written."""
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Hand on what can be handed on."""
        try:
            self._stream.flush()
        except OSError:
            return  # the stream keeps it for the next time

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def spare() -> None:
    """Replace both streams of this process, for as long as it lives: its end flushes them, too."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Spared):
            setattr(sys, name, cast(TextIO, Spared(stream)))
