"""A sampler that is started again: how long it has, and what becomes of one that does not start. Without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed")
from verl.workers.ray import build
from verl.workers.ray.calls import WorkerFailed


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
    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: handle))
    monkeypatch.setattr(build, "RolloutActor", actor)
    monkeypatch.setattr(build, "RayCalls", Silent)
    monkeypatch.setattr(build, "end_workers", ended.extend)
    cluster = SimpleNamespace(addresses=lambda: {"node": "here"})
    builder = SimpleNamespace(plain={}, workers=[], cluster=cluster, restart_limit=build._RESTART_S)
    pool: Any = SimpleNamespace(again=lambda bundle, start: start("node"))
    starter = build._Starter(builder, 0, {}, pool, 0, {}, "sampler")
    with pytest.raises(WorkerFailed, match="within 180 s"):
        starter()
    assert [worker.handle for worker in ended] == [handle], "it may hold the devices that the next one needs"
    builder.restart_limit = 1800.0
    with pytest.raises(WorkerFailed, match="within 1800 s"):
        starter()
