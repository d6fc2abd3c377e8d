"""Arguments of the profiling tools that are known, and what is said about others. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONTENTS = ("cpu", "cuda", "npu", "memory", "shapes", "stack")
KNOWN: dict[str, tuple[str, ...]] = {
    "torch": ("contents", "discrete"),
    "torch_memory": ("trace_alloc_max_entries", "stack_depth"),
    "npu": ("contents", "level", "analysis", "discrete"),
}
"""Tool → its arguments; nsys takes any."""


def check_options(tool: str, options: Mapping[str, Any]) -> str:
    """What is wrong with a tool's arguments, "" if nothing is."""
    known = KNOWN.get(tool)
    if known is None:
        return ""
    strange = [name for name in options if name not in known]
    if strange:
        return f"profiler.tool_config.{tool}.{strange[0]} is not known: {', '.join(known)}"
    if options.get("discrete"):
        return (
            f"profiler.tool_config.{tool}.discrete=True: a profile here is of whole steps, in which every phase is a named "
            "range; leave it False"
        )
    wrong = [name for name in options.get("contents") or [] if name not in CONTENTS]
    if wrong and tool == "torch":
        return f"profiler.tool_config.torch.contents: {wrong[0]} is not known: {', '.join(CONTENTS)}"
    return ""
