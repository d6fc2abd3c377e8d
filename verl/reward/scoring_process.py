"""A scoring process: loads one reward function and serves calls over a socket.

    run ──init, calls, "stack?"──→ reader thread → inbox → main thread: the function
        ←─ready, outcomes, stack─────────────────────────────┘

Synchronous functions run one call at a time on the main thread; async ones run concurrently in one event loop. When
the socket closes the run is gone, and so is this process, whatever the function is doing. Only a manager class of the
user's own needs torch here.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from verl.data.load_object import SOURCES
from verl.errors import REFUSED_NAMES
from verl.platform import child_process
from verl.platform.child_process import ParentChannel
from verl.reward.outcome import (
    TRACEBACK_CHARACTERS,
    Outcome,
    RewardLoadError,
    failed,
    outcome_of,
    raised,
    text_digest,
    texts_of_call,
)

_seconds_apart = 0.0
_undecided = 0


def count_undecided() -> None:
    """Count a comparison that a verifier did not decide because of the response, for the call under way."""
    global _undecided
    _undecided += 1


@contextmanager
def apart() -> Iterator[None]:
    """Work done once for all calls (importing a library): its seconds are not counted as those of a call."""
    global _seconds_apart
    started = time.perf_counter()
    try:
        yield
    finally:
        _seconds_apart += time.perf_counter() - started


def _clock() -> float:
    return time.perf_counter() - _seconds_apart


def _main_stack() -> str:
    """Where the main thread is now, outermost first, without our own frames below the function."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = traceback.format_stack(frame) if frame is not None else []
    own_files = (__file__, child_process.__file__, "<string>")
    shown = [line for line in lines if not any(name in line for name in own_files)]
    return "".join(shown)[-TRACEBACK_CHARACTERS:]


class Function:
    """The function of this process and how it is called."""

    def __init__(self, init: dict[str, Any]):
        self.kwargs: dict[str, Any] = init["kwargs"]
        self.batch: bool = init["batch"]
        self.positional = 0
        self.is_async = False
        self.call: Callable[..., Any]
        if init["manager"]:
            from verl.reward.managers import Manager

            manager = Manager(init["path"], init["name"], init["manager"], init["offered"])
            self.call, self.is_async = manager, manager.is_async
        elif init["path"] is None:
            from verl.reward.rules import check_kwargs, default_compute_score

            if self.kwargs:  # the check loads every rule
                check_kwargs(self.kwargs)
            self.call = default_compute_score
        else:
            from verl.reward.user_function import calling_style, is_async, load_function, taken

            self.call = load_function(init["path"], init["name"])
            self.kwargs = taken(self.call, init["offered"]) | self.kwargs
            self.positional = calling_style(self.call, self.kwargs, batch=self.batch, positional=init["positional"])
            self.is_async = is_async(self.call)

    def __call__(self, message: dict[str, Any]) -> Any:
        arguments, kwargs = message["arguments"], {**message["kwargs"], **self.kwargs}
        _seed(message["seed"])
        if self.positional:
            return self.call(*[*arguments.values()][: self.positional], **kwargs)
        return self.call(**arguments, **kwargs)

    def outcomes(self, value: Any, count: int, seconds: float) -> list[Outcome]:
        """Outcomes of what a call returned: one, or `count` of a batch call."""
        if not self.batch:
            return [outcome_of(value, seconds)]
        values = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, list | tuple):
            problem = f"it returned a {type(value).__name__}; a batch function returns a list of scores"
        elif len(values) != count:
            problem = f"it returned {len(values)} scores for {count} responses"
        else:
            return [outcome_of(v, seconds / max(1, count)) for v in values]
        return [failed("value", problem, seconds=seconds)] * count


def _seed(seed: int) -> None:
    """A function that draws random numbers draws the same ones for a response in whatever process it runs."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed(seed & 0xFFFFFFFF)


def _report(channel: ParentChannel, number: int, digests: list[int | None], outcomes: list[Outcome]) -> None:
    """Send the outcomes of a call, or that the function asked for what there is not, whatever it made of that. digests:
    of the responses, taken before the function could change them."""
    global _undecided
    if _undecided and outcomes:  # a failure may stand for all responses of a call
        outcomes = [replace(outcomes[0], undecided=_undecided), *outcomes[1:]]
        _undecided = 0
    if REFUSED_NAMES:
        outcomes = [failed("load", f"it asks for what verl lacks: {REFUSED_NAMES[0]}", o.traceback) for o in outcomes]
    scored = digests if len(digests) == len(outcomes) else [None] * len(outcomes)
    rows = [{**vars(outcome), "scored": digest} for outcome, digest in zip(outcomes, scored, strict=True)]
    channel.send({"id": number, "outcomes": rows})


def _digests(message: dict[str, Any]) -> list[int | None]:
    texts = texts_of_call(message["arguments"])
    return [text_digest(text) if isinstance(text, str) else None for text in texts]


def _serve(channel: ParentChannel, function: Function) -> None:
    while True:
        message = channel.inbox.get()
        digests, started = _digests(message), _clock()
        try:
            value = function(message)
            if hasattr(value, "__await__"):
                import asyncio

                value = asyncio.run(_finish(value))
        except BaseException as error:
            outcomes = [raised(error, _clock() - started, __file__)] * message["count"]
        else:
            outcomes = function.outcomes(value, message["count"], _clock() - started)
        _report(channel, message["id"], digests, outcomes)


async def _finish(value: Any) -> Any:
    return await value


def _serve_async(channel: ParentChannel, function: Function) -> None:
    import asyncio

    async def one(message: dict[str, Any]) -> None:
        digests, started = _digests(message), time.perf_counter()
        limit = asyncio.timeout(message["timeout"])
        try:
            async with limit:
                value = await function(message)
        except BaseException as error:
            outcome = raised(error, time.perf_counter() - started, __file__)
            if limit.expired():
                outcome.kind, outcome.error = "timeout", f"it took more than {message['timeout']:g} s"
            outcomes = [outcome] * message["count"]
        else:
            outcomes = function.outcomes(value, message["count"], time.perf_counter() - started)
        _report(channel, message["id"], digests, outcomes)

    async def serve() -> None:
        running: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        while True:
            message = await loop.run_in_executor(None, channel.inbox.get)
            task = asyncio.ensure_future(one(message))
            running.add(task)
            task.add_done_callback(running.discard)

    asyncio.run(serve())


def main(channel: ParentChannel) -> None:
    """Serve calls until the run closes the socket. The first message says which function to load."""

    def stack_wanted(message: dict[str, Any]) -> bool:
        if "stack" in message:
            channel.send({"stack": _main_stack()})
        return "stack" in message

    channel.on_message = stack_wanted
    init = channel.inbox.get()
    try:
        SOURCES.update(init["sources"])
        function = Function(init)
        if REFUSED_NAMES:
            raise RewardLoadError(f"{init['path']} asks for what verl lacks: {REFUSED_NAMES[0]}")
    except RewardLoadError as error:
        channel.send({"unusable": str(error), "traceback": ""})
        return
    except BaseException as error:
        failure = raised(error, 0.0, __file__)
        problem = f"{init['path']} cannot be imported: {failure.error}"
        channel.send({"unusable": problem, "traceback": failure.traceback})
        return
    channel.send({"ready": function.is_async})
    (_serve_async if function.is_async else _serve)(channel, function)
