"""User-written agent loops in processes of their own, so that one that computes or blocks delays neither sampling nor
the driver.

    driver: LoopProcesses.run ──run──────→ child: loops.run: the loop, with a session on a copy of the record
            Attempt  ←─call──────        (segment, length of it, inserted ids)
                              ──completion→
                              ←─outcome, or error─

A process runs many trajectories at once, in one event loop. The first is started by the first trajectory, another while
all are busy, up to a limit. A process that ends loses its trajectories: their environment failed (LoopEnded). One that
answers nothing any more is ended: no deadline passes while code of the user's blocks its event loop, or has stopped it.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import math
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from verl.config.schema.base import Map, select
from verl.config.schema.entries import Config
from verl.engine.rollout.base import Completion, OnTokens, SamplingParams
from verl.errors import UserError
from verl.platform.child_process import ChildProcess, ParentChannel, encode
from verl.platform.host_resources import usable
from verl.rollout import loops
from verl.rollout.record import Outcome, Place, Record, SegmentRecord
from verl.rollout.session import LoopSetup
from verl.trajectory import Media

_EXIT_WAIT = 1.0  # seconds in which what a process sent before its end may still come
_PING_SECONDS = 5.0
_GRACE_SECONDS = 60.0  # beyond the deadline of a tool: loading tools may hold a process up, too


class LoopFailed(RuntimeError):
    """An agent loop failed in its process; the text is that of the error there."""


class LoopEnded(LoopFailed):
    """The process of an agent loop ended, with all of its trajectories."""


class LoopUnusable(UserError):
    """No process can run the user's agent loops."""

    ends_the_run = True


@dataclass(eq=False, slots=True)
class _Run:
    """One trajectory in a process."""

    record: Record
    outcome: asyncio.Future[Outcome]
    media: dict[str, Media] = field(default_factory=dict)
    calls: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def fail(self, error: Exception) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def place(self, message: Mapping[str, Any]) -> Place:
        """Where a call's tokens go, by the numbers that the process's copy of the record has for segments, too."""
        self.media |= {facts["key"]: Media(**facts) for facts in message["media"]}
        numbers, length, inserted, keys, replaces = message["place"]
        segment, follows = (None if number is None else self.record.segments[number] for number in numbers)
        shown = tuple(self.media[key] for key in keys)
        return Place(segment, length, np.asarray(inserted, np.int64), shown, replaces, follows)


class _LoopProcess(ChildProcess):
    def __init__(self) -> None:
        super().__init__(__name__)
        self.running: dict[int, _Run] = {}
        self.started = asyncio.Event()
        self.why = ""
        # Seconds without an answer, in which this process was not held up itself; before the first answer none.
        self.silence = -math.inf

    def send_tokens(self, call: int, ids: Sequence[int]) -> None:
        """Tell the process what a call has sampled so far."""
        self.writer.write(encode({"call": call, "tokens": list(ids)}))


class LoopProcesses:
    """The processes of a run. All calls are made on one event loop.

    limit: at most this many processes, and no more than there are CPUs. config: the run's checked configuration.
    """

    def __init__(self, limit: int, config: Config):
        one_port = select(config, "actor_rollout_ref.rollout.agent.http_port")
        self._limit = 1 if one_port else min(limit, usable())
        self._config = config
        timeout = select(config, "actor_rollout_ref.rollout.agent.tool_timeout")
        self._patience = None if timeout is None else timeout + _GRACE_SECONDS
        self._numbers = itertools.count()
        self._processes: dict[_LoopProcess, asyncio.Task[None]] = {}

    async def run(self, name: str, record: Record, sampling: SamplingParams, row: dict[str, Any]) -> Outcome:
        """What the loop registered as `name` returns for a row (see `loops.run`).

        LoopFailed with what it raised, NotPlain for a value that cannot be sent, LoopUnusable if no process can run it.
        """
        number = next(self._numbers)
        module = loops.get(name).__module__
        message = {"run": number, "module": module, "name": name, "sampling": asdict(sampling)}
        message["row_images"] = record.row_images
        line = encode(message | {"row": row}, "the trajectory", arrays=True)
        process = self._least_busy()
        run = process.running[number] = _Run(record, asyncio.get_running_loop().create_future())
        try:
            await process.started.wait()
            if not run.outcome.done():
                process.writer.write(line)
            return await run.outcome
        except asyncio.CancelledError:
            if process.started.is_set() and number in process.running:
                process.writer.write(encode({"cancel": number}))
            raise
        finally:
            process.running.pop(number, None)
            for call in run.calls.values():
                call.cancel()

    async def close(self) -> None:
        """Kill every process."""
        for process in self._processes:
            process.kill()
        await asyncio.gather(*self._processes.values(), return_exceptions=True)

    def _least_busy(self) -> _LoopProcess:
        best = min(self._processes, key=lambda process: len(process.running), default=None)
        if best is not None and (not best.running or len(self._processes) >= self._limit):
            return best
        process = _LoopProcess()
        self._processes[process] = asyncio.ensure_future(self._serve(process))
        return process

    async def _serve(self, process: _LoopProcess) -> None:
        """A process from its start to its end."""
        why = ""
        watching: list[asyncio.Future[None]] = []
        unusable: LoopUnusable | None = None
        try:
            await process.start(encode(self._config.to_dict()))
            for watch in (process.close_after_exit(_EXIT_WAIT), self._end_if_silent(process)):
                watching.append(asyncio.ensure_future(watch))
            process.started.set()
            async for message in process.messages():
                process.silence = 0.0
                if "unusable" in message:
                    unusable = LoopUnusable(f"agent loops cannot run in processes: {message['unusable']}")
                elif "pong" not in message:
                    self._handle(process, message)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f" ({type(error).__name__}: {error})"
        finally:
            del self._processes[process]
            for task in watching:
                task.cancel()
            await process.end()
            process.started.set()
            ended = LoopEnded(f"the agent loop's process ended: {process.why or process.exit_text()}{why}")
            for run in process.running.values():
                run.fail(unusable or ended)

    async def _end_if_silent(self, process: _LoopProcess) -> None:
        while self._patience is not None:
            process.writer.write(encode({"ping": True}))
            await asyncio.sleep(_PING_SECONDS)
            process.silence += _PING_SECONDS
            if process.silence > self._patience:
                hint = "does code of yours block its event loop?"
                process.why = f"it answered nothing for {self._patience:g} s: {hint}"
                process.kill()
                return

    def _handle(self, process: _LoopProcess, message: dict[str, Any]) -> None:
        run = process.running.get(message["run"])
        if run is None:  # cancelled meanwhile
            return
        if "call" in message:
            place = run.place(message)
            run.record.begin(place)  # now: in the order in which the process began its calls
            call = asyncio.ensure_future(self._call(process, run, place, message))
            call.add_done_callback(partial(self._give_up, process, message["call"]))
            run.calls[message["call"]] = call
        elif "drop" in message:
            run.calls[message["drop"]].cancel()
        elif "error" in message:
            error = LoopFailed(message["error"])
            error.add_note(message["traceback"])
            run.fail(error)
        elif not run.outcome.done():
            run.outcome.set_result(Outcome(**message["outcome"]))

    @staticmethod
    def _give_up(process: _LoopProcess, number: int, call: asyncio.Task[None]) -> None:
        """Answer a call that was cancelled: the process waits for it."""
        if call.cancelled() and not process.writer.is_closing():
            process.writer.write(encode({"call": number, "error": "the call was given up"}))

    @staticmethod
    async def _call(process: _LoopProcess, run: _Run, place: Place, message: dict[str, Any]) -> None:
        result: dict[str, Any] = {"call": message["call"]}
        try:
            sampling = SamplingParams(**message["sampling"])
            on_tokens = partial(process.send_tokens, message["call"]) if message["streamed"] else None
            completion, segment = await run.record.call(place, sampling, on_tokens)
            result["replaced"] = place.segment is not None and place.segment.parent is segment
            # These stay here, in the record: they are larger than all the rest.
            result["completion"] = asdict(replace(completion, routed_experts=None, sampling_mask=None))
        except Exception as error:
            if getattr(error, "ends_the_run", False):
                run.fail(error)
                return
            result["error"] = f"{type(error).__name__}: {error}"
        process.writer.write(encode(result, arrays=True))


# -- the child -----------------------------------------------------------------------------------------------------


def main(channel: ParentChannel) -> None:
    """Run trajectories until the run closes the socket. The first message is the run's configuration."""
    from verl.data.tokenizer import tokenizer_of
    from verl.plugins import import_modules

    config = Map.of(channel.inbox.get())
    try:
        model = config.actor_rollout_ref.model
        import_modules(model.external_lib)
        tokenizer = tokenizer_of(model, config.data.tokenizer)
        child = _Child(channel, tokenizer, config)
    except Exception as error:
        channel.send({"unusable": f"{type(error).__name__}: {error}"})
        return
    asyncio.run(child.serve())


Answer = asyncio.Future[tuple[Completion, SegmentRecord]]


class _RemoteRecord(Record):
    """A copy of a trajectory's record, whose calls the driver makes and records too. run: the message that began it."""

    def __init__(self, run: Mapping[str, Any], child: _Child):
        super().__init__(run["row_images"])
        self._number, self._child = run["run"], child
        self._sent: set[str] = set()

    async def call(
        self, place: Place, sampling: SamplingParams, on_tokens: OnTokens | None = None
    ) -> tuple[Completion, SegmentRecord]:
        """See `Attempt.call`."""
        self.begin(place)
        number = next(self._child.numbers)
        future: Answer = asyncio.get_running_loop().create_future()
        self._child.calls[number] = (future, self, place, on_tokens)
        new = [vars(media) for media in place.shown if media.key not in self._sent]
        self._sent.update(media.key for media in place.shown)
        segments = [None if segment is None else segment.number for segment in (place.segment, place.follows)]
        shown = [media.key for media in place.shown]
        sent_place = (segments, place.length, place.inserted, shown, place.replaces)
        message = {
            "run": self._number,
            "call": number,
            "place": sent_place,
            "media": new,
            "streamed": on_tokens is not None,
        }
        self._child.channel.send(message | {"sampling": asdict(sampling)}, arrays=True)
        try:
            return await future
        except asyncio.CancelledError:
            self._child.channel.send({"run": self._number, "drop": number})
            raise


class _Child:
    def __init__(self, channel: ParentChannel, tokenizer: Any, config: Map):
        self.channel, self._setup = channel, LoopSetup(tokenizer, config)
        loops.load_listed(self._setup.loops_file)
        self._runs: dict[int, asyncio.Task[None]] = {}
        self.calls: dict[int, tuple[Answer, Record, Place, OnTokens | None]] = {}
        self.numbers = itertools.count()

    async def serve(self) -> None:
        """Handle the messages of the run as they come, on a thread of their own: the loop's may all be busy with code
        of the user's."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            while True:
                loop.call_soon_threadsafe(self._take, self.channel.inbox.get())

        threading.Thread(target=read, name="verl-inbox", daemon=True).start()
        await loop.create_future()

    def _take(self, message: dict[str, Any]) -> None:
        if "row" in message:
            self._runs[message["run"]] = asyncio.ensure_future(self._run(message))
        elif "cancel" in message:
            if (task := self._runs.get(message["cancel"])) is not None:
                task.cancel()
        elif "ping" in message:
            self.channel.send({"pong": True})
        elif message["call"] in self.calls:
            if "tokens" not in message:
                self._completed(message)
            elif (on_tokens := self.calls[message["call"]][3]) is not None:
                on_tokens(message["tokens"])

    async def _run(self, message: dict[str, Any]) -> None:
        number = message["run"]
        record = _RemoteRecord(message, self)
        try:
            importlib.import_module(message["module"])
            sampling = SamplingParams(**message["sampling"])
            outcome = await loops.run(self._setup, message["name"], record, sampling, message["row"])
            fields = {name: getattr(outcome, name) for name in outcome.__slots__}
            self.channel.send({"run": number, "outcome": fields}, arrays=True)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.channel.send({"run": number, "error": text, "traceback": traceback.format_exc()})
        finally:
            del self._runs[number]

    def _completed(self, message: dict[str, Any]) -> None:
        future, record, place, _ = self.calls.pop(message["call"])
        if "error" in message:
            if not future.done():
                future.set_exception(RuntimeError(message["error"]))
            return
        # Recorded here and now, in the order in which the driver recorded its completions, so that segments
        # have its numbers.
        completion = Completion(**message["completion"])
        segment = record.add(place, completion, message["replaced"])
        if not future.done():
            future.set_result((completion, segment))
