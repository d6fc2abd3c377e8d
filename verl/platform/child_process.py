"""A Python process of the run's own that runs a user's code, the socket between the two, and what travels on it.

    run: ChildProcess ──lines of JSON──→ child: ParentChannel.inbox
                      ←─────────────────        ParentChannel.send

A message is one line of ASCII JSON, never a pickle. Values that JSON lacks (bytes, tuples, decimals, dates, dicts with
keys other than text) travel tagged and come back as they were; numpy scalars come back as numbers, arrays as lists or,
where `encode` is told to keep them, as arrays. When the run's end of the socket closes, the child ends, whatever its
code is doing; and what that started ends with the run.
"""

from __future__ import annotations

import base64
import datetime
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from decimal import Decimal

# Bound here, so that a user's function that replaces json.dumps changes no message.
from json import JSONDecoder, JSONEncoder, dumps
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from verl.platform.processes import bear_mark, started_by

if TYPE_CHECKING:
    import asyncio  # the child imports it when its code wants it

LONGEST_MESSAGE = 2**31
_START_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[3]); "
    "from verl.platform.child_process import run_child; run_child(sys.argv[1], int(sys.argv[2]))"
)
_ENVIRONMENT = {
    # The same sets and dicts in every process, so that a result does not depend on which one computed it.
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


_TAG = "$type"
_TEXT, _SAME = {str}, {bool, int, float, str}
_DATES: dict[str, Any] = {"datetime": datetime.datetime, "date": datetime.date, "time": datetime.time}


class NotPlain(TypeError):
    """A value is of a kind that cannot be sent to another process; the message names the path to it."""


def encode(message: Any, name: str = "message", *, arrays: bool = False) -> bytes:
    """One line. NotPlain names the place (in `name`) and the type of what cannot travel.

    `arrays`: numpy arrays come back as arrays of their dtype and shape, otherwise as lists.
    """
    return _ENCODER.encode(to_plain(message, name, arrays)).encode("ascii") + b"\n"


def decode(line: bytes) -> Any:
    """The message of a line. ValueError for a line that holds none."""
    return _DECODER.decode(str(line, "ascii"))


def to_plain(value: Any, where: str = "value", arrays: bool = False) -> Any:
    """`value` as something JSON can write. NotPlain names the place and type of what cannot travel."""
    kind = type(value)
    if value is None or kind in _SAME:
        return value
    if kind is dict or isinstance(value, Mapping):
        texts = _TEXT.issuperset(map(type, value)) or all(isinstance(k, str) for k in value)
        if texts and _TAG not in value:
            return {str(k): to_plain(v, f"{where}.{k}", arrays) for k, v in value.items()}
        pairs = [[to_plain(k, f"{where} key"), to_plain(v, f"{where}[{k!r}]", arrays)] for k, v in value.items()]
        return {_TAG: "dict", "v": pairs}
    if isinstance(value, list | tuple):
        items = [to_plain(v, f"{where}[{i}]", arrays) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "v": items}
    if isinstance(value, bytes | bytearray):
        return {_TAG: "bytes", "v": base64.b64encode(bytes(value)).decode("ascii")}
    if isinstance(value, Decimal):
        return {_TAG: "decimal", "v": str(value)}
    for name, date in _DATES.items():
        if isinstance(value, date):
            return {_TAG: name, "v": value.isoformat()}
    for simple in (str, int, float):  # subclasses: enumerations, numpy's float64
        if isinstance(value, simple):
            return simple(value)
    if hasattr(value, "tolist"):  # numpy arrays and scalars, torch tensors
        has_axes = getattr(value, "ndim", None)  # None or 0: a scalar
        if arrays and has_axes and hasattr(value, "tobytes") and value.dtype.kind in "biuf":
            data = base64.b64encode(value.tobytes()).decode("ascii")
            return {_TAG: "array", "v": [value.dtype.str, list(value.shape), data]}
        return to_plain(value.tolist(), where, arrays)
    raise NotPlain(f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent")


def _array(content: list[Any]) -> Any:
    import numpy as np

    dtype, shape, data = content
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()


_KINDS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "bytes": base64.b64decode,
    "decimal": Decimal,
    "array": _array,
    **{name: kind.fromisoformat for name, kind in _DATES.items()},
}


def _from_plain(mapping: dict[str, Any]) -> Any:
    """What a mapping of `to_plain` stands for. JSON's reader calls it for the inner ones first."""
    return _KINDS[mapping[_TAG]](mapping["v"]) if _TAG in mapping else mapping


_DECODER = JSONDecoder(object_hook=_from_plain)
_ENCODER = JSONEncoder(separators=(",", ":"))


class ChildProcess:
    """The run's end. `module` names the module whose `main(channel)` the process calls. Use it from one event loop."""

    def __init__(self, module: str):
        self._module = module
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, init: bytes) -> None:
        """Start the process and send it its first message. OSError if the system gives no process or socket."""
        import asyncio

        paths = dumps([os.path.abspath(p) if p == "" else p for p in sys.path])
        parent_socket, child_socket = socket.socketpair()
        with child_socket:
            self.reader, self.writer = await asyncio.open_connection(sock=parent_socket, limit=LONGEST_MESSAGE)
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", _START_CODE, self._module, str(child_socket.fileno()), paths),
                    stdin=subprocess.DEVNULL,
                    # What a user's code prints is for people; standard output belongs to the run's own lines.
                    stdout=2,
                    pass_fds=(child_socket.fileno(),),
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
        import asyncio

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
        name = {-number: number.name for number in signal.Signals}.get(code or 0)
        if name is None:
            return f"exit code {code}"
        return f"{name}, often the system being out of memory" if name == "SIGKILL" else name


class ParentChannel:
    """The child's end of the socket. `send` may be used from any thread.

    `on_message` sees every message first, on the reading thread; those for which it returns False go to `inbox`.
    """

    def __init__(self, fd: int):
        self.inbox: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.on_message: Callable[[dict[str, Any]], bool] = lambda message: False
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        threading.Thread(target=self._listen, name="verl-parent", daemon=True).start()

    def send(self, message: dict[str, Any], *, arrays: bool = False) -> None:
        """Write one message whole. NotPlain if it holds what cannot travel."""
        if os.getpid() != self._pid:
            os._exit(0)  # the user's code forked and the copy returned too: the original speaks for both
        line = encode(message, arrays=arrays)
        with self._lock:
            self._socket.sendall(line)

    def _listen(self) -> None:
        for line in self._socket.makefile("rb"):
            message = decode(line)
            if not self.on_message(message):
                self.inbox.put(message)
        os._exit(0)


def die_with_parent() -> None:
    """Make the system kill this process when the thread that started it ends, whatever its code does then (Linux)."""
    if sys.platform == "linux":
        import ctypes

        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def run_child(module: str, fd: int) -> None:
    """What a child process runs: `main(channel)` of the module."""
    die_with_parent()  # the run may die while the user's code holds the interpreter
    bear_mark()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    importlib.import_module(module).main(ParentChannel(fd))
