"""Trackers that are missing here. Profiling: a tool without steps, steps without a tool, a tool that this machine's
devices do not have."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.config.release import LOGGERS
from verl.config.report import Report
from verl.config.schema.base import Root

ROLES = {
    "actor": "actor_rollout_ref.actor.profiler",
    "ref": "actor_rollout_ref.ref.profiler",
    "rollout": "actor_rollout_ref.rollout.profiler",
    "critic": "critic.profiler",
    "sft": "profiler",
}
"""Role → where its profiler group stands."""
CONTENTS = ("cpu", "cuda", "npu", "memory", "shapes", "stack")
KNOWN: dict[str, tuple[str, ...]] = {
    "torch": ("contents", "discrete"),
    "torch_memory": ("trace_alloc_max_entries", "stack_depth"),
    "npu": ("contents", "level", "analysis", "discrete"),
}
"""Tool → its arguments; nsys takes any."""


def check(config: Root, report: Report) -> None:
    """Check `trainer.logger`, `global_profiler.*` and each role's `profiler.*`."""
    if report.trainer is not None:
        _trackers(report)
    _profiler(report)


def _trackers(report: Report) -> None:
    options = report.keys["trainer.logger"].about["options"]
    for name in filter(options.__contains__, report.trainer.logger):  # `values` refuses the others
        if name not in LOGGERS:
            trouble = "not in this release, left out; metrics.jsonl has everything"
        elif name not in ("console", "file") and importlib.util.find_spec(name) is None:
            trouble = f"{name} is not installed; left out (pip install {name})"
        else:
            continue
        report.notice(f"trainer.logger={name}: {trouble}", run_says=True)
    offline = not os.environ.get("WANDB_API_KEY") and not Path("~/.netrc").expanduser().exists()
    if (
        "wandb" in report.trainer.logger
        and importlib.util.find_spec("wandb")
        and offline
        and "WANDB_MODE" not in os.environ
    ):
        text = "trainer.logger=wandb: not logged in here; left out (wandb login, WANDB_API_KEY or WANDB_MODE=offline)"
        report.notice(text, run_says=True)


def _profiler(report: Report) -> None:
    """`global_profiler.*` and each role's `profiler.*`."""
    profiler = report.config.select("global_profiler")
    if profiler is None:
        return
    roles = {path: group for path in ROLES.values() if (group := report.config.select(path)) is not None}
    if not profiler.tool:
        without = [f"{path}.enable=True" for path, group in roles.items() if group.enable]
        without += [report.at("global_profiler.steps")] if profiler.steps else []
        if without:
            keys = ", ".join(without)
            report.notice(f"no effect: {keys}: nothing is profiled without global_profiler.tool=torch")
        return
    tool = f"global_profiler.tool={profiler.tool}"
    if not profiler.steps:
        report.notice(f"no effect: {tool}: no step is named (global_profiler.steps=[2] would profile the second)")
        return
    report.refuse_file("global_profiler.save_path", profiler.save_path)
    if min(profiler.steps) < 1:
        report.refuse(report.at("global_profiler.steps"), "steps are counted from 1")
    if report.trainer is not None:
        kind = report.trainer.device if report.trainer.device != "auto" else report.devices.best
        if profiler.tool == "nsys" and kind != "cuda":
            report.lacks(tool, f"nsys records CUDA devices, this run is on {kind}; set it to torch")
        if profiler.tool == "npu" and kind != "npu":
            report.notice(f"no effect: {tool}: no Ascend device, this run is on {kind} (torch profiles it)")
    for path, group in roles.items():
        if any(options and options.get("discrete") for options in group.tool_config.values()):
            report.notice(f"no effect: {path}.tool_config.*.discrete=True: a profile here is of whole steps")
        if problem := check_options(profiler.tool, group.tool_config.get(profiler.tool) or {}):
            report.refuse(path, problem)


def check_options(tool: str, options: Mapping[str, Any]) -> str:
    """What is wrong with a tool's arguments, "" if nothing is."""
    accepted = KNOWN.get(tool, tuple(options))
    key = f"profiler.tool_config.{tool}"
    for name in options:
        if name not in accepted:
            return f"{key}.{name} is not known: {', '.join(accepted)}"
    wrong = [name for name in options.get("contents") or [] if name not in CONTENTS]
    if wrong and tool == "torch":
        return f"{key}.contents: {wrong[0]} is not known: {', '.join(CONTENTS)}"
    return ""
