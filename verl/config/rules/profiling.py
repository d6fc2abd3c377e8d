"""Profiling: a tool without steps, steps without a tool, a tool that this machine's devices do not have."""

from __future__ import annotations

from typing import Any

from verl.config.rules.context import Check
from verl.profiling.options import check_options
from verl.profiling.plan import ROLES


def check(c: Check) -> None:
    """`global_profiler.*` and each role's `profiler.*`."""
    profiler = c.cfg.select("global_profiler")
    if profiler is None:
        return
    enabled = [path for path in ROLES.values() if _of(c, path) is not None and _of(c, path).enable]
    if not profiler.tool:
        without = [f"{path}.enable=True" for path in enabled]
        without += [f"global_profiler.steps={profiler.steps}"] if profiler.steps else []
        if without:
            c.notice(
                f"no effect: {', '.join(without)}: nothing is profiled without global_profiler.tool=torch"
            )
        return
    tool = f"global_profiler.tool={profiler.tool}"
    if not profiler.steps:
        c.refuse(tool, "no step is named; set global_profiler.steps=[2], or the tool to null")
    if min(profiler.steps or [1]) < 1:
        c.refuse(f"global_profiler.steps={profiler.steps}", "steps are counted from 1")
    _device(c, tool, profiler.tool)
    for path in ROLES.values():
        group = _of(c, path)
        if group is not None:
            problem = check_options(profiler.tool, group.tool_config.get(profiler.tool) or {})
            if problem:
                c.refuse(path, problem)


def _of(c: Check, path: str) -> Any:
    return c.cfg.select(path)


def _device(c: Check, key: str, tool: str) -> None:
    if c.trainer is None:
        return
    kind = c.trainer.device if c.trainer.device != "auto" else c.devices.best
    if tool == "nsys" and kind != "cuda":
        c.lacks(key, f"nsys records CUDA devices, this run is on {kind}; set it to torch")
    if tool == "npu" and kind != "npu":
        c.lacks(key, f"needs an Ascend device, this run is on {kind}; set it to torch")
