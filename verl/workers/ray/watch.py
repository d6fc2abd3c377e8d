"""Notices between calls, for instance during a long sampling phase, that a training worker or the cluster is lost.

The cluster is lost with its head, or with the Ray daemon of the driver's own node. Ray ends a process without a word a
minute after it lost the head, and at the next object it hands over after it lost its node's daemon. The run detects
either before that, so that its end has a reason and its records are closed. Some of Ray's calls wait for the head: a
run that is stuck in one of them shortly before that minute is over is ended here.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray import exceptions as faults

from verl.workers.ray.calls import RayCalls, WorkerDied, WorkerHandle, died, lose

_SILENCE_S = 30.0  # of the head, after which it counts as lost
_PAUSE_S = 1.0
_REFUSALS = 2  # of the daemon, one after the other, after which it counts as lost
_END_S = 2.0
# A head that was silent for so long when the run ended is waited for: that end may never come.
_SUSPECT_S = 4.0
_LAST_S = 22.0  # from the loss to the last word: before Ray's minute is over


class ClusterLost(WorkerDied):
    """The driver is cut off from the cluster, and from all workers."""


class Watch:
    """Threads that wait for the loss of the cluster and, from `add` on, for the death of any worker of a group, and
    tell `on_death` once. `phase` names the run's."""

    def __init__(self, on_death: Callable[[WorkerDied], None], phase: Callable[[], str] = lambda: ""):
        self._on_death, self._phase, self._pause = on_death, phase, "the start"
        self._refs: dict[Any, WorkerHandle] = {}
        context = ray.get_runtime_context()
        self._head = str(context.gcs_address)
        driver_node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        self._daemon = str(driver_node["NodeManagerAddress"]), int(driver_node["NodeManagerPort"])
        self._silent, self._refused = 0.0, 0
        self._stop, self._told = threading.Event(), False
        self._asking: list[threading.Thread] = []
        self._begin(self._ask_head)
        threading.Thread(target=self._watch_cluster, name="_watch_cluster", daemon=True).start()

    def add(self, group: RayCalls) -> None:
        """The workers are there, and the start is over."""
        self._pause = "a pause"
        self._refs = {worker.handle.stay.remote(): worker for worker in group.workers}
        self._begin(self._watch_workers)

    def _begin(self, loop: Callable[[], None]) -> None:
        self._asking.append(threading.Thread(target=loop, name=loop.__name__, daemon=True))
        self._asking[-1].start()

    def _watch_workers(self) -> None:
        while self._refs and not self._stop.is_set():
            ready, _ = ray.wait(list(self._refs), num_returns=1, timeout=_PAUSE_S)
            for ref in ready:
                try:
                    ray.get(ref)
                except faults.RayError as error:
                    self._tell(died(self._refs[ref], self._phase() or self._pause, error))
                return

    def _tell(self, error: WorkerDied) -> None:
        if not self._told and not self._stop.is_set():
            self._told = True
            self._on_death(error)

    def _ask_head(self) -> None:
        """A call to a head that is gone blocks inside Ray, so another thread judges."""
        # Ray's calls start a Ray where there is none: not after the run has left its own.
        while ray.is_initialized() and not self._stop.is_set():
            with suppress(faults.RayError):  # no answer, which is what the other thread counts
                ray.nodes()
                self._silent = 0.0
            self._stop.wait(_PAUSE_S)

    def _watch_cluster(self) -> None:
        while ray.is_initialized():
            if self._stop.wait(_PAUSE_S):
                if self._silent < _SUSPECT_S:
                    return
                time.sleep(_PAUSE_S)
            # Pauses are counted, not the clock: a process that was stopped for a while has to ask first.
            self._silent += _PAUSE_S
            if lost := self._lost():
                error = ClusterLost(
                    f"{lost} and the run ends; start Ray again (examples/ray_start.sh), and the same "
                    "command goes on from the newest checkpoint"
                )
                lose(error)
                self._tell(error)
                time.sleep(_LAST_S)  # the process ends by itself, or it is stuck
                print(f"verl: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)

    def _lost(self) -> str:
        """What is lost, or ""."""
        try:
            socket.create_connection(self._daemon, timeout=_PAUSE_S).close()
            self._refused = 0
        except OSError as error:  # of another kind it is slow, or this process out of sockets
            self._refused = self._refused + 1 if isinstance(error, ConnectionRefusedError) else 0
        where = self._phase() or self._pause
        if self._refused >= _REFUSALS:
            address = f"{self._daemon[0]}:{self._daemon[1]}"
            return (
                f"the Ray daemon of the driver's node ({address}; head {self._head}) was lost in {where}: its process "
                "ended (ray stop, a signal, the out-of-memory killer). A driver does not outlive it"
            )
        if self._silent >= _SILENCE_S:
            return (
                f"the head of the Ray cluster ({self._head}) was lost in {where}: no answer for {_SILENCE_S:g} s, so "
                "its process or its machine ended, or the network failed. A cluster does not outlive its head"
            )
        return ""

    def stop(self) -> None:
        """Before workers are ended on purpose. Watching the cluster continues if the end that now begins may hang."""
        self._stop.set()
        # One may be finding out why a worker is out of reach, which is not asked any more.
        for thread in self._asking:
            thread.join(_END_S)
