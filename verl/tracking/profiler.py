"""The profiler of one process: which steps, with which tool, framed by the loop; writes files, keeps nothing.

    profiler = open_profiler(config, roles=("actor", "ref"), rank=0, platform=platform)    # None: nothing to profile
    with profiled(profiler, step, phases, tracking): …                                # every step; most do nothing

`global_profiler.*` says which steps, each role's `profiler.*` which ranks. On a cluster each worker has one, and the
driver passes the calls on.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from verl.config.schema.base import Root, setting
from verl.config.schema.entries import Config, SFTConfig
from verl.tracking.check import ROLES
from verl.tracking.console import notice

if TYPE_CHECKING:
    from verl.platform import Platform


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What one process does. `options` are the tool's arguments, name → value, those of its roles together; `hook`: a
    shell command after the last step, in an environment with `variables`."""

    tool: str
    steps: tuple[int, ...]
    continuous: bool
    folder: Path
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    hook: str | None = None
    variables: dict[str, str] = field(default_factory=dict)

    def starts(self, step: int) -> bool:
        """A profile begins with this step."""
        return step in self.steps and not (self.continuous and step - 1 in self.steps)

    def ends(self, step: int) -> bool:
        """A profile ends with this step."""
        return step in self.steps and not (self.continuous and step + 1 in self.steps)

    def file(self, first: int, last: int) -> Path:
        """Path of a profile without its ending."""
        steps = f"step{first}" if first == last else f"step{first}-{last}"
        return self.folder / f"{self.name}.{steps}.{self.tool}"


def plan_of(config: Root, name: str) -> ProfilePlan | None:
    """The run's plan under a name; None if nothing is to be profiled."""
    profiler = setting(config, "global_profiler")
    if profiler is None or not profiler.tool or not profiler.steps:
        return None
    steps, folder = tuple(sorted(set(profiler.steps))), Path(profiler.save_path).expanduser()
    continuous = bool(profiler.profile_continuous_steps)
    return ProfilePlan(profiler.tool, steps, continuous, folder, name)


def plan_for(config: Root, roles: Sequence[str], rank: int) -> ProfilePlan | None:
    """The plan of the process of that rank that plays these roles; None if it profiles nothing.

    A role is profiled where its `profiler.enable` is on: on its `ranks` (none named: rank 0), or on `all_ranks`. When
    no role of the configuration is enabled, rank 0 of every role is.
    """
    groups = {role: group for role, path in ROLES.items() if (group := setting(config, path)) is not None}
    chosen = [role for role in roles if role in groups and _wanted(groups, role, rank)]
    plan = plan_of(config, f"{'-'.join(chosen)}.rank{rank}")
    if plan is None or not chosen:
        return None
    for role in chosen:
        for name, value in dict(groups[role].tool_config.get(plan.tool) or {}).items():
            several = isinstance(value, list | tuple)
            value = list(dict.fromkeys([*plan.options.get(name, []), *value])) if several else value
            plan.options[name] = value
    shared = setting(config, "global_profiler").global_tool_config.get(plan.tool) or {}
    for name, value in (shared.to_dict() if hasattr(shared, "to_dict") else shared).items():
        plan.options.setdefault(name, value)
    profiler = setting(config, "global_profiler")
    if not profiler.finish_hook_cmd or not (
        profiler.finish_hook_all_ranks or rank in (profiler.finish_hook_ranks or [rank])
    ):
        return plan
    about = {"SAVE_PATH": plan.folder, "TOOL": plan.tool, "RANK": rank, "ROLE": "-".join(chosen)}
    variables = {f"VERL_PROFILE_{name}": str(value) for name, value in about.items()}
    return replace(plan, hook=profiler.finish_hook_cmd, variables=variables)


def _wanted(groups: dict[str, Any], role: str, rank: int) -> bool:
    if not any(group.enable for group in groups.values()):
        return rank == 0
    group = groups[role]
    return bool(group.enable and (group.all_ranks or rank in (group.ranks or [0])))


class Profiler(Protocol):
    """What the loop talks to: the profiler of its own process, or of all workers of a cluster."""

    def start(self, step: int) -> None:
        """A step begins."""

    def stop(self, step: int) -> list[str]:
        """A step has ended; returns the files that were written."""

    def close(self) -> list[str]:
        """The run ends, maybe in the middle of a profile: what there is of it is written."""

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Mark a stretch of a step in the profile, if there is one now."""


class StepProfiler:
    """A `Profiler` that follows a plan with a tool. `start` and `stop` frame every step; other steps cost nothing.

    A tool records from `start()` to `stop(base)`, which writes files whose paths begin with `base` and returns them;
    `span(name)` names a stretch of the recording.
    """

    def __init__(self, plan: ProfilePlan, tool: Any):
        self.plan = plan
        self._tool = tool
        self._first: int | None = None
        self._last = 0

    def start(self, step: int) -> None:
        """A step begins."""
        if self._first is None and self.plan.starts(step):
            self.plan.folder.mkdir(parents=True, exist_ok=True)
            self._tool.start()
            self._first = step
        self._last = step

    def stop(self, step: int) -> list[str]:
        """A step has ended; returns the files that were written."""
        written = self.close() if self.plan.ends(step) else []
        if self.plan.hook and step == self.plan.steps[-1]:
            self._run_hook(self.plan.hook)
        return written

    def _run_hook(self, command: str) -> None:
        variables = os.environ | self.plan.variables | {"VERL_PROFILE_PID": str(os.getpid())}
        ran = subprocess.run(command, shell=True, env=variables, capture_output=True, text=True)
        if ran.returncode:
            notice(f"global_profiler.finish_hook_cmd ended with status {ran.returncode}: {ran.stderr.strip()[-300:]}")

    def close(self) -> list[str]:
        """The run ends, maybe in the middle of a profile: what there is of it is written."""
        first, self._first = self._first, None
        return [str(path) for path in self._tool.stop(self.plan.file(first, self._last))] if first else []

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Mark a stretch of a step in the profile, if there is one now."""
        return self._tool.span(name) if self._first is not None else nullcontext()


def open_profiler(config: Root, *, roles: Sequence[str], rank: int, platform: Platform) -> StepProfiler | None:
    """The profiler of a process that plays `roles` as rank `rank`; None if the configuration wants none of it.

    platform: of the device that it computes on. UserError for a tool that cannot work here, saying what to do.
    """
    plan = plan_for(config, roles, rank)
    if plan is None or (plan.tool == "npu" and not platform.has_own_tracer):
        return None
    from verl.tracking.profile_tools import build

    return StepProfiler(plan, build(plan.tool, platform, plan.options))


def announce(config: Config | SFTConfig, total_steps: int, notice: Callable[[str], None]) -> None:
    """How many steps the run has; a notice of those that were to be profiled and never come."""
    print(f"Total training steps: {total_steps}", flush=True)
    profiler = config.global_profiler
    late = [step for step in profiler.steps or [] if step > total_steps]
    if profiler.tool and late:
        end = f"the run ends with step {total_steps} and has no profile of them"
        notice(f"global_profiler.steps={late}: {end}")


def nsight_options(config: Root) -> dict[str, dict[str, str]]:
    """{"nsight": what a Ray worker's `runtime_env` needs so that it runs under nsys}; {} for another tool.

    From `global_profiler.global_tool_config.nsys`: `worker_nsight_options`, or the options themselves.
    """
    profiler = setting(config, "global_profiler")
    if profiler is None or profiler.tool != "nsys" or not profiler.steps:
        return {}
    options = dict(profiler.global_tool_config.nsys or {})
    chosen = options.get("worker_nsight_options") or {k: v for k, v in options.items() if "nsight" not in k}
    standard = {"t": "cuda,nvtx,cublas", "capture-range": "cudaProfilerApi", "kill": "none"}
    standard["capture-range-end"] = f"repeat-shutdown:{len(profiler.steps)}"
    return {"nsight": {name: str(value) for name, value in {**standard, **chosen}.items()}}
