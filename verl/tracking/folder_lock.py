"""One run at a time in a run folder: a lock that ends with the process that holds it, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

from verl.errors import UserError

NAME = ".running"
PATIENCE_S = 10.0
"""A run that was told to end just now gets so long to leave its folder."""
_PAUSE_S = 0.25
_TAKEN = (errno.EAGAIN, errno.EACCES)


class FolderInUse(UserError):
    """Another run is at work in the folder."""


class FolderLock:
    """Takes the folder, which exists; `release` lets others have it. FolderInUse where another process has it.

    A lock of fcntl: it ends with its process, is not inherited by children, and network file systems pass it on to other
    machines. `warn(text)` hears of a file system that has none, where the run goes on without.
    """

    def __init__(self, root: Path, warn: Callable[[str], None]):
        path = root / NAME
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        end = time.monotonic() + PATIENCE_S
        try:
            while not self._take(path, warn):
                if time.monotonic() >= end:
                    raise FolderInUse(
                        f"trainer.default_local_dir={root}: another run is at work in this folder ({self._owner()}); two would "
                        "overwrite each other's checkpoints and records. Wait for it, or name another folder "
                        f"(trainer.experiment_name). If its machine is gone for good, delete {path}"
                    )
                time.sleep(_PAUSE_S)
        except BaseException:
            self.release()
            raise

    def _take(self, path: Path, warn: Callable[[str], None]) -> bool:
        """False while another process has it."""
        doing = "this file system has no locks, a second run in this folder would not be noticed"
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            doing = "it cannot be written"
            text = f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, text.encode(), 0)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            warn(f"{path}: {doing} ({error.strerror})")  # a full disk: the lock holds all the same
        return True

    def _owner(self) -> str:
        return os.pread(self._handle, 200, 0).decode(errors="replace") or "it does not say which"

    def release(self) -> None:
        """Let others have the folder. May be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
