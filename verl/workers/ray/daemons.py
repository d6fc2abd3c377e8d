"""Notices that the head of a cluster, or the Ray daemon of the driver's own node, is gone.

Ray ends a process without a word a minute after it lost the head, and at the next object it hands over after it lost
its node's daemon. The run hears of either before that, so that its end has a reason and its records are closed. Some of
Ray's calls wait for the head: a run that is stuck in one of them shortly before that minute is over is ended here.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import ray
from ray import exceptions as faults

from verl.workers.ray.calls import WorkerDied, lose

SILENCE_S = 30.0
_PAUSE_S = 1.0
_KNOCKS = 2
_END_S = 2.0
_SUSPECT_S = (
    4.0  # a head that was silent for so long when the run ended is waited for: that end may never come
)
_LAST_S = 22.0  # from the loss to the last word: before Ray's minute is over


class ClusterLost(WorkerDied):
    """The driver is cut off from the cluster, and from all workers."""


class Daemons:
    """Asks the head, and knocks at the own node's daemon, again and again; tells `on_loss` once.

    `phase` names the run's; the head may be silent for `limit` seconds.
    """

    def __init__(
        self,
        on_loss: Callable[[ClusterLost], None],
        phase: Callable[[], str] = lambda: "",
        limit: float = SILENCE_S,
    ):
        self._on_loss, self._phase, self._limit = on_loss, phase, limit
        context = ray.get_runtime_context()
        self._head = str(context.gcs_address)
        own = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        self._own = str(own["NodeManagerAddress"]), int(own["NodeManagerPort"])
        self._silent, self._refused = 0.0, 0
        self._stop = threading.Event()
        self._asker = threading.Thread(target=self._ask, name="verl-ask-head", daemon=True)
        self._judge = threading.Thread(target=self._wait, name="verl-watch-daemons", daemon=True)
        self._asker.start()
        self._judge.start()

    def _ask(self) -> None:
        """A call to a head that is gone blocks inside Ray, so another thread judges."""
        # Ray's calls start a Ray where there is none: not after the run has left its own.
        while ray.is_initialized() and not self._stop.is_set():
            with suppress(faults.RayError):  # no answer, which is what the other thread counts
                ray.nodes()
                self._silent = 0.0
            self._stop.wait(_PAUSE_S)

    def _wait(self) -> None:
        while ray.is_initialized():
            if self._stop.wait(_PAUSE_S):
                if self._silent < _SUSPECT_S:
                    return
                time.sleep(_PAUSE_S)
            # Pauses are counted, not the clock: a process that was stopped for a while has to ask first.
            self._silent += _PAUSE_S
            self._knock()
            lost = self._words()
            if lost:
                error = ClusterLost(lost)
                lose(error)
                self._on_loss(error)
                _end(error)

    def _knock(self) -> None:
        try:
            socket.create_connection(self._own, timeout=_PAUSE_S).close()
            self._refused = 0
        except ConnectionRefusedError:
            self._refused += 1
        except OSError:
            self._refused = 0  # slow, or out of sockets: not gone

    def _words(self) -> str:
        """What is lost, or ""."""
        end = "the run ends; start Ray again (examples/ray_start.sh), and the same command goes on from the newest checkpoint"
        where = self._phase() or "a pause"
        if self._refused >= _KNOCKS:
            own = f"{self._own[0]}:{self._own[1]}"
            return (
                f"the Ray daemon of the driver's node ({own}; head {self._head}) was lost in {where}: its process ended (ray "
                f"stop, a signal, the out-of-memory killer). A driver does not outlive it and {end}"
            )
        if self._silent >= self._limit:
            return (
                f"the head of the Ray cluster ({self._head}) was lost in {where}: no answer for {self._limit:g} s, so its "
                f"process or its machine ended, or the network failed. A cluster does not outlive its head and {end}"
            )
        return ""

    def stop(self) -> None:
        """End watching, unless the end that now begins may be the stuck one."""
        self._stop.set()
        self._asker.join(_END_S)


def _end(error: ClusterLost) -> None:
    """End this process if it does not end by itself."""
    time.sleep(_LAST_S)
    print(f"verl: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)
