"""Who writes which channel of weights and who reads it; and which way is taken when handles of device memory fail."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("ray", reason="Ray is not installed")

from tests.weight_sync_processes import channel_name
from verl.platform.cpu import CpuPlatform
from verl.weight_sync.channel import attempt, offer
from verl.workers.ray import remote_weight_sync
from verl.workers.ray.remote_weight_sync import by_device, by_node
from verl.workers.ray.replicas import Replica


def host(number: int, node: str, devices: list[str], worker: Any = None) -> Replica:
    one = Replica(number, lambda: None, worker, node)  # type: ignore[arg-type, return-value]
    one.readers = [(100 * number + i, 1, 7) for i in range(len(devices))]
    one.devices = devices
    return one


def check(routes: Any, hosts: list[Replica]) -> None:
    """Every process of every host is exactly one reader of a channel that exactly one side writes."""
    written = {w[0]: w[1] for w in [*routes.writes, *routes.relayed.values()] if w is not None}
    assert len(written) == sum(w is not None for w in [*routes.writes, *routes.relayed.values()])
    found = {}
    for one in hosts:
        assert len(routes.places[one]) == len(one.readers)
        for (channel, number), reader in zip(routes.places[one], one.readers, strict=True):
            assert written[channel][number] == reader
            found[channel, number] = reader
    assert len(found) == sum(len(readers) for readers in written.values())


def test_one_channel_a_node_written_by_its_first_rank_or_relayed() -> None:
    hosts = [host(0, "A", ["", ""]), host(1, "B", [""]), host(2, "A", [""]), host(3, "C", ["", ""])]
    routes = by_node(["A", "A", "B", "B"], hosts, "x")
    check(routes, hosts)
    assert [w is not None for w in routes.writes] == [True, False, True, False]
    assert list(routes.relayed) == ["C"] and not routes.on_device
    assert routes.places[hosts[2]] == [("x-A", 2)]
    over_two = host(9, "A", ["", ""])
    over_two.reader_nodes = ["A", "C"]
    routes = by_node(["A", "A", "B", "B"], [*hosts, over_two], "x")
    check(routes, [*hosts, over_two])
    assert [channel for channel, _ in routes.places[over_two]] == ["x-A", "x-C"]
    assert by_node(["A", "D"], hosts, "x").writes[1] is None, "a node without a sampler gets no channel"


def test_runs_on_the_same_nodes_whose_drivers_have_the_same_process_id_do_not_meet() -> None:
    hosts = [host(0, "A", [""])]

    def channels() -> set[str]:
        run = remote_weight_sync.RemoteWeightSync(SimpleNamespace(facts=[]), ["A"], SimpleNamespace(), 60.0)  # type: ignore[arg-type]
        return {run._transfer_plan(hosts).places[hosts[0]][0][0] for _ in range(2)}

    one, other = channels(), channels()
    assert len(one) == len(other) == 2, "one for each transfer"
    assert not one & other, "a reader of one run would load the weights of the other"


def test_one_channel_a_device_where_all_samplers_sit_on_trainers_devices() -> None:
    hosts = [host(0, "A", ["g0", "g1"]), host(1, "A", ["g2"]), host(2, "A", ["g2"])]
    routes = by_device(["g0", "g1", "g2", "g3"], hosts, "x")
    assert routes is not None and routes.on_device and routes.writes[3] is None
    check(routes, hosts)
    assert by_device(["g0", "g1", "", "g3"], hosts, "x") is None, "one is elsewhere"
    assert by_device(["", ""], [host(0, "A", [""])], "x") is None, "host memory has no handles"


class Remote:
    """A worker's methods as Ray offers them; a call is answered at once."""

    def __init__(self, **responses: Any):
        self.calls: list[tuple[Any, ...]] = []
        for name, response in responses.items():
            setattr(self, name, SimpleNamespace(remote=self._noting(name, response)))

    def _noting(self, name: str, response: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append((name, *args))
            return response

        return call


@pytest.mark.parametrize("trial", ["", "RuntimeError: invalid device context"])
def test_handles_are_tried_once_and_left_when_they_fail(monkeypatch: pytest.MonkeyPatch, trial: str) -> None:
    from contextlib import nullcontext

    monkeypatch.setattr(remote_weight_sync.ray, "get", lambda ref, timeout=None: ref)
    monkeypatch.setattr(remote_weight_sync, "troubles_of", lambda asked, timeout: ([], []))
    worker = SimpleNamespace(handle=Remote(try_channel=[trial], receive_weights={}), name="sampler 0")
    hosts, events = [host(0, "A", ["g1"], worker)], []
    asked: list[tuple[str, list[Any]]] = []

    def call(method: str, *, each: list[Any], doing: str) -> list[Any]:
        asked.append((method, each))
        return ["", ""] if method == "try_channel" else [{"bytes": 5, "checksums": {}}] * 2

    facts = [{"device_id": "g0"}, {"device_id": "g1"}]
    training = SimpleNamespace(call=call, lock=nullcontext(), moved=True, facts=facts)
    pool = SimpleNamespace(
        replicas=hosts,
        find_dead=lambda hosts: [],
        weights_pushed=lambda version: None,
        event=lambda kind, **fields: events.append((kind, fields)),
    )
    one = remote_weight_sync.RemoteWeightSync(training, ["A", "A"], pool, 9.0)  # type: ignore[arg-type]
    for version in (1, 2):
        assert one.push(version).bytes == 5
    assert [method for method, _ in asked] == ["try_channel", "send_weights", "send_weights"]
    assert events == [("weights_by_device", {"works": not trial, "reason": trial})]
    writer = 0 if trial else 1
    for _, each in asked[1:]:
        assert [order[0] is not None for order in each] == [rank == writer for rank in range(2)]
        assert all(order[5] == (not trial) for order in each)
    channels = [order[writer][0] for _, order in asked[1:]] + [asked[0][1][1][0]]
    assert len(set(channels)) == 3, "no transfer finds another's channel"
    placed = [args[1] for args in worker.handle.calls if args[0] == "receive_weights"]
    assert placed == [[(name, 0)] for name in channels[:2]]


@pytest.mark.parametrize("good", [True, False])
def test_a_trial_sees_whether_bytes_arrive(monkeypatch: pytest.MonkeyPatch, good: bool) -> None:
    table: list[torch.Tensor] = []

    def share(buffer: torch.Tensor) -> dict[str, Any]:
        table.append(buffer)
        return {"at": len(table) - 1}

    monkeypatch.setattr(CpuPlatform, "share_memory", lambda self, buffer: share(buffer))
    monkeypatch.setattr(
        CpuPlatform,
        "open_memory",
        lambda self, note: table[note["at"]] if good else torch.zeros(4096, dtype=torch.uint8),
    )
    channel, found = channel_name("trial"), []
    reading = threading.Thread(target=lambda: found.append(attempt(channel, 0, 20)))
    reading.start()
    said = offer(channel, 1, torch.device("cpu"), 20)
    reading.join()
    assert (said, found) == ("", [""]) if good else found != [""]


def test_a_trial_that_cannot_begin_says_why() -> None:
    assert "waits for a sender" in attempt(channel_name("trial"), 0, 0.2)
    assert "has not come" in offer(channel_name("trial"), 1, None, 0.2)
