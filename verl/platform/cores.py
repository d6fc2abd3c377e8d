"""Cores: those that this process may run on, and what the container's quota leaves of them. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path


def cores() -> tuple[int, float | None]:
    """(cores this process may use, the control group's quota in cores or None). The tightest quota on the way up counts."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = []
    for place in cgroups("cpu"):
        # Version 2 has both numbers in one file, "max" for none; version 1 writes -1.
        parts = read(place / "cpu.max").split() or [
            read(place / "cpu.cfs_quota_us"),
            read(place / "cpu.cfs_period_us"),
        ]
        if len(parts) == 2 and all(part.isdecimal() for part in parts) and int(parts[1]):
            quotas.append(int(parts[0]) / int(parts[1]))
    return usable, min(quotas, default=None)


def usable() -> int:
    """Whole cores that this process gets: no more than its quota, at least one."""
    count, quota = cores()
    return max(1, count if quota is None else min(count, int(quota)))


def thread_limit() -> int | None:
    """Threads that a computing process should have, where the quota leaves fewer cores than it sees and nobody chose.

    More threads than the quota pays for are stopped all at once when it is used up, also the one that the others wait for.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return None
    count, allowed = cores()[0], usable()
    return allowed if allowed < count else None


def cgroups(controller: str) -> list[Path]:
    """This process's control group and its parents, as folders; both versions."""
    places = []
    for line in read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = Path("/sys/fs/cgroup") / controllers
            inner = root / path.lstrip("/")
            places += [p for p in (inner, *inner.parents) if p.is_relative_to(root)]
    return [place for place in places if place.is_dir()]


def read(path: Path) -> str:
    """A file's text without the spaces around it; "" for one that cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
