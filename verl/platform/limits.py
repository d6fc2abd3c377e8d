"""How many files a process may open."""

from __future__ import annotations

import math
import resource


def raise_open_files(wanted: int) -> float:
    """Raise this process's soft limit to `wanted`, as far as the hard one allows; returns how many it may open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    top = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < top:
        resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
        return top
    return soft
