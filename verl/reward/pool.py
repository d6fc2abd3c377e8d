"""A pool of scoring processes, run by an event loop in a thread of its own.

    submit (any thread, any event loop) → queue → a free process → Future[list[Outcome]]

Each process has a task that starts it, reads its messages and removes it, so that whatever a process does or sends ends
that process alone. A process over its limit is killed, one that dies or sends nonsense is replaced, and the call it
worked on is failed. Several calls share a process only if the function is async; when such a process has to be killed
or dies, they are run again one by one, so that only the guilty one fails. What a response scores depends neither on the
number of processes nor on the order.

How many run: the first starts with the first call, another while calls wait 50 ms although all are busy, up to
the number of CPUs; beyond that, up to `workers`, only when calls wait longer than a second (functions that
mostly wait, on a judge for example).
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from verl.config.schema.base import select
from verl.data.load_object import read_source
from verl.platform.child_process import ChildProcess, encode
from verl.platform.host_resources import usable
from verl.reward.outcome import MOST_PARTS, Outcome, failed

# Seconds: to import the function; for a process that hangs to say where, before it is killed; for the other sign of a
# death to come (the exit code, or what was still on its way); for an async function to be cancelled in its process at
# the limit, after which the process is killed.
START_LIMIT, STACK_WAIT, EXIT_WAIT, ASYNC_GRACE = 300.0, 0.5, 1.0, 2.0
# While calls wait, outcomes are handed over in groups, at most so late: each hand-over wakes the caller's thread.
HAND_OVER = 0.002
START_ATTEMPTS = 3
CONCURRENCY = 128  # calls at once in a process with an async function
_CLOSED = failed("crash", "the scoring pool was closed before it was scored")


@dataclass(frozen=True)
class FunctionSpec:
    """Which function: a custom one by `path` and `name`, or the built-in table (`path` None).

    `batch`: it takes lists. `positional`: how many arguments it may get by position (prime manager: 4, main_eval: 3).
    `manager`: `name` is a class, constructed from these values (see `verl.reward.managers`). `offered`: arguments that
    a custom function gets if it names them; `reward_model_tokenizer` is given as [path, trust_remote_code] and loaded
    for it. `sources`: the content of the files when this is made, which every scoring process uses.
    """

    path: str | None = None
    name: str = "compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)
    batch: bool = False
    positional: int = 0
    manager: dict[str, Any] | None = None
    offered: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, bytes] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for path in (self.path, select(self.manager, "custom_reward_function.path")):
            self.sources.update(read_source(path) if path else {})

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.name} ({self.path})" if self.path else "the built-in reward"


@dataclass(frozen=True)
class Call:
    """One call: the keyword arguments, further kwargs, a seed for random numbers, the number of responses in it."""

    arguments: dict[str, Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    count: int = 1


# Arguments of a `RateGate`.
Rate = tuple[int | None, int | None, int | None, int]


class RateGate:
    """Limits for the `rate_limited` manager: calls at once, calls and tokens in any 60 seconds, over all processes.

    `now` is any monotonic clock in seconds. ValueError if the tokens of one call are above the limit.
    """

    WINDOW = 60.0

    def __init__(
        self,
        max_concurrent: int | None,
        max_rpm: int | None = None,
        max_tpm: int | None = None,
        tokens: int = 2000,
    ):
        if max_tpm is not None and max_tpm < tokens:
            raise ValueError(
                f"reward_model.max_tpm={max_tpm} is below estimated_tokens_per_request={tokens}: no call could start"
            )
        per_window = [n for n in (max_rpm, None if max_tpm is None else max_tpm // tokens) if n is not None]
        self._concurrent, self._per_window = max_concurrent, min(per_window, default=None)
        self._running = 0
        self._starts: deque[float] = deque()

    def try_start(self, now: float) -> float | None:
        """0.0 if a call starts now (counted), seconds until one may, or None if one has to finish first."""
        if self._concurrent is not None and self._running >= self._concurrent:
            return None
        while self._starts and self._starts[0] <= now - self.WINDOW:
            self._starts.popleft()
        if self._per_window is not None and len(self._starts) >= self._per_window:
            return max(self._starts[-self._per_window] + self.WINDOW - now, 1e-3)
        self._running += 1
        self._starts.append(now)
        return 0.0

    def finish(self) -> None:
        """A call that had started is over."""
        self._running -= 1


@dataclass(eq=False, slots=True)
class _Task:
    """A call on its way. `alone`: it is run again, in a process that runs nothing else."""

    id: int
    message: bytes
    timeout: float
    count: int
    future: Future[list[Outcome]]
    queued: float
    alone: bool = False
    started: float | None = None
    timer: asyncio.TimerHandle | None = None


class _Worker(ChildProcess):
    """A scoring process. `failure` says why the run ends it, if it does; `task` starts it, listens and removes it."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        super().__init__("verl.reward.scoring_process")
        self.running: dict[int, _Task] = {}
        self.ready = False
        self.is_async = False
        self.failure: Outcome | None = None
        self.timer: asyncio.TimerHandle | None = None

    def takes(self, task: _Task) -> bool:
        """True if the task can start here now."""
        if not self.ready or self.failure is not None:
            return False
        if not self.running:
            return True
        alone = not self.is_async or task.alone or any(t.alone for t in self.running.values())
        return not alone and len(self.running) < CONCURRENCY

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        """Replace the limit of the process itself."""
        _cancel(self.timer)
        self.timer = timer

    async def end(self) -> None:
        """Cancel every limit, kill what is left."""
        self.set_timer(None)
        for task in self.running.values():
            _cancel(task.timer)
        await super().end()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _outcome_of(row: Any) -> Outcome:
    """The outcome that a process sent. ValueError for anything else."""
    match row:
        case {"score": float() | None as score, "error": str() | None as error, "parts": dict(parts)}:
            outcome = Outcome(**row)
            numbers = isinstance(outcome.seconds, float) and isinstance(outcome.undecided, int)
            numbers = numbers and isinstance(outcome.scored, int | None)
            texts = (outcome.kind, outcome.traceback, *parts)
            if (
                (score is None) is not (error is None)
                and numbers
                and len(parts) <= MOST_PARTS
                and all(isinstance(text, str) for text in texts)
            ):
                return outcome
    raise ValueError(f"{row!r:.200}")


class ScoringPool:
    """Scoring processes for one function. Thread-safe; used from any event loop through its futures.

    `notices` collects what happened to processes, (kind of event, its fields), for the caller to drain.
    """

    def __init__(self, spec: FunctionSpec, *, workers: int, rate: Rate | None = None):
        self.spec = spec
        self.notices: deque[tuple[str, dict[str, Any]]] = deque(maxlen=1000)
        self._init = encode(vars(spec), spec.label)
        self._max = workers
        self._cpus = usable()
        self._gate = None if rate is None else RateGate(*rate)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._submitted: list[_Task] = []
        self._queue: deque[_Task] = deque()
        self._finished: list[tuple[Future[list[Outcome]], list[Outcome]]] = []
        self._workers: list[_Worker] = []
        self._closed = False
        self._unusable: Outcome | None = None
        self._start_failures = 0
        self._last_ready = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stop = asyncio.Event()
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # ---- called from any thread ------------------------------------------------------------------------------

    def submit(self, call: Call, timeout: float) -> Future[list[Outcome]]:
        """Outcomes of the call's responses, in order. NotPlain if an argument cannot be sent to a process.

        `timeout` in seconds counts from the moment a process takes the call. RuntimeError after `close`.
        """
        number = next(self._ids)
        message = encode({"id": number, "timeout": timeout, **vars(call)}, "the call")
        task = _Task(number, message, timeout, call.count, Future(), time.monotonic())
        with self._lock:
            if self._closed:
                raise RuntimeError("the scoring pool is closed")
            self._submitted.append(task)
            if len(self._submitted) == 1:  # one wake-up of the thread for all calls that come before it
                self._loop.call_soon_threadsafe(self._take_submitted)
        return task.future

    def close(self) -> None:
        """Kill all processes and end the thread; calls still open are failed. Safe to call twice."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout=10)
            atexit.unregister(self.close)

    # ---- the pool's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._stop.wait()
        self._unusable = _CLOSED
        tasks = [worker.task for worker in self._workers]
        for worker in self._workers:
            worker.failure = self._unusable
            worker.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._dispatch()
        self._hand_over()

    def _take_submitted(self) -> None:
        with self._lock:
            submitted, self._submitted = self._submitted, []
        self._queue += submitted
        self._dispatch()

    def _dispatch(self) -> None:
        """Give waiting calls to processes that can take them, oldest first; start a process if one is due."""
        _cancel(self._timer)
        while self._queue:
            task = self._queue[0]
            if self._unusable is not None:
                self._finish(self._queue.popleft(), self._unusable)
                continue
            free = [worker for worker in self._workers if worker.takes(task)]
            if not free:
                self._grow(task)
                return
            if not task.future.running() and not task.future.set_running_or_notify_cancel():
                self._queue.popleft()
                continue
            if self._gate is not None and task.started is None:
                wait = self._gate.try_start(time.monotonic())
                if wait != 0.0:
                    self._timer = self._loop.call_later(wait, self._dispatch) if wait is not None else None
                    return
            self._give(self._queue.popleft(), min(free, key=lambda worker: len(worker.running)))

    def _give(self, task: _Task, worker: _Worker) -> None:
        task.started = time.monotonic()
        failure = "timeout", f"it took more than {task.timeout:g} s"
        grace = ASYNC_GRACE if worker.is_async else 0.0
        task.timer = self._loop.call_later(task.timeout + grace, self._stop_worker, worker, *failure)
        worker.running[task.id] = task
        worker.writer.write(task.message)

    def _grow(self, task: _Task) -> None:
        """Start one more process for the oldest call, or set a timer for when one is due."""
        count = len(self._workers)
        if count >= self._max or any(not worker.ready for worker in self._workers):
            return
        patience = 0.05 if count < self._cpus else 1.0
        wait = max(task.queued, self._last_ready) + patience - time.monotonic() if count else 0.0
        if wait > 0:
            self._timer = self._loop.call_later(wait, self._dispatch)
            return
        worker = _Worker()
        self._workers.append(worker)
        worker.task = self._loop.create_task(self._run_worker(worker))

    async def _run_worker(self, worker: _Worker) -> None:
        """A process from its start to its end."""
        late = "load", f"importing {self.spec.label} took more than {START_LIMIT:g} s"
        watching = None
        try:
            await worker.start(self._init)
            worker.set_timer(self._loop.call_later(START_LIMIT, self._stop_worker, worker, *late))
            watching = self._loop.create_task(worker.close_after_exit(EXIT_WAIT))
            await self._listen(worker)
            await asyncio.wait({watching}, timeout=EXIT_WAIT)  # it may have closed the connection and gone on
        except OSError as error:
            worker.failure = worker.failure or failed("load", f"no scoring process can be started: {error}")
        finally:
            if watching is not None:
                watching.cancel()
            await worker.end()
            self._remove(worker)

    async def _listen(self, worker: _Worker) -> None:
        """Messages until the connection ends. The function may write into it: nonsense ends this process only."""
        try:
            async for message in worker.messages():
                self._handle(worker, message)
        except Exception as error:
            message = f"its scoring process was ended, which sent what is no message of ours ({error!r})"
            worker.failure = worker.failure or failed("crash", message)
            worker.kill()

    def _handle(self, worker: _Worker, message: Any) -> None:
        """Act on a message. Raises where it is not one that a process sends."""
        if worker.failure is not None:
            if "stack" in message:
                worker.failure.traceback = str(message["stack"])
                worker.kill()
            return
        match message:
            case {"id": number, "outcomes": rows}:
                outcomes = [_outcome_of(row) for row in rows]
                if len(outcomes) != worker.running[number].count:
                    raise ValueError(f"{len(outcomes)} outcomes")
                self._finish(worker.running.pop(number), *outcomes)
            case {"ready": bool(is_async)}:
                worker.set_timer(None)
                worker.ready, worker.is_async = True, is_async
                self._last_ready = time.monotonic()
                self._start_failures = 0
            case {"unusable": str(error), "traceback": str(trace)}:
                self._give_up(failed("load", error, trace))
            case _:
                raise ValueError(f"{message!r:.200}")
        self._dispatch()

    def _stop_worker(self, worker: _Worker, kind: str, why: str) -> None:
        """End a process that is over a limit, after it has said where it is."""
        if worker.failure is None:
            worker.failure = failed(kind, why)
            worker.writer.write(encode({"stack": True}))
            worker.set_timer(self._loop.call_later(STACK_WAIT, worker.kill))

    def _remove(self, worker: _Worker) -> None:
        """Take a process out that has ended, and decide about the calls it had."""
        self._workers.remove(worker)
        outcome = worker.failure or failed("crash", f"it ended the scoring process ({worker.exit_text()})")
        if not worker.ready:
            self._start_failures += 1
            if outcome.kind != "load" and self._start_failures >= START_ATTEMPTS:
                message = f"importing {self.spec.label} ends the scoring process ({worker.exit_text()})"
                outcome = failed("load", message)
            if outcome.kind == "load":
                self._give_up(outcome)
        elif self._unusable is None:
            pid = worker.process.pid if worker.process is not None else None
            self.notices.append(("reward_worker_replaced", {"pid": pid, "reason": outcome.error}))
        tasks = list(worker.running.values())
        if len(tasks) > 1:
            for task in reversed(tasks):
                task.alone = True
                self._queue.appendleft(task)
        else:
            for task in tasks:
                self._finish(task, replace(outcome, seconds=time.monotonic() - (task.started or 0.0)))
        self._dispatch()

    def _give_up(self, outcome: Outcome) -> None:
        """No further process can be started: go on with those that run, or fail everything."""
        ready = sum(w.ready for w in self._workers)
        if ready:
            self._max = ready
            self.notices.append(("reward_worker_not_started", {"error": outcome.error}))
        else:
            self._unusable = self._unusable or outcome

    def _finish(self, task: _Task, *outcomes: Outcome) -> None:
        """Resolve a call; a single outcome stands for all of its responses."""
        _cancel(task.timer)
        if self._gate is not None and task.started is not None:
            self._gate.finish()
        many = outcomes if len(outcomes) > 1 else outcomes * task.count
        self._finished.append((task.future, list(many)))
        if len(self._finished) == 1:
            self._loop.call_later(HAND_OVER if self._queue else 0.0, self._hand_over)

    def _hand_over(self) -> None:
        for future, outcomes in self._finished:
            with suppress(InvalidStateError):  # the caller may have cancelled it
                future.set_result(outcomes)
        self._finished.clear()
