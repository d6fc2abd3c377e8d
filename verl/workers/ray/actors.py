"""The worker classes as Ray actors. What they do is in `verl.workers`; here is only what Ray needs."""

from __future__ import annotations

import threading
from typing import Any

import ray

from verl.config import Map
from verl.tracking.profiler import open_profiler
from verl.workers.rollout_worker import RolloutWorker
from verl.workers.worker import Worker


class RayWorker(Worker):
    """A training rank that says which devices it was given, and whose death is noticed between calls, too."""

    def __init__(self, config: dict[str, Any], rank: int, world: int):
        super().__init__(Map.of(config), rank, world)

    def build(self, total_steps: int, shared: bool = False, pool: str = "training") -> dict[str, Any]:
        """See `Worker.build`; opens this process's profiler."""
        facts = super().build(total_steps, shared, pool)
        roles = tuple(self.engines)
        self.profiler = open_profiler(self.config, roles=roles, rank=self.rank, platform=self.platform)
        return facts

    def device_ids(self) -> list[str]:
        """Ids of its devices on the node, as the driver of the device counts them; empty on a processor."""
        ids: dict[str, Any] = ray.get_runtime_context().get_accelerator_ids()
        return [str(i) for i in ids.get(self.platform.ray_resource, [])]

    @ray.method(concurrency_group="watch")
    def stay(self) -> None:
        """Never returns: the call fails when the process dies. In a thread of its own."""
        threading.Event().wait()


# Ray's annotations know neither `concurrency_groups` nor `max_concurrency`.
_remote: Any = ray.remote
WorkerActor = _remote(max_restarts=0, concurrency_groups={"watch": 1})(RayWorker)
RolloutActor = _remote(max_restarts=0, max_concurrency=64)(RolloutWorker)
