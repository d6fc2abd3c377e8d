"""One scoring process seen from the run: start, talk without ever blocking, kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from verl.reward.wire import Unpacker, pack

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[3]); "
    "from verl.reward.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
_ENVIRONMENT = {
    # The same sets and dicts in every process, so that a score does not depend on which one computed it.
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(slots=True)
class Task:
    """One call on its way. `count` is the number of answers of a batch call, None for a single one."""

    id: int
    message: dict[str, Any]
    timeout: float
    future: Future[Any]
    queued: float
    count: int | None = None
    alone: bool = False
    started: float = 0.0


@dataclass(slots=True)
class Verdict:
    """Why the run is killing a process."""

    kind: str
    message: str
    stack: str = ""


@dataclass(eq=False)
class WorkerProcess:
    """A started process. All methods are called by the pool's thread only.

    `deadline_start` limits the import; `section_end` is the end of an announced limited section; `kill_at` is
    set once a verdict is there and its stack has been asked for.
    """

    proc: subprocess.Popen[bytes]
    read_fd: int
    write_fd: int
    deadline_start: float
    ready: bool = False
    is_async: bool = False
    running: dict[int, Task] = field(default_factory=dict)
    section_end: float | None = None
    section_what: str = ""
    section_limit: float = 0.0
    verdict: Verdict | None = None
    kill_at: float | None = None
    unpacker: Unpacker = field(default_factory=Unpacker)
    outgoing: bytearray = field(default_factory=bytearray)

    @classmethod
    def start(cls, init: dict[str, Any], deadline_start: float) -> WorkerProcess:
        """Start a process and send it its function. OSError if the system gives no process or pipe."""
        child_read, write_fd = os.pipe()
        read_fd, child_write = os.pipe()
        paths = json.dumps([os.path.abspath(p) if p == "" else p for p in sys.path])
        try:
            proc = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(child_read), str(child_write), paths],
                stdin=subprocess.DEVNULL,
                # What a reward function prints is for people; standard output belongs to the run's own lines.
                stdout=2,
                pass_fds=(child_read, child_write),
                env={**_ENVIRONMENT, **os.environ},
                start_new_session=True,
            )
        except OSError:
            for fd in (read_fd, write_fd):
                os.close(fd)
            raise
        finally:
            os.close(child_read)
            os.close(child_write)
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        worker = cls(proc, read_fd, write_fd, deadline_start)
        worker.send(init)
        return worker

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message and write what fits now; `flush` writes the rest."""
        self.outgoing += pack(message)
        self.flush()

    def flush(self) -> None:
        """Write without blocking. A process that is gone loses its messages; its death is seen elsewhere."""
        while self.outgoing:
            try:
                written = os.write(self.write_fd, self.outgoing[: 1 << 16])
            except BlockingIOError:
                return
            except BrokenPipeError:
                self.outgoing.clear()
                return
            del self.outgoing[:written]

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """(messages that are complete, True if the process closed its end)."""
        messages: list[dict[str, Any]] = []
        while True:
            try:
                data = os.read(self.read_fd, 1 << 18)
            except BlockingIOError:
                return messages, False
            if not data:
                return messages, True
            messages += self.unpacker.feed(data)

    def takes(self, task: Task, concurrency: int) -> bool:
        """True if the task can start here now."""
        if not self.ready or self.verdict is not None:
            return False
        if not self.running:
            return True
        if not self.is_async or task.alone or any(t.alone for t in self.running.values()):
            return False
        return len(self.running) < concurrency

    def kill(self) -> None:
        """Kill the process and what it started, and collect it."""
        try:
            os.killpg(self.proc.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.proc.kill()
        self.proc.wait()

    def close(self) -> None:
        """Kill and close the pipes."""
        self.kill()
        os.close(self.read_fd)
        os.close(self.write_fd)

    def epitaph(self) -> str:
        """How the process ended, in words. Only after `kill` or a death seen."""
        code = self.proc.returncode
        if code is None or code >= 0:
            return f"exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"{name}, often the system being out of memory" if name == "SIGKILL" else name
