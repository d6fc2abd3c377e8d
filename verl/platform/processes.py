"""Which processes a number can mean."""

from __future__ import annotations

import os
from functools import cache


@cache
def namespace() -> int:
    """The namespace of this process's ids; 0 where there is none. Containers may share memory but not processes: a
    number from another namespace says nothing of who lives."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
