"""The profiler of a cluster's workers: the loop's calls, passed on to every process that has something to profile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import ray
from ray import exceptions as faults

from verl.tracking.profiler import ProfilePlan
from verl.workers.ray.calls import WorkerHandle
from verl.workers.ray.replicas import ReplicaPool


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
