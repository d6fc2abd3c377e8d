"""Keeping what was freed: on a CPU, giving pages back to the kernel and faulting them in again costs as much as the
arithmetic on them.

glibc serves large blocks by mmap and returns them on free, so every activation of every micro-batch is zeroed
anew by the kernel. `tune_allocator` makes it keep them in its heap.
"""

from __future__ import annotations

import ctypes
import platform
import sys

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_TOP_PAD = 64 << 20


def tune_allocator() -> bool:
    """Make glibc reuse freed blocks of any size. Call once, early; True if it took effect.

    False, and nothing done, on other C libraries (musl, macOS) or under another malloc that does not know the
    call.
    """
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, _TOP_PAD), (_M_ARENA_MAX, 2))
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings)


def trim() -> None:
    """Give what is free back to the system: after a phase whose memory is not needed again."""
    if sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
