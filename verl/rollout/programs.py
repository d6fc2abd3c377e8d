"""Programs of the user's: run with all that they start, and the end of their output kept for what is said of a failure."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

from verl.platform.child_process import die_with_parent
from verl.rollout.record import EnvironmentFailed

_KEPT = 2**16  # bytes: a program may print more than memory holds
# Seconds in which output may still come; a process that the program started may hold its end open.
_EXIT_WAIT = 1.0
_POLL = 0.05  # seconds between two looks at whether a program has ended
_LINES, _CHARACTERS = 10, 2000


class Output:
    """One stream of a program, read in the running event loop. echo: it is passed on to this process's stderr."""

    def __init__(self, stream: asyncio.StreamReader | None, *, echo: bool = False):
        assert stream is not None
        self._end = bytearray()
        self._reading = asyncio.ensure_future(self._read(stream, echo))

    async def _read(self, stream: asyncio.StreamReader, echo: bool) -> None:
        while part := await stream.read(_KEPT):
            self._end += part
            del self._end[:-_KEPT]
            if echo:
                with suppress(OSError):
                    os.write(2, part)

    async def end(self) -> str:
        """The last 64 KiB, once the program has ended."""
        await asyncio.wait([self._reading], timeout=_EXIT_WAIT)
        return self._end.decode(errors="replace")

    async def last_lines(self) -> str:
        """The last lines, each on a line of its own, to follow an error's text; "" where nothing was written."""
        lines = "\n".join((await self.end()).strip().splitlines()[-_LINES:])
        return f"; its last lines:\n{lines[-_CHARACTERS:]}" if lines else ""


async def piped() -> tuple[Output, TextIO]:
    """The stderr of a program that other code starts, and the file which that code has to give it."""
    read, write = os.pipe()
    stream = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(stream)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(read, "rb"))
    return Output(stream, echo=True), os.fdopen(write, "w")


def kill(process: asyncio.subprocess.Process) -> None:
    """End a program that leads its session, and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def run_program(command: str, variables: Mapping[str, str]) -> tuple[int, str, str]:
    """(exit status, end of its output, last lines of its stderr) of a program, which ends with all that it started.
    EnvironmentFailed if it cannot be started."""
    try:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **variables},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    except OSError as error:
        raise EnvironmentFailed(f"{command} cannot be started: {error}") from error
    stdout, stderr = Output(process.stdout), Output(process.stderr, echo=True)
    try:
        while process.returncode is None:  # wait() would wait for all that hold its output open, too
            await asyncio.sleep(_POLL)
    finally:
        kill(process)
        output, last_lines = await asyncio.gather(stdout.end(), stderr.last_lines())
    return process.returncode, output, last_lines
