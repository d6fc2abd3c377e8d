"""Profiling: a tool without steps, steps without a tool, a tool that this machine's devices do not have."""

from __future__ import annotations

from verl.config.rules.context import Check
from verl.profiling.options import check_options
from verl.profiling.plan import ROLES


def check(c: Check) -> None:
    """`global_profiler.*` and each role's `profiler.*`."""
    profiler = c.cfg.select("global_profiler")
    if profiler is None:
        return
    roles = {path: group for path in ROLES.values() if (group := c.cfg.select(path)) is not None}
    if not profiler.tool:
        without = [f"{path}.enable=True" for path, group in roles.items() if group.enable]
        without += [c.at("global_profiler.steps")] if profiler.steps else []
        if without:
            reason = "nothing is profiled without global_profiler.tool=torch"
            c.notice(f"no effect: {', '.join(without)}: {reason}")
        return
    tool = f"global_profiler.tool={profiler.tool}"
    if not profiler.steps:
        c.refuse(tool, "no step is named; set global_profiler.steps=[2], or the tool to null")
    elif min(profiler.steps) < 1:
        c.refuse(c.at("global_profiler.steps"), "steps are counted from 1")
    if c.trainer is not None:
        kind = c.trainer.device if c.trainer.device != "auto" else c.devices.best
        if profiler.tool == "nsys" and kind != "cuda":
            c.lacks(tool, f"nsys records CUDA devices, this run is on {kind}; set it to torch")
        if profiler.tool == "npu" and kind != "npu":
            c.lacks(tool, f"needs an Ascend device, this run is on {kind}; set it to torch")
    for path, group in roles.items():
        if problem := check_options(profiler.tool, group.tool_config.get(profiler.tool) or {}):
            c.refuse(path, problem)
