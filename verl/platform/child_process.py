"""A Python process of the run's own that runs a user's code, and the socket between the two.

    run: ChildProcess ──lines of JSON──→ child: ParentChannel.inbox
                      ←─────────────────        ParentChannel.send

When the run's end of the socket closes, the child ends, whatever its code is doing; and what that started ends with the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from verl.platform.parent_channel import decode
from verl.platform.processes import started_by

LONGEST_MESSAGE = 2**31
_START_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[3]); "
    "from verl.platform.parent_channel import run_child; run_child(sys.argv[1], int(sys.argv[2]))"
)
_ENVIRONMENT = {
    # The same sets and dicts in every process, so that a result does not depend on which one computed it.
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class ChildProcess:
    """The run's end. `module` names the module whose `main(channel)` the process calls. All calls are made on one event loop."""

    def __init__(self, module: str):
        self._module = module
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, init: bytes) -> None:
        """Start the process and send it its first message. OSError if the system gives no process or socket."""
        paths = json.dumps([os.path.abspath(p) if p == "" else p for p in sys.path])
        ours, theirs = socket.socketpair()
        with theirs:
            self.reader, self.writer = await asyncio.open_connection(sock=ours, limit=LONGEST_MESSAGE)
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", _START_CODE, self._module, str(theirs.fileno()), paths),
                    stdin=subprocess.DEVNULL,
                    # What a user's code prints is for people; standard output belongs to the run's own lines.
                    stdout=2,
                    pass_fds=(theirs.fileno(),),
                    env={**_ENVIRONMENT, **os.environ, **started_by(os.getpid())},
                    start_new_session=True,
                )
            except BaseException:
                self.writer.close()
                raise
        self.writer.write(init)

    async def messages(self) -> AsyncIterator[Any]:
        """The messages of the process as they come, until its end of the connection closes. ValueError for nonsense."""
        while line := await self.reader.readline():
            yield decode(line)

    def kill(self) -> None:
        """Kill the process and what it started."""
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def close_after_exit(self, seconds: float) -> None:
        """End the connection of a process that is gone: one that it started may hold the other end open."""
        assert self.process is not None
        await self.process.wait()
        asyncio.get_running_loop().call_later(seconds, self.writer.close)

    async def end(self) -> None:
        """Kill what is left, collect the process, close the connection."""
        self.kill()
        if self.process is not None:
            await self.process.wait()
            self.writer.close()

    def exit_text(self) -> str:
        """How the process ended, in words. Only after `end`."""
        code = self.process.returncode if self.process is not None else None
        name = {-known: known.name for known in signal.Signals}.get(code or 0)
        if name is None:
            return f"exit code {code}"
        return f"{name}, often the system being out of memory" if name == "SIGKILL" else name
