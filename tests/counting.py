"""How much Python a piece of work runs, counted and not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import verl

_HERE = str(Path(verl.__file__).parent)


def instructions(work: Callable[[], Any]) -> int:
    """Instructions of the interpreter that functions of verl execute in `work`; loops inside of C count nothing."""
    count = 0

    def within(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return within

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_HERE):
            return None
        frame.f_trace_opcodes = True
        return within

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
