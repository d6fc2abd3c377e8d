"""A scoring process: loads one reward function and answers calls over two pipes.

    run ──init, calls, "stack?"──→ reader thread → inbox → main thread: the function
        ←─ready, results, sections, stack────────────────────┘

Sync functions run one call at a time on the main thread; async ones run concurrently in one event loop. When
the pipe closes the run is gone, and so is this process, whatever the function is doing. Only a manager class of the
user's own needs torch here.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from verl.reward import guard
from verl.reward.errors import RewardLoadError
from verl.reward.outcome import Outcome, failed, normalise
from verl.reward.wire import Unpacker, from_plain, pack, to_plain

TRACEBACK_CHARACTERS = 6000


class Channel:
    """Both ends of the talk with the run. `send` may be used from any thread."""

    def __init__(self, read_fd: int, write_fd: int):
        self.inbox: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._read, self._write = read_fd, write_fd
        self._lock = threading.Lock()
        for fd in (read_fd, write_fd):
            os.set_inheritable(fd, False)
        guard.set_announce(self._announce)
        threading.Thread(target=self._listen, name="reward-pipe", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Write one message whole."""
        data = memoryview(pack(message))
        with self._lock:
            while data:
                data = data[os.write(self._write, data) :]

    def _announce(self, seconds: float | None, what: str) -> None:
        self.send({"section": seconds, "what": what})

    def _listen(self) -> None:
        unpacker = Unpacker()
        while data := os.read(self._read, 1 << 16):
            for message in unpacker.feed(data):
                if "stack" in message:
                    self.send({"stack": _main_stack()})
                else:
                    self.inbox.put(message)
        os._exit(0)


def _main_stack() -> str:
    """Where the main thread is now, outermost first, without our own frames below the function."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = traceback.format_stack(frame) if frame is not None else []
    return "".join(line for line in lines if __file__ not in line and "<string>" not in line)[
        -TRACEBACK_CHARACTERS:
    ]


def _die_with_parent() -> None:
    """Ask Linux to kill this process if the run dies while the function holds the interpreter."""
    if sys.platform == "linux":
        import ctypes

        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


class Function:
    """The function of this process and how it is called."""

    def __init__(self, init: dict[str, Any]):
        self.kwargs: dict[str, Any] = from_plain(init["kwargs"])
        self.batch: bool = init["batch"]
        self.positional = False
        self.is_async = False
        if init.get("manager"):
            from verl.reward.manager_class import Manager

            manager = Manager(init["path"], init["name"], from_plain(init["manager"]))
            self.call: Callable[..., Any] = manager
            self.is_async = manager.is_async
            return
        if init["path"] is None:
            from verl.reward.registry import check_kwargs, default_compute_score

            if self.kwargs:
                check_kwargs(self.kwargs)
            self.call = default_compute_score
            return
        from verl.reward import load

        self.call = load.load_function(init["path"], init["name"])
        style = load.calling_style(self.call, self.kwargs, batch=self.batch, positional=init["positional"])
        self.positional = style == "positional"
        self.is_async = load.is_async(self.call)

    def __call__(self, message: dict[str, Any]) -> Any:
        arguments = from_plain(message["call"])
        kwargs = {**from_plain(message.get("kwargs") or {}), **self.kwargs}
        _seed(message.get("seed", 0))
        if self.positional:
            return self.call(*arguments.values(), **kwargs)
        return self.call(**arguments, **kwargs)


def _seed(seed: int) -> None:
    """A function that draws random numbers draws the same ones for an answer in whatever process it runs."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed(seed & 0xFFFFFFFF)


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:2000]
    except Exception:  # an exception whose own text raises must not end the process
        return type(error).__name__


def _raised(error: BaseException, seconds: float) -> Outcome:
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    try:
        trace = "".join(traceback.format_exception(type(error), error, inner))[-TRACEBACK_CHARACTERS:]
    except Exception as second:
        trace = f"(the traceback cannot be shown: {type(second).__name__})"
    return failed("exception", f"it raised {_text(error)}", trace, seconds)


def _outcome(value: Any, seconds: float) -> Outcome:
    try:
        score, parts, bare = normalise(value)
    except Exception as error:
        return failed("value", _text(error).partition(": ")[2] or _text(error), seconds=seconds)
    return Outcome(score, parts, bare, seconds)


def _results(value: Any, count: int | None, seconds: float) -> list[Outcome]:
    """Outcomes of a call: one, or `count` of a batch call."""
    if count is None:
        return [_outcome(value, seconds)]
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple):
        problem = f"it returned a {type(value).__name__}; a batch function returns a list of {count} scores"
    elif len(values) != count:
        problem = f"it returned {len(values)} scores for {count} answers"
    else:
        return [_outcome(v, seconds / max(1, count)) for v in values]
    return [failed("value", problem, seconds=seconds)] * count


def _message(call_id: int, outcomes: list[Outcome]) -> dict[str, Any]:
    rows = [
        [to_plain(o.score), to_plain(o.parts), o.bare, o.seconds, o.kind, o.error, o.traceback]
        for o in outcomes
    ]
    return {"id": call_id, "outcomes": rows}


def _clock() -> float:
    """Seconds without those of libraries' first imports, which are not the answer's that happened to need them."""
    return time.perf_counter() - guard.seconds_apart()


def _serve(channel: Channel, function: Function) -> None:
    while True:
        message = channel.inbox.get()
        count = message.get("count")
        started = _clock()
        try:
            value = function(message)
            if hasattr(value, "__await__"):
                import asyncio

                value = asyncio.run(_finish(value))
        except BaseException as error:
            outcomes = [_raised(error, _clock() - started)] * (1 if count is None else count)
        else:
            outcomes = _results(value, count, _clock() - started)
        channel.send(_message(message["id"], outcomes))


async def _finish(value: Any) -> Any:
    return await value


def _serve_async(channel: Channel, function: Function) -> None:
    import asyncio

    async def one(message: dict[str, Any]) -> None:
        count = message.get("count")
        started = time.perf_counter()
        limit = asyncio.timeout(message["timeout"])
        try:
            async with limit:
                value = await function(message)
        except BaseException as error:
            seconds = time.perf_counter() - started
            outcome = _raised(error, seconds)
            if limit.expired():
                outcome = failed(
                    "timeout", f"it took more than {message['timeout']:g} s", outcome.traceback, seconds
                )
            outcomes = [outcome] * (1 if count is None else count)
        else:
            outcomes = _results(value, count, time.perf_counter() - started)
        channel.send(_message(message["id"], outcomes))

    async def serve() -> None:
        running: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        while True:
            message = await loop.run_in_executor(None, channel.inbox.get)
            task = asyncio.ensure_future(one(message))
            running.add(task)
            task.add_done_callback(running.discard)

    asyncio.run(serve())


def main(read_fd: int, write_fd: int) -> None:
    """Serve calls until the run closes the pipe. The first message says which function to load."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(read_fd, write_fd)
    init = channel.inbox.get()
    try:
        function = Function(init)
    except RewardLoadError as error:
        channel.send({"unusable": str(error), "traceback": ""})
        return
    except BaseException as error:
        trace = _raised(error, 0.0).traceback
        channel.send({"unusable": f"{init['path']} cannot be imported: {_text(error)}", "traceback": trace})
        return
    channel.send({"ready": True, "async": function.is_async})
    (_serve_async if function.is_async else _serve)(channel, function)
