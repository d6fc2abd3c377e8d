"""Which processes a number can mean and whether they live; the end of those that outlive the one that started them."""

from __future__ import annotations

import atexit
import os
import resource
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

# A process: its id, when it started in 1/100 s, and the namespace of the id.
Identity = tuple[int, int, int]

_MARK = "VERL_STARTED_BY"
_LIMIT: int | None = getattr(resource, "RLIMIT_RTTIME", None)  # of Linux alone


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
    return os.getpid(), process_start_time(os.getpid()), namespace()


def process_start_time(pid: int) -> int:
    """When the process started, in 1/100 s; 0 for one that does not run. Tells it from a later one with its number.

    Counted from the start of the machine: what is counted from 1970 changes for every process when the clock is set.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = stat.rpartition(b")")[2].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19]) * 100 // os.sysconf("SC_CLK_TCK")


def alive(pid: int, start: int) -> bool:
    """The process of this namespace with that id and start runs."""
    return pid == os.getpid() or abs(process_start_time(pid) - start) <= 1


# In a shell: it waits as long as the run lives and should take little memory. It reads its mark from its input, because
# a process with the mark in its arguments or environment would be swept too. Ray's processes replace both by a title,
# and have logs open in the folder; some end by themselves between `grep` and `ls`. The others have three seconds:
# vLLM's workers remove what they share.
_SWEEP = """
read -r files; read -r mark; read -r folder; read -r _
marked() { for file in $files; do grep -alsF -- "$mark" /proc/[0-9]*/"$file"; done; }
[ -n "$folder" ] || [ -z "$(marked)" ] || sleep 3
{ marked
  [ -z "$folder" ] || for own in $(grep -alsF ray:: /proc/[0-9]*/"$files"); do
    ! ls -l "${own%/*}/fd" 2>/dev/null | grep -qF "$folder/" || echo "$own"
  done
} | while IFS=/ read -r _ _ process _; do kill -9 "$process" 2>/dev/null; done
[ -z "$folder" ] || rm -rf "$folder"
"""


def sweep_at_exit(files: str, mark: str, folder: str = "") -> subprocess.Popen[bytes]:
    """Have all marked processes killed and `folder` removed as soon as this process has ended, however it ends, or
    calls `communicate` on the returned process.

    A process is marked if the text `mark` occurs in one of its `files` ("environ limits" or "cmdline", see proc(5));
    with a `folder` also a process of Ray that has files open there (Linux). Signals and parents would not do: a process
    that left its session and whose parent has ended is nobody's child.
    """
    path = {"PATH": os.environ.get("PATH", os.defpath)}
    sweeper = subprocess.Popen(["sh", "-c", _SWEEP], stdin=subprocess.PIPE, start_new_session=True, env=path)
    os.write(sweeper.stdin.fileno(), f"{files}\n{mark}\n{folder}\n".encode())  # type: ignore[union-attr]
    return sweeper


@cache
def started_by(pid: int) -> dict[str, str]:
    """A variable that marks the processes that this process, `pid`, starts with it, and those that they start. They end
    with it, even if they left the session, or cleared the environment after one before them called `bear_mark`."""
    # As a limit it can only be lowered, also by a run inside of a run; it is thousands of years.
    highest = resource.getrlimit(_LIMIT)[1] if _LIMIT is not None else 0
    highest = highest if highest > 2**61 else 2**62
    mark = str(highest - 1 - pid - (process_start_time(pid) << 22))
    atexit.register(sweep_at_exit("environ limits", mark).communicate)
    return {_MARK: mark}


def bear_mark() -> None:
    """Mark this process and all that it starts by a limit as well: on real-time computing, which nothing else uses."""
    if _LIMIT is not None:
        with suppress(OSError, ValueError, KeyError):
            resource.setrlimit(_LIMIT, (int(os.environ[_MARK]), int(os.environ[_MARK])))
