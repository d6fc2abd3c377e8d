"""How much memory this process may have: of the machine, of its control group, of the memory nodes it runs on."""

from __future__ import annotations

import os
import re
from pathlib import Path

from verl.platform import cores

_NODES = Path("/sys/devices/system/node")
_FREE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")


def memory_limit() -> tuple[int | None, int | None]:
    """(limit, used) bytes of the control group; the tightest limit on the way up counts; None without one."""
    tightest: tuple[int | None, int | None] = (None, None)
    for place in cores.cgroups("memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = cores.read(place / limit_name), cores.read(place / used_name)
            # Version 1 writes "no limit" as a number near 2**63.
            if (
                limit.isdecimal()
                and int(limit) < 1 << 60
                and (tightest[0] is None or int(limit) < tightest[0])
            ):
                tightest = (int(limit), int(used) if used.isdecimal() else None)
    return tightest


def total_memory() -> int:
    """Bytes that this process can have at most: the machine's, or its control group's limit."""
    import psutil

    limit = memory_limit()[0]
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def available_memory() -> int:
    """Bytes that can be had now: of the machine, of what the control group has left, and on each memory node of its own
    that this process's cores belong to."""
    import psutil

    limit, used = memory_limit()
    room = [int(psutil.virtual_memory().available), *_nodes()]
    if limit is not None:
        room.append(max(0, limit - (used or 0)))
    return min(room)


def _nodes() -> list[int]:
    """Bytes free, or in files that can be dropped, on each memory node with a core that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    found = []
    for node in _NODES.glob("node[0-9]*"):
        if not allowed & _numbers(cores.read(node / "cpulist")):
            continue
        rows = dict(re.findall(r"^Node \d+ (\S+):\s*(\d+) kB", cores.read(node / "meminfo"), re.MULTILINE))
        if "MemFree" in rows:
            found.append(1024 * sum(int(rows.get(name, 0)) for name in _FREE))
    return found


def _numbers(text: str) -> set[int]:
    """The kernel's lists: "0-3,8" is 0, 1, 2, 3, 8."""
    ends = [part.split("-") for part in text.split(",") if part]
    return {number for part in ends for number in range(int(part[0]), int(part[-1]) + 1)}
