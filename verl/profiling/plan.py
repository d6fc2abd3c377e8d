"""Which process profiles which steps, and with what: `global_profiler.*` and each role's `profiler.*`, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLES = {
    "actor": "actor_rollout_ref.actor.profiler",
    "ref": "actor_rollout_ref.ref.profiler",
    "rollout": "actor_rollout_ref.rollout.profiler",
    "critic": "critic.profiler",
    "sft": "profiler",
}
"""Role → where its profiler group stands."""


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What one process does. `options` are the tool's arguments, name → value, those of its roles together."""

    tool: str
    steps: tuple[int, ...]
    continuous: bool
    folder: Path
    name: str
    options: dict[str, Any] = field(default_factory=dict)

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


def plan_for(config: Any, roles: Sequence[str], rank: int) -> ProfilePlan | None:
    """The plan of the process of that rank that plays these roles; None if it profiles nothing.

    A role is profiled where its `profiler.enable` is on: on its `ranks` (none named: rank 0), or on `all_ranks`. When no
    role of the configuration is enabled, rank 0 of every role is.
    """
    profiler = config.get("global_profiler")
    if profiler is None or not profiler.tool or not profiler.steps:
        return None
    groups = {role: found for role, path in ROLES.items() if (found := _select(config, path)) is not None}
    chosen = [role for role in roles if role in groups and _wanted(groups, role, rank)]
    if not chosen:
        return None
    options: dict[str, Any] = {}
    for role in chosen:
        for name, value in dict(groups[role].tool_config.get(profiler.tool) or {}).items():
            joined = [*options.get(name, []), *value] if isinstance(value, list | tuple) else value
            options[name] = list(dict.fromkeys(joined)) if isinstance(joined, list) else joined
    shared = profiler.global_tool_config.get(profiler.tool)
    return ProfilePlan(
        tool=profiler.tool,
        steps=tuple(sorted(set(profiler.steps))),
        continuous=bool(profiler.profile_continuous_steps),
        folder=Path(profiler.save_path).expanduser(),
        name=f"{'-'.join(chosen)}.rank{rank}",
        options=(shared.to_dict() if hasattr(shared, "to_dict") else dict(shared or {})) | options,
    )


def _wanted(groups: dict[str, Any], role: str, rank: int) -> bool:
    if not any(group.enable for group in groups.values()):
        return rank == 0
    group = groups[role]
    return bool(group.enable and (group.all_ranks or rank in (group.ranks or [0])))


def _select(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = config.get(part) if config is not None else None
    return config


def nsight_options(config: Any) -> dict[str, str] | None:
    """What a Ray worker's `runtime_env={"nsight": …}` needs so that it runs under nsys; None for another tool.

    From `global_profiler.global_tool_config.nsys`: `worker_nsight_options`, or the options themselves.
    """
    profiler = config.get("global_profiler")
    if profiler is None or profiler.tool != "nsys" or not profiler.steps:
        return None
    given = dict(profiler.global_tool_config.nsys or {})
    chosen = dict(given.get("worker_nsight_options") or {k: v for k, v in given.items() if "nsight" not in k})
    standard = {
        "t": "cuda,nvtx,cublas",
        "capture-range": "cudaProfilerApi",
        "capture-range-end": f"repeat-shutdown:{len(profiler.steps)}",
        "kill": "none",
    }
    return {name: str(value) for name, value in (standard | chosen).items()}
