"""Whom a part that works for the loop tells what, without knowing the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _silent(*_: Any, **__: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class RunHooks:
    """event(kind, **fields) for the run's records, notice(text) for the user, beat() for a sign of progress.

    phase() is the name of the phase the loop is in. watch(who): from now on who() says which workers are waited for and
    where they stand, when nothing moves.
    """

    event: Callable[..., None] = _silent
    notice: Callable[[str], None] = _silent
    beat: Callable[[], None] = _silent
    phase: Callable[[], str] = str
    watch: Callable[[Callable[[], str]], None] = _silent


SILENT = RunHooks()
