"""What this process gets of the machine that it runs on: cores, memory, files, environment. Imports no torch."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
import resource
from collections.abc import Sequence
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_NODES = Path("/sys/devices/system/node")
# Of the two versions of control groups: the file with the limit, the file with what is used.
_MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_FREE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
# On a CPU, giving pages back to the kernel and faulting them in again costs as much as the arithmetic on them: glibc
# serves large blocks by mmap and returns them on free, so every activation of every micro-batch is zeroed anew.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_TOP_PAD = 64 << 20

# Variables that the numerical libraries read when they are loaded.
DEFAULTS = {
    # Threads of a parallel region spin for some ten microseconds while they wait, then sleep. Without spinning, waking
    # them costs more than a second core gains; spinning on, as is the libraries' default, they take the core from the
    # one they wait for as soon as the machine does anything else (docs/performance.md has the figures).
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "5000",
    # Every new shape of a matrix product keeps a kernel, in oneDNN's cache and once more in torch's own; ragged
    # batches have many shapes, and the libraries' limits of 1024 each hold several hundred MB.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
    "TOKENIZERS_PARALLELISM": "true",
}

# Imports make hundreds of thousands of objects that stay, and a large step holds as many until it ends. With Python's
# default of 700 the collector scans them again and again, which takes a sixth of a start's processor time.
COLLECT_AFTER = (10_000, 10, 10)


def prepare_process() -> None:
    """Set what is not set already, and how often garbage is collected; effective only before torch is imported."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    gc.set_threshold(*COLLECT_AFTER)


@cache
def processor() -> tuple[str, frozenset[str]]:
    """(name, features) of the first processor; empty where the system does not list them."""
    rows = re.findall(r"^(model name|Model|Processor|flags|Features)\s*:\s*(.+)$", read(_CPUINFO), re.M)
    fields = dict(reversed(rows))
    name = fields.get("model name") or fields.get("Model") or fields.get("Processor", "")
    return name, frozenset((fields.get("flags") or fields.get("Features", "")).split())


def cores() -> tuple[int, float | None]:
    """(cores this process may use, the control group's quota in cores or None). The tightest quota above it counts."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = []
    for place in cgroups("cpu"):
        # Version 2 has both numbers in one file, "max" for none; version 1 writes -1.
        old = read(place / "cpu.cfs_quota_us"), read(place / "cpu.cfs_period_us")
        parts = read(place / "cpu.max").split() or old
        if len(parts) == 2 and all(part.isdecimal() for part in parts) and int(parts[1]):
            quotas.append(int(parts[0]) / int(parts[1]))
    return usable, min(quotas, default=None)


def usable() -> int:
    """Whole cores that this process gets: no more than its quota, at least one."""
    count, quota = cores()
    return max(1, count if quota is None else min(count, int(quota)))


def thread_limit() -> int | None:
    """Threads that a computing process should have, where the quota leaves fewer cores than it sees and nobody chose.

    More threads than the quota pays for are all stopped when it is used up, even the one that the others wait for.
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


def raise_open_files(wanted: int) -> float:
    """Raise this process's soft limit to `wanted`, as far as the hard one allows; returns how many it may open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    top = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < top:
        resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
    return max(soft, top)


def memory_limit() -> tuple[int | None, int | None]:
    """(limit, used) bytes of the control group; the tightest limit on the way up counts; None without one."""
    limits: list[tuple[int, int | None]] = []
    for place in cgroups("memory"):
        for limit_name, used_name in _MEMORY_FILES:
            limit, used = read(place / limit_name), read(place / used_name)
            if limit.isdecimal() and int(limit) < 1 << 60:  # version 1 writes "no limit" as a number near 2**63
                limits.append((int(limit), int(used) if used.isdecimal() else None))
    return min(limits, key=lambda pair: pair[0], default=(None, None))


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
    sizes = []
    for node in _NODES.glob("node[0-9]*"):
        if not allowed & _numbers(read(node / "cpulist")):
            continue
        rows = dict(re.findall(r"^Node \d+ (\S+):\s*(\d+) kB", read(node / "meminfo"), re.MULTILINE))
        if "MemFree" in rows:
            sizes.append(1024 * sum(int(rows.get(name, 0)) for name in _FREE))
    return sizes


def _numbers(text: str) -> set[int]:
    """The kernel's lists: "0-3,8" is 0, 1, 2, 3, 8."""
    ends = [part.split("-") for part in text.split(",") if part]
    return {number for part in ends for number in range(int(part[0]), int(part[-1]) + 1)}


def tune_allocator() -> bool:
    """Make glibc reuse freed blocks of any size. Call once, early; True if it took effect.

    False, and nothing done, on other C libraries (musl, macOS) or under another malloc that does not know the
    call.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, _TOP_PAD), (_M_ARENA_MAX, 2))
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings)


def cpu_binding(ranks: int, allowed: Sequence[int]) -> str:
    """Which CPUs the threads of several ranks are bound to, as vLLM and SGLang read it (`0,1|2,3`): the allowed CPUs
    dealt out evenly, shared when there are too few."""
    if len(allowed) < ranks:
        return "|".join(str(allowed[rank % len(allowed)]) for rank in range(ranks))
    share = len(allowed) // ranks
    return "|".join(",".join(map(str, allowed[rank * share : (rank + 1) * share])) for rank in range(ranks))
