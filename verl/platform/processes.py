"""Which processes a number can mean, and whether they live."""

from __future__ import annotations

import os
from functools import cache

Identity = tuple[int, int, int]
"""A process: its id, when it started in 1/100 s, and the namespace of the id."""


@cache
def namespace() -> int:
    """The namespace of this process's ids; 0 where there is none. Containers may share memory but not processes: a
    number from another namespace says nothing of who lives."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def identity() -> Identity:
    """This process."""
    return os.getpid(), born(os.getpid()), namespace()


def born(pid: int) -> int:
    """When the process started, in 1/100 s; 0 for one that does not run. Tells it from a later one with its number."""
    import psutil

    try:
        process = psutil.Process(pid)
        return 0 if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 100)
    except psutil.NoSuchProcess:
        return 0


def alive(pid: int, start: int) -> bool:
    """The process of this namespace with that id and start runs."""
    return pid == os.getpid() or abs(born(pid) - start) <= 1
