"""Notices a training worker, or the cluster, that is lost between calls, for instance during a long sampling phase."""

from __future__ import annotations

import threading
from collections.abc import Callable

import ray
from ray import exceptions as faults

from verl.workers.ray.calls import RayCalls, WorkerDied, died
from verl.workers.ray.daemons import Daemons

_PAUSE_S = 1.0
_END_S = 2.0


class Watch:
    """A thread that waits for the death of any worker of a group, and tells `on_death` once. `phase` names the run's.

    The loss of the cluster is told the same way, see `Daemons`.
    """

    def __init__(
        self,
        group: RayCalls,
        on_death: Callable[[WorkerDied], None],
        phase: Callable[[], str] = lambda: "",
    ):
        self._on_death, self._phase = on_death, phase
        self._stop = threading.Event()
        self._refs = {worker.handle.stay.remote(): worker for worker in group.workers}
        self._daemons = Daemons(self._tell, phase)
        self._thread = threading.Thread(target=self._wait, name="verl-watch-workers", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        while self._refs and not self._stop.is_set():
            ready, _ = ray.wait(list(self._refs), num_returns=1, timeout=_PAUSE_S)
            for ref in ready:
                try:
                    ray.get(ref)
                except faults.RayError as error:
                    found = died(self._refs[ref], self._phase() or "a pause", error)
                    if not self._stop.is_set():
                        self._tell(found)
                return

    def _tell(self, error: WorkerDied) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._on_death(error)

    def stop(self) -> None:
        """Before workers are ended on purpose."""
        self._stop.set()
        self._daemons.stop()
        self._thread.join(
            _END_S
        )  # it may be finding out why a worker is out of reach, which nobody asks any more
