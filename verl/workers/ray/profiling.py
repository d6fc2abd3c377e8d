"""The profiler of a cluster's workers: the loop's calls, passed on to every process that has something to profile."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import ray
from ray import exceptions as faults

from verl.profiling.plan import ProfilePlan, nsight_options
from verl.workers.group import WorkerGroup
from verl.workers.ray.replicas import ReplicaPool


class WorkerProfiler:
    """See `verl.profiling.profiler.Profiler`. A sampler that died has no profile; the pool notices by itself."""

    def __init__(self, training: WorkerGroup, pool: ReplicaPool, plan: ProfilePlan):
        self._training, self._pool, self._plan = training, pool, plan
        self._running = False

    def start(self, step: int) -> None:
        """A step begins, on every rank and every sampler."""
        if step in self._plan.steps:
            self._running = True
            self._training.call("start_profile", step, doing="start_profile")
            _responses(self._samplers("start_profile", step))

    def stop(self, step: int) -> list[str]:
        """A step has ended; returns the files that workers wrote, each on its own node."""
        if step not in self._plan.steps:
            return []
        self._running = not self._plan.ends(step)
        files = self._training.call("stop_profile", step, doing="stop_profile")
        files += _responses(self._samplers("stop_profile", step))
        return [file for part in files for file in part]

    def close(self) -> list[str]:
        """The run ends; workers that live and are not busy write what they have."""
        if not self._running:
            return []
        self._running = False
        handles = [worker.handle for worker in self._training.calls.workers]
        refs = [handle.close_profile.remote() for handle in handles] + self._samplers("close_profile")
        return [file for part in _responses(refs, timeout=10) for file in part]

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Nothing: the driver computes nothing."""
        return nullcontext()

    def _samplers(self, method: str, *args: Any) -> list[Any]:
        return [getattr(host.worker.handle, method).remote(*args) for host in self._pool.hosts]


def _responses(refs: list[Any], timeout: float = 120) -> list[Any]:
    """What comes within `timeout` seconds, from workers that live."""
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout)
    out = []
    for ref in ready:
        try:
            out.append(ray.get(ref))
        except faults.RayActorError:
            continue
    return out


def worker_profiler(config: Any, training: WorkerGroup, pool: ReplicaPool) -> WorkerProfiler | None:
    """The profiler of a run's workers, None when nothing is to be profiled."""
    profiler = config.global_profiler
    if not profiler.tool or not profiler.steps:
        return None
    steps = tuple(sorted(set(profiler.steps)))
    plan = ProfilePlan(
        profiler.tool, steps, profiler.profile_continuous_steps, Path(profiler.save_path), "driver"
    )
    return WorkerProfiler(training, pool, plan)


def under_nsys(options: dict[str, Any], config: Any) -> dict[str, Any]:
    """Options of an actor that Ray is to start under nsys, if that is the tool."""
    nsight = nsight_options(config)
    if nsight is None:
        return options
    return options | {"runtime_env": dict(options.get("runtime_env") or {}) | {"nsight": nsight}}
