"""What a program of the user's writes: its end is kept, for what is said of a failure."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TextIO

_KEPT = 2**16  # bytes: a program may print more than memory holds
_EXIT_WAIT = (
    1.0  # seconds in which output may still come; a process that the program started may hold its end open
)
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
