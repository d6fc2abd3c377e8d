"""A pool of scoring processes. One thread of the run starts, feeds, watches, kills and replaces them.

    submit (any thread, any event loop) → queue → a free process → Future[list[Outcome]]

A process over its limit is killed, one that dies is replaced, and the answer it worked on is failed. Several
answers share a process only if the function is async; when such a process has to be killed or dies, they are
run again one by one, so that only the guilty one fails. What an answer scores depends neither on the number of
processes nor on the order.

How many run: the first starts with the first call, another while calls wait 50 ms although all are busy, up to
the number of CPUs; beyond that, up to `workers`, only when calls wait longer than a second (functions that
mostly wait, on a judge for example).
"""

from __future__ import annotations

import atexit
import itertools
import os
import selectors
import subprocess
import threading
import time
import traceback
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from verl.platform.host import usable
from verl.reward.outcome import Outcome, failed
from verl.reward.process import Task, Verdict, WorkerProcess
from verl.reward.rate import RateGate
from verl.reward.wire import from_plain, to_plain

START_LIMIT = 300.0
"""Seconds a process may take to import the function."""
STACK_WAIT = 0.5
"""Seconds a process that hangs gets to say where, before it is killed."""
ASYNC_GRACE = 2.0
"""Async functions are cancelled in their process at the limit; if that has not worked by then, it is killed."""
CONCURRENCY = 128
"""Calls at once in a process with an async function."""
START_ATTEMPTS = 3


@dataclass(frozen=True)
class FunctionSpec:
    """Which function: a custom one by `path` and `name`, or the built-in table (`path` None).

    `batch`: it takes lists. `positional`: it may be called without keywords (the prime manager). `manager`: `name` is
    a class, made of these values (see `verl.reward.manager_class`).
    """

    path: str | None = None
    name: str = "compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)
    batch: bool = False
    positional: bool = False
    manager: dict[str, Any] | None = None

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.name} ({self.path})" if self.path else "the built-in reward"

    def init(self) -> dict[str, Any]:
        """First message to a process. NotPlain if the kwargs cannot be sent."""
        return {
            "path": self.path,
            "name": self.name,
            "kwargs": to_plain(self.kwargs, "custom_reward_function.reward_kwargs"),
            "batch": self.batch,
            "positional": self.positional,
            "manager": to_plain(self.manager, "the configuration"),
        }


@dataclass(frozen=True)
class Call:
    """One call: the keyword arguments, further kwargs, a seed for random numbers, answers in it (None: one)."""

    arguments: dict[str, Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    count: int | None = None


class Pool:
    """Scoring processes for one function. Thread-safe; used from any event loop through its futures.

    `notices` collects what happened to processes ({"event", …}), for whoever drains it.
    """

    def __init__(
        self, spec: FunctionSpec, *, workers: int, name: str = "reward", gate: RateGate | None = None
    ):
        if workers < 1:
            raise ValueError(f"reward_model.num_workers={workers}: at least one scoring process is needed")
        self.spec = spec
        self.notices: deque[dict[str, Any]] = deque(maxlen=1000)
        self._init = spec.init()
        self._max = workers
        self._cpus = usable()
        self._name = name
        self._gate = gate
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._submitted: deque[Task] = deque()
        self._queue: deque[Task] = deque()
        self._workers: list[WorkerProcess] = []
        self._thread: threading.Thread | None = None
        self._wake: tuple[int, int] | None = None
        self._closing = False
        self._unusable: Outcome | None = None
        self._start_failures = 0
        self._last_ready = 0.0
        self._gate_opens: float | None = None

    # ---- called from any thread ------------------------------------------------------------------------------

    def submit(self, call: Call, timeout: float) -> Future[list[Outcome]]:
        """Outcomes of the call's answers, in order. NotPlain if an argument cannot be sent to a process.

        `timeout` in seconds counts from the moment a process takes the call. RuntimeError after `close`.
        """
        message = {
            "id": next(self._ids),
            "call": to_plain(call.arguments, "the row"),
            "kwargs": to_plain(call.kwargs, "reward_kwargs"),
            "seed": call.seed,
            "timeout": timeout,
            "count": call.count,
        }
        task = Task(message["id"], message, timeout, Future(), time.monotonic(), call.count)
        with self._lock:
            if self._closing:
                raise RuntimeError("the scoring pool is closed")
            self._submitted.append(task)
            if self._thread is None:
                self._start_thread()
        self._poke()
        return task.future

    def close(self) -> None:
        """Kill all processes and end the thread; calls still open are failed. Safe to call twice."""
        with self._lock:
            self._closing = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._poke()
            thread.join(timeout=10)
        atexit.unregister(self.close)

    @property
    def size(self) -> int:
        """Processes there are now."""
        return len(self._workers)

    def _start_thread(self) -> None:
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        self._wake = (read_fd, write_fd)
        self._thread = threading.Thread(target=self._run, name=f"{self._name}-pool", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _poke(self) -> None:
        with self._lock:
            if self._wake is None:
                return
            try:
                os.write(self._wake[1], b"x")
            except BlockingIOError:
                return  # the pipe is full: the thread is about to look anyway

    # ---- the pool's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._wake is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake[0], selectors.EVENT_READ)
        end = failed("crash", "the scoring pool was closed before it was scored")
        try:
            while not self._closing:
                self._step()
        except BaseException as error:
            # An error of ours must not leave anybody waiting for a result for ever.
            end = failed("crash", f"the scoring pool itself failed: {error!r}", traceback.format_exc())
            raise
        finally:
            self._shut(end)

    def _shut(self, end: Outcome) -> None:
        with self._lock:
            self._closing = True
            self._queue += self._submitted
            self._submitted.clear()
            wake, self._wake = self._wake, None
        tasks = list(self._queue)
        for worker in self._workers:
            tasks += worker.running.values()
            worker.close()
        self._workers.clear()
        self._queue.clear()
        for task in tasks:
            self._resolve(task, [end] * (1 if task.count is None else task.count))
        self._selector.close()
        for fd in wake or ():
            os.close(fd)

    def _step(self) -> None:
        assert self._wake is not None
        with self._lock:
            self._queue += self._submitted
            self._submitted.clear()
        now = time.monotonic()
        self._assign(now)
        self._grow(now)
        for key, _ in self._selector.select(self._patience(now)):
            worker = key.data
            if worker is None:
                os.read(self._wake[0], 4096)
                continue
            self._read(worker)
        for worker in list(self._workers):
            self._watch(worker, time.monotonic())

    def _assign(self, now: float) -> None:
        """Give waiting calls to processes that can take them, oldest first."""
        self._gate_opens = None
        while self._queue:
            task = self._queue[0]
            if self._unusable is not None:
                self._queue.popleft()
                self._resolve(task, [self._unusable] * (1 if task.count is None else task.count))
                continue
            free = [w for w in self._workers if w.takes(task, CONCURRENCY)]
            if not free:
                return
            if task.future.cancelled():
                self._queue.popleft()
                continue
            if self._gate is not None and not task.alone:
                wait = self._gate.try_start(now)
                if wait != 0.0:
                    self._gate_opens = None if wait is None else now + wait
                    return
            self._queue.popleft()
            if not task.alone and not task.future.set_running_or_notify_cancel():
                self._finish_gate()
                continue
            worker = min(free, key=lambda w: len(w.running))
            task.started = now
            worker.running[task.id] = task
            worker.send(task.message)

    def _grow(self, now: float) -> None:
        """Start one more process if waiting calls call for it."""
        due = self._growth_due()
        if due is None or now < due:
            return
        try:
            worker = WorkerProcess.start(self._init, now + START_LIMIT)
        except OSError as error:
            if not self._workers:
                self._unusable = failed("load", f"no scoring process can be started: {error}")
            self._max = max(1, len(self._workers))
            self.notices.append({"event": "reward_worker_not_started", "error": str(error)})
            return
        self._workers.append(worker)
        self._selector.register(worker.read_fd, selectors.EVENT_READ, worker)

    def _growth_due(self) -> float | None:
        """When the next process should start, None if none is wanted."""
        count = len(self._workers)
        if (
            not self._queue
            or count >= self._max
            or self._unusable is not None
            or self._gate_opens is not None
        ):
            return None
        if any(not w.ready for w in self._workers):
            return None
        if count == 0:
            return 0.0
        if any(w.takes(self._queue[0], CONCURRENCY) for w in self._workers):
            return None
        return max(self._queue[0].queued, self._last_ready) + (0.05 if count < self._cpus else 1.0)

    def _patience(self, now: float) -> float | None:
        """Seconds until something is due even if nobody writes; None = nothing is."""
        due = [self._gate_opens, self._growth_due()]
        for worker in self._workers:
            due += [self._deadline(worker), worker.kill_at]
            if worker.outgoing:
                due.append(now + 0.02)
            # A death is seen through its pipe; a grandchild may hold that open, so look once a second as well.
            due.append(now + 1.0 if worker.running or not worker.ready else None)
        times = [t for t in due if t is not None]
        return max(0.0, min(times) - now) if times else None

    @staticmethod
    def _deadline(worker: WorkerProcess) -> float | None:
        """When this process has to be condemned."""
        if worker.verdict is not None:
            return None
        if not worker.ready:
            return worker.deadline_start
        grace = ASYNC_GRACE if worker.is_async else 0.0
        ends = [t.started + t.timeout + grace for t in worker.running.values()]
        if worker.section_end is not None:
            ends.append(worker.section_end)
        return min(ends, default=None)

    def _read(self, worker: WorkerProcess) -> None:
        messages, closed = worker.receive()
        for message in messages:
            self._handle(worker, message)
        if closed:
            self._bury(worker)

    def _handle(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        if "section" in message:
            limit = message["section"]
            worker.section_end = None if limit is None else time.monotonic() + limit
            worker.section_what, worker.section_limit = message["what"], limit or 0.0
        elif "stack" in message:
            if worker.verdict is not None:
                worker.verdict.stack = message["stack"]
                worker.kill_at = 0.0
        elif "ready" in message:
            worker.ready, worker.is_async = True, message["async"]
            self._last_ready = time.monotonic()
            self._start_failures = 0
        elif "unusable" in message:
            self._give_up(failed("load", message["unusable"], message["traceback"]))
        elif worker.verdict is None:
            task = worker.running.pop(message["id"])
            rows = [[from_plain(v) for v in row] for row in message["outcomes"]]
            self._finish_gate()
            self._resolve(task, [Outcome(*row) for row in rows])

    def _watch(self, worker: WorkerProcess, now: float) -> None:
        """Condemn a process that is over a limit, kill a condemned one, notice one that died."""
        if worker not in self._workers:
            return
        worker.flush()
        deadline = self._deadline(worker)
        if worker.kill_at is not None:
            if now >= worker.kill_at:
                worker.kill()
                self._read_rest(worker)
        elif deadline is not None and now >= deadline:
            worker.verdict = self._verdict(worker, now)
            worker.kill_at = now + STACK_WAIT
            worker.send({"stack": True})
        elif worker.proc.poll() is not None:
            self._read_rest(worker)

    def _verdict(self, worker: WorkerProcess, now: float) -> Verdict:
        if not worker.ready:
            return Verdict("load", f"importing {self.spec.label} took more than {START_LIMIT:g} s")
        if worker.section_end is not None and now >= worker.section_end:
            return Verdict("timeout", f"{worker.section_what} took more than {worker.section_limit:g} s")
        limit = min((t.timeout for t in worker.running.values()), default=0.0)
        return Verdict("timeout", f"it took more than {limit:g} s")

    def _read_rest(self, worker: WorkerProcess) -> None:
        messages, _ = worker.receive()
        for message in messages:
            self._handle(worker, message)
        self._bury(worker)

    def _bury(self, worker: WorkerProcess) -> None:
        """Take a dead process out and decide about the calls it had."""
        self._workers.remove(worker)
        self._selector.unregister(worker.read_fd)
        died_alone = worker.proc.poll() is not None or worker.verdict is not None
        if not died_alone:
            # It closed its pipe; give it a moment to end by itself, for its exit code.
            try:
                worker.proc.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                self.notices.append({"event": "reward_worker_silent", "pid": worker.proc.pid})
        worker.close()
        tasks = list(worker.running.values())
        outcome = self._cause(worker)
        if not worker.ready:
            self._failed_start(worker, outcome)
        if tasks or worker.ready:
            self.notices.append(
                {"event": "reward_worker_replaced", "pid": worker.proc.pid, "reason": outcome.error}
            )
        if len(tasks) > 1:
            for task in reversed(tasks):
                task.alone = True
                self._queue.appendleft(task)
            return
        for task in tasks:
            self._finish_gate()
            outcome.seconds = time.monotonic() - task.started
            self._resolve(task, [outcome] * (1 if task.count is None else task.count))

    def _cause(self, worker: WorkerProcess) -> Outcome:
        if worker.verdict is not None:
            return failed(worker.verdict.kind, worker.verdict.message, worker.verdict.stack)
        return failed("crash", f"it ended the scoring process ({worker.epitaph()})")

    def _failed_start(self, worker: WorkerProcess, outcome: Outcome) -> None:
        self._start_failures += 1
        if outcome.kind == "load":
            self._give_up(outcome)
        elif self._unusable is None and self._start_failures >= START_ATTEMPTS:
            message = f"importing {self.spec.label} ends the scoring process ({worker.epitaph()})"
            self._give_up(failed("load", message))

    def _give_up(self, outcome: Outcome) -> None:
        """No further process can be started: go on with those that run, or fail everything."""
        ready = sum(w.ready for w in self._workers)
        if ready:
            self._max = ready
            self.notices.append({"event": "reward_worker_not_started", "error": outcome.error})
        else:
            self._unusable = outcome

    def _finish_gate(self) -> None:
        if self._gate is not None:
            self._gate.finish()

    @staticmethod
    def _resolve(task: Task, outcomes: list[Outcome]) -> None:
        if not task.future.done():
            task.future.set_result(outcomes)
