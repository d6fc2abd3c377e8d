"""Where every thread of another process of this machine stands, also when its interpreter is stuck.

A process `register`s once; then a thread of its own writes the stacks to a file that only this user can read, whenever
`ask` writes to its pipe. A process whose interpreter is stuck cannot do that: it gets SIGUSR1, and faulthandler, which
needs no interpreter, writes them. Not the signal first: faulthandler reads the frames of threads that run
meanwhile, which now and then is a segmentation fault of a process that did nothing wrong.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from verl.platform.processes import alive, namespace, process_start_time

_PIPE = ".ask"
_kept: list[IO[str]] = []
_COLLECTIVE = re.compile(r"torch/distributed/(distributed_c10d|_functional_collectives|fsdp)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_INSTALLED = ("/site-packages/", "/lib/python3")
_IDLE = ("stay", "_answer")  # functions that only wait, for as long as the process lives


def register() -> None:
    """Make this process answer `ask`. Again is harmless."""
    if _kept:
        return
    _sweep()
    path = _path(os.getpid())
    path.unlink(missing_ok=True)
    handle = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600), "w")
    _kept.append(handle)
    faulthandler.register(signal.SIGUSR1, file=handle, all_threads=True)
    pipe = path.with_suffix(_PIPE)
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe, 0o600)
    # Opened for writing too: a pipe without a writer would be at its end.
    questions = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
    threading.Thread(target=_answer, args=(questions, handle), name="stacks", daemon=True).start()


def _answer(questions: int, handle: IO[str]) -> None:
    while os.read(questions, 1):
        faulthandler.dump_traceback(handle, all_threads=True)


def ask(pid: int, timeout: float = 3.0) -> str:
    """The stacks of a process that registered, newest call first in each thread.

    A line that says so when the process is gone, never registered, or does not answer.
    """
    path = _path(pid)
    if not path.exists():
        _sweep()
        return f"process {pid} is gone, or does not answer questions about its stack"
    before = path.stat().st_size
    size = _grown(path, before, lambda: _write(path.with_suffix(_PIPE)), timeout * 2 / 3)
    if size <= before:
        size = _grown(path, before, lambda: os.kill(pid, signal.SIGUSR1), timeout / 3)
    if size <= before:
        return f"process {pid} does not answer: it is stopped, or waits in the kernel"
    return path.read_bytes()[before:].decode(errors="replace").strip()


def _write(pipe: Path) -> None:
    question = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    with os.fdopen(question, "wb") as file:
        file.write(b"?")


def _grown(path: Path, before: int, ask: Callable[[], None], timeout: float) -> int:
    """Size of the file once an answer is written, or after `timeout` seconds."""
    size, end = before, time.monotonic() + timeout
    with contextlib.suppress(OSError):  # the process is gone
        ask()
    while time.monotonic() < end:
        time.sleep(0.05)
        last, size = size, path.stat().st_size
        if before < last == size:
            break
    return size


def summary(stacks: str) -> str:
    """One line about what a process does, from its stacks: waits for other ranks, or where it is.

    Speaks of the first thread that runs code of ours or of the user's; installed packages are not where a cause is.
    """
    for thread in stacks.split("\n\n"):
        frames = [f for f in _FRAME.findall(thread) if not any(part in f[0] for part in _INSTALLED)]
        if not frames or frames[0][2] in _IDLE:
            continue
        file, line, name = frames[0]
        where = f"{file}:{line} in {name}"
        if _COLLECTIVE.search(thread):
            return f"waits for other ranks in a collective, called from {where}"
        return f"is at {where}"
    return "has no thread at work" if _FRAME.search(stacks) else stacks.partition("\n")[0]


def _path(pid: int) -> Path:
    """File of a process that runs, and of no later one with its number: the signal would end that."""
    return _folder() / f"{namespace()}-{pid}-{process_start_time(pid)}.txt"


def _sweep() -> None:
    """Remove files of processes that have ended."""
    for path in _folder().glob(f"{namespace()}-*-*.*"):
        _, pid, start = path.stem.split("-")
        if not alive(int(pid), int(start)):
            path.unlink(missing_ok=True)


def _folder() -> Path:
    """A folder that belongs to this user alone. OSError if another user has made it."""
    folder = Path(tempfile.gettempdir()) / f"verl-stacks-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    owner = folder.lstat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o077:
        raise OSError(f"{folder} belongs to another user, or others may write to it")
    return folder
