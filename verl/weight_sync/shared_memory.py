"""The shared memory of one transfer: a control page and two buckets in one file of a memory file system.

    [ control | header 0 | bucket 0 | header 1 | bucket 1 ]

One process writes buckets, `readers` processes read each of them; a bucket is written again when all have taken it.
The file exists only while a transfer runs, is readable by its owner alone, and is removed by the side that finds the
other one dead. Its pages are reserved as they are first written, so a full memory file system is an error message
and not a signal. Waiting is polling of counters: no sockets, no locks that a killed process could keep.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from verl.platform.processes import alive, namespace, process_start_time
from verl.weight_sync.buckets import HEADER_BYTES, bucket_size
from verl.weight_sync.verify import WeightSyncError

_MAGIC = 0x7665726C77310002
_PAGE = 4096
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
RUNNING, DONE, FAILED = 1, 2, 3
"""Status of a side; 0: not there yet."""


def _integers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


class Control(ctypes.Structure):
    """The control page. pid, start: of the sender; readers: how many each bucket has; bucket: bytes of one; status: of
    the sender; produced: buckets published so far; on_device: buckets carry handles of device memory; header, used:
    bytes of the two buckets; reason: why the sender failed."""

    _fields_ = [
        *_integers("magic", "pid", "start", "readers", "bucket", "version"),
        *_integers("status", "produced", "on_device"),
        ("header", ctypes.c_int64 * 2),
        ("used", ctypes.c_int64 * 2),
        ("reason", ctypes.c_char * 1024),
    ]


class ReaderState(ctypes.Structure):
    """A reader's own fields: its process, buckets taken, status."""

    _fields_ = _integers("pid", "start", "taken", "status")


_READERS = -(-ctypes.sizeof(Control) // 64) * 64  # first byte of the readers' fields
_STEP = 1 << 24  # memory is reserved at least so many bytes at a time
_PATIENCE = 0.1  # seconds between looks at whether the other side lives


def folder() -> Path:
    """Where segments live: the shared memory file system, or the temporary folder where there is none."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def path_of(channel: str) -> Path:
    """The file of a channel. ValueError for a name that is no file name."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", channel):
        raise ValueError(f"channel {channel!r}: use letters, digits, '_', '.', '-', at most 100")
    return folder() / f"{_prefix()}{channel}"


def _prefix() -> str:
    """Segments whose processes can be seen from here, and are this user's."""
    return f"verl-weights-{os.geteuid()}-{namespace()}-"


def sweep() -> list[str]:
    """Remove segments of this user whose sender is dead (both sides were killed); returns the channels."""
    gone = []
    for path in folder().glob(f"{_prefix()}*"):
        # One that is just being made, or is not ours: the side that needs it will say.
        with contextlib.suppress(WeightSyncError):
            if not live_sender(path):
                gone.append(path.name.removeprefix(_prefix()))
    return gone


def live_sender(path: Path) -> int:
    """The process that sends through the segment at `path`; 0 where there is none, and the segment of a dead one is
    removed. WeightSyncError as `SharedMemoryBlock.open`."""
    segment = SharedMemoryBlock.open(path)
    if segment is None:
        return 0
    pid = int(segment.control.pid) if segment.sender_alive() else 0
    if not pid:
        segment.remove()
    segment.close()
    return pid


def _fence() -> None:
    """Order what this thread wrote before against what it writes or reads next, on every processor."""
    for _ in range(2):
        with threading.Lock():
            pass


class SharedMemoryBlock:
    """A mapped segment; `control` and `readers` are its fields. Writers use `create`, readers use `open`."""

    def __init__(self, path: Path, fd: int, size: int, readers: int = 0):
        self.path = path
        self._fd = fd
        self._inode = os.fstat(fd).st_ino
        self._map = mmap.mmap(fd, size)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.control: Any = Control.from_buffer(self._map)
        count = self.control.readers if self.control.magic == _MAGIC else readers
        self.readers: Any = (ReaderState * count).from_buffer(self._map, _READERS)
        self._reserved = [0, 0]

    @classmethod
    def create(
        cls, channel: str, readers: int, bucket_bytes: int, version: int, *, on_device: bool = False
    ) -> SharedMemoryBlock:
        """A new segment under the channel's name. WeightSyncError if a live process holds it, or for lack of room."""
        path = path_of(channel)
        if pid := live_sender(path):
            raise WeightSyncError(f"process {pid} is sending on channel {channel!r} already")
        bucket = bucket_size(bucket_bytes)
        page = -(-(_READERS + ctypes.sizeof(ReaderState) * readers) // _PAGE) * _PAGE
        hidden = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        fd = os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_RDWR | _NO_FOLLOW, 0o600)
        try:
            size = page + 2 * (HEADER_BYTES + bucket)
            os.ftruncate(fd, size)
            _reserve(fd, 0, page)
            segment = cls(path, fd, size, readers)
            control = segment.control
            control.pid, control.start = os.getpid(), process_start_time(os.getpid())
            control.readers, control.bucket, control.version = readers, bucket, version
            control.status, control.on_device, control.magic = RUNNING, on_device, _MAGIC
            os.link(hidden, path)
        except FileExistsError:
            raise WeightSyncError(f"{path} is not ours to replace; remove it") from None
        finally:
            os.unlink(hidden)
        return segment

    @classmethod
    def open(cls, path: Path) -> SharedMemoryBlock | None:
        """The segment at `path`, None if there is none. WeightSyncError for a file that is not safe to read."""
        try:
            fd = os.open(path, os.O_RDWR | _NO_FOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise WeightSyncError(f"{path} cannot be opened ({error.strerror})") from error
        info = os.fstat(fd)
        private = stat.S_ISREG(info.st_mode) and not info.st_mode & 0o077 and info.st_uid == os.geteuid()
        if not private or info.st_size < _PAGE:
            os.close(fd)
            raise WeightSyncError(
                f"{path} is not a segment that only this user can read; find out who made it, remove it"
            )
        segment = cls(path, fd, info.st_size)
        if segment.control.magic != _MAGIC:
            segment.close()
            raise WeightSyncError(
                f"{path} was written by another version of verl; install the same on both sides, or remove it"
            )
        return segment

    # ---- both sides

    def sender_alive(self) -> bool:
        """The writing process runs."""
        return alive(self.control.pid, self.control.start)

    def _at(self, number: int) -> int:
        """First byte of the header of bucket `number`."""
        return len(self._map) - (2 - number % 2) * (HEADER_BYTES + self.control.bucket)

    def remove(self) -> None:
        """Remove the file if it is still this segment."""
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self.path, follow_symlinks=False).st_ino == self._inode:
                os.unlink(self.path)

    def close(self) -> None:
        """Forget the mapping; memory that a caller still looks at stays until it lets go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            del self.control, self.readers, self.bytes
            with contextlib.suppress(BufferError):
                self._map.close()

    # ---- writing

    def room(self, number: int) -> torch.Tensor:
        """Bucket `number` to write to, uint8 [bucket bytes]; `reserve` before writing."""
        start = self._at(number) + HEADER_BYTES
        return self.bytes[start : start + self.control.bucket]

    def reserve(self, number: int, upto: int) -> None:
        """Make sure that bytes below `upto` of bucket `number` have memory. WeightSyncError if there is none left."""
        have = self._reserved[number % 2]
        needed = HEADER_BYTES + upto
        if needed > have:
            more = min(max(needed, have + _STEP), HEADER_BYTES + self.control.bucket)
            _reserve(self._fd, self._at(number) + have, more - have)
            self._reserved[number % 2] = more

    def publish(self, number: int, header: bytes, used: int) -> None:
        """Bucket `number` is written: let the readers have it."""
        self.reserve(number, 0)
        at = self._at(number)
        self._map[at : at + len(header)] = header
        self.control.header[number % 2], self.control.used[number % 2] = len(header), used
        _fence()
        self.control.produced = number + 1

    def finish(self, reason: str | None = None) -> None:
        """No more buckets come; `reason` says why if that is a failure."""
        self.control.reason = (reason or "").encode()[:1023]
        _fence()
        self.control.status = DONE if reason is None else FAILED

    # ---- reading

    def attach(self, number: int) -> bool:
        """Become reader `number`; False if that one was here in this transfer already."""
        entry = self.readers[number]
        if entry.status != 0:
            return False
        entry.pid, entry.start = os.getpid(), process_start_time(os.getpid())
        _fence()
        entry.status = RUNNING
        return True

    def bucket(self, number: int) -> tuple[bytes, torch.Tensor]:
        """Header and bytes of published bucket `number`, a view until `taken`."""
        _fence()
        at, header, used = self._at(number), self.control.header[number % 2], self.control.used[number % 2]
        return self._map[at : at + header], self.bytes[at + HEADER_BYTES : at + HEADER_BYTES + used]

    def taken(self, reader: int, count: int) -> None:
        """The reader is done with `count` buckets."""
        _fence()
        self.readers[reader].taken = count

    def leave(self, reader: int, *, done: bool) -> None:
        """The reader reads no more; `done` if it has everything."""
        _fence()
        self.readers[reader].status = DONE if done else FAILED


def _reserve(fd: int, start: int, size: int) -> None:
    """Give the range its memory now: writing to a mapping of a full file system would kill the process."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, start, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        info = os.fstatvfs(fd)
        free = info.f_bavail * info.f_frsize
        raise WeightSyncError(
            f"{folder()} has {free >> 20} MiB left, a bucket needs {size >> 20} MiB: lower "
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes, or give the container "
            "more shared memory (docker run --shm-size, an emptyDir of medium Memory)"
        ) from error


def wait(until: Callable[[], bool], check: Callable[[], None], timeout: float, who: Callable[[], str]) -> None:
    """Poll `until`; every now and then `check`, which raises when waiting is in vain.

    Raises WeightSyncError after `timeout` seconds; `who` says what was waited for.
    """
    started = time.monotonic()
    looked, pause = started, 2e-5
    while not until():
        now = time.monotonic()
        if now - looked >= _PATIENCE:
            looked = now
            check()
        if now - started > timeout:
            raise WeightSyncError(f"nothing moved for {timeout:g} s; {who()}")
        time.sleep(pause)
        pause = min(pause * 1.5, 1e-3)
