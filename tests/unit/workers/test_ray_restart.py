"""A sampler that is started again: how long it has, and what becomes of one that does not start. Without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed")
from verl.workers.ray import build
from verl.workers.ray.calls import WorkerFailed, WorkerHandle


class Silent:
    """A `RayCalls` whose workers never response."""

    def __init__(self, workers: list[Any]):
        self.workers = workers

    def start(self, method: str) -> list[Any]:
        return []

    def wait(self, refs: list[Any], doing: str, limit: float) -> list[Any]:
        raise WorkerFailed(f"no answer within {limit:g} s; {doing}")


def test_a_sampler_that_does_not_start_is_ended_and_had_the_time_that_samplers_take(monkeypatch) -> None:
    ended: list[Any] = []
    handle = SimpleNamespace()
    monkeypatch.setattr(build, "RayCalls", Silent)
    monkeypatch.setattr(build, "end_workers", ended.extend)
    builder: Any = SimpleNamespace(restart_limit=build._RESTART_S)
    pool: Any = SimpleNamespace(again=lambda bundle, start: start("node"))

    def start_again() -> None:
        build._Builder._sampler_again(builder, pool, 0, lambda node: WorkerHandle(handle, "sampler 0", node))

    with pytest.raises(WorkerFailed, match="within 180 s"):
        start_again()
    assert [worker.handle for worker in ended] == [handle], "it may hold the devices that the next one needs"
    builder.restart_limit = 1800.0
    with pytest.raises(WorkerFailed, match="within 1800 s"):
        start_again()
