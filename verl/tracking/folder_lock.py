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
    """Takes the folder, which exists; `release` gives it back. FolderInUse where another process has it.

    The lock is of the kind that network file systems pass on to other machines. `warn(text)` hears of a file system
    that has none, where the run goes on without.
    """

    def __init__(self, root: Path, warn: Callable[[str], None]):
        self.path = root / NAME
        self._warn = warn
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(root)
        except BaseException:
            self.release()
            raise

    def _take(self, root: Path) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self._try():
            if time.monotonic() >= end:
                raise FolderInUse(
                    f"trainer.default_local_dir={root}: another run is at work in this folder ({self._owner()}); two would "
                    "overwrite each other's checkpoints and records. Wait for it, or name another folder "
                    f"(trainer.experiment_name). If its machine is gone for good, delete {self.path}"
                )
            time.sleep(_PAUSE_S)

    def _try(self) -> bool:
        """False while another process has it."""
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            self._warn(
                f"{self.path}: this file system has no locks ({error.strerror}); a second run in this folder would not be "
                "noticed"
            )
            return True
        self._sign()
        return True

    def _sign(self) -> None:
        text = f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        try:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, text.encode(), 0)
        except OSError as error:  # a full disk: the lock holds all the same
            self._warn(f"{self.path} cannot be written ({error.strerror})")

    def _owner(self) -> str:
        return os.pread(self._handle, 200, 0).decode(errors="replace") or "it does not say which"

    def release(self) -> None:
        """Let others have the folder. May be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
