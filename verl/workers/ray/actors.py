"""The worker classes as Ray actors, and the profiler of all of them. What they do is in `verl.workers`; here is only
what Ray needs."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import ray
from ray import exceptions as faults

from verl.config import Map
from verl.engine.registry import NodePart
from verl.engine.rollout.base import EngineDead
from verl.tracking.profiler import ProfilePlan, open_profiler
from verl.workers.ray.calls import WorkerHandle, reason
from verl.workers.ray.replicas import ReplicaPool
from verl.workers.rollout_worker import RolloutWorker
from verl.workers.training_worker import Worker

_LOOK_S = 2.0


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


class SpanningRollout(RolloutWorker):
    """A sampler on several nodes. The engine is here, on the first; on each other node a process, which this one starts
    and which ends with it, holds the part of that node.

    here: this node and its address; others: of each other node the same, and the options of its actor.
    """

    def __init__(
        self,
        config: dict[str, Any],
        number: int,
        here: tuple[str, str],
        others: Sequence[tuple[str, str, dict[str, Any]]],
    ):
        super().__init__(config, number)
        self._nodes, addresses = [here[0], *(other[0] for other in others)], [here[1], *(other[1] for other in others)]
        with socket.create_server((here[1], 0)) as server:
            port = server.getsockname()[1]
        self._places = [NodePart(i, len(addresses), own, here[1], port) for i, own in enumerate(addresses)]
        self._watching: asyncio.Task[None] | None = None
        self._parts = [RolloutActor.options(**options).remote(config, number) for *_, options in others]

    async def start(self, part: NodePart | None = None) -> dict[str, Any]:
        """See `RolloutWorker.start`; "nodes": of each reader."""
        others = [other.start.remote(place) for other, place in zip(self._parts, self._places[1:], strict=True)]
        threading.Thread(target=self._exit_when_a_part_fails, args=(others,), daemon=True).start()
        facts = await super().start(self._places[0])
        of_others = [other["readers"] for other in await asyncio.gather(*others)]
        local = len(facts["readers"]) - sum(map(len, of_others))
        readers = [facts["readers"][:local], *of_others]
        facts["readers"] = [reader for of_node in readers for reader in of_node]
        facts["nodes"] = [node for node, of_node in zip(self._nodes, readers, strict=True) for _ in of_node]
        self._watching = asyncio.create_task(self._watch())
        return facts

    def _exit_when_a_part_fails(self, starting: list[Any]) -> None:
        """End this process when a part cannot start: the engine here would wait for it."""
        nodes = dict(zip(starting, (place.address for place in self._places[1:]), strict=True))
        while starting:
            (ready,), starting = ray.wait(starting, num_returns=1)
            try:
                ray.get(ready)
            except faults.RayError as error:
                text = f"verl: sampler {self.number} cannot start on its node {nodes[ready]}: {reason(error)}"
                print(text, file=sys.stderr, flush=True)
                os._exit(1)

    async def _watch(self) -> None:
        """The engine cannot answer when a part of it is gone, and may not notice."""
        try:
            while True:
                await asyncio.gather(*(part.alive.remote() for part in self._parts))
                await asyncio.sleep(_LOOK_S)
        except Exception as error:
            self._note_death(EngineDead(f"on another of its nodes: {reason(error)}"))
            self._wakeup.set()

    async def relay_weights(self, *args: Any, node: str = "") -> None:
        """See `RolloutWorker.relay_weights`."""
        number = self._nodes.index(node)
        await (self._parts[number - 1].relay_weights.remote(*args) if number else super().relay_weights(*args))

    async def close(self) -> None:
        """See `RolloutWorker.close`."""
        if self._watching is not None:
            self._watching.cancel()
        await super().close()
        for part in self._parts:
            ray.kill(part)


# Ray's annotations know neither `concurrency_groups` nor `max_concurrency`.
_remote: Any = ray.remote
WorkerActor = _remote(max_restarts=0, concurrency_groups={"watch": 1})(RayWorker)
RolloutActor = _remote(max_restarts=0, max_concurrency=64)(RolloutWorker)
SpanningActor = _remote(max_restarts=0, max_concurrency=64)(SpanningRollout)


class WorkerProfiler:
    """See `verl.tracking.profiler.Profiler`. A worker that died has no profile, which is noticed elsewhere."""

    def __init__(self, ranks: Sequence[WorkerHandle], pool: ReplicaPool, plan: ProfilePlan):
        self._ranks, self._pool, self._plan = list(ranks), pool, plan

    def start(self, step: int) -> None:
        """A step begins, on every rank and every sampler."""
        if step in self._plan.steps:
            self._on_all("start", step)

    def stop(self, step: int) -> list[str]:
        """A step has ended; returns the files that workers wrote, each on its own node."""
        return self._on_all("stop", step) if step in self._plan.steps else []

    def close(self) -> list[str]:
        """The run ends; workers that live and are not busy write what they have."""
        return self._on_all("close", seconds=10)

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Nothing: the driver computes nothing."""
        return nullcontext()

    def _on_all(self, *args: Any, seconds: float = 300) -> list[str]:
        """The files that come within so many seconds, from workers that live."""
        workers = [*self._ranks, *(replica.worker for replica in self._pool.replicas)]
        refs = [worker.handle.profile.remote(*args) for worker in workers]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=seconds)
        files: list[str] = []
        for ref in ready:
            with suppress(faults.RayActorError):
                files += ray.get(ref)
        return files
