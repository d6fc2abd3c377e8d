"""Broadcast to relays: "hosts" are processes here, each with its own channel and its own readers."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import free_port
from tests.weight_sync_processes import (
    channel_name,
    check_clean,
    context,
    hangs_on_host_2,
    hashes,
    kill,
    reads_two,
    relays,
    spawn,
    weights,
)
from verl.platform.network import address_towards, listen
from verl.weight_sync import collective
from verl.weight_sync.channel import Channel
from verl.weight_sync.collective import Rendezvous, WeightGroup, broadcast
from verl.weight_sync.delta import SentBuckets
from verl.weight_sync.verify import WeightSyncError, checksums

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def channel(request: pytest.FixtureRequest) -> Iterator[str]:
    name = channel_name(request.node.nodeid)
    yield name
    check_clean(name)


def start(channel: str, size: int, readers: int, pushes: int, out: Any, reader: Any = hashes) -> tuple[Any, ...]:
    port = free_port()
    hosts = [spawn(relays, rank, size, port, channel, readers, pushes, out) for rank in range(1, size)]
    samplers = [
        spawn(reader, f"{channel}.{rank}", number, pushes, out) for rank in range(1, size) for number in range(readers)
    ]
    return WeightGroup(0, Rendezvous("127.0.0.1", port, size, 20)), hosts, samplers


def test_a_limit_of_infinity_is_one_that_torch_can_count():
    group = WeightGroup(0, Rendezvous("127.0.0.1", free_port(), 1, float("inf")))
    group.broadcast(torch.ones(2))
    group.close()


def gathered(out: Any, count: int) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for _ in range(count):
        who, what = out.get(timeout=30)
        found.setdefault(who, []).append(what)
    return found


@pytest.mark.parametrize(("own", "bucket"), [(0, 4096), (1, 4096), (1, 1 << 20)])
def test_samplers_of_all_hosts_hold_the_same_bytes(channel: str, own: int, bucket: int) -> None:
    out = context.Queue()
    group, _, _ = start(channel, 3, 2, 2, out)
    if own:
        spawn(hashes, f"{channel}.0", 0, 2, out)
    for version in range(2):
        here = Channel(f"{channel}.0", own, timeout=10) if own else None
        result = broadcast(group, weights(version), version, bucket_bytes=bucket, dtype=torch.bfloat16, channel=here)
        assert result.bytes == sum(t.numel() * (2 if t.is_floating_point() else t.element_size()) for _, t in weights())
    found = gathered(out, 2 * (2 + 4 + own))
    expected = [checksums(weights(v), dtype=torch.bfloat16) for v in range(2)]
    for reader, hosts in ((0, 2 + own), (1, 2)):
        assert sorted(map(str, found[reader])) == sorted(map(str, expected * hosts))
    assert all(isinstance(moved, int) for r in (1, 2) for moved in found[f"relay {r}"])
    group.close()


@pytest.mark.parametrize("bucket", [4096, 1 << 20])
def test_only_what_changed_travels_and_samplers_hold_the_same_bytes(channel: str, bucket: int) -> None:
    """Versions: all; 1 % of the words of one weight; none; all; then after a reader that failed everything again."""
    out, port = context.Queue(), free_port()
    spawn(relays, 1, 2, port, channel, 1, 6, out, True)
    spawn(hashes, f"{channel}.1", 0, 4, out)
    group, last = WeightGroup(0, Rendezvous("127.0.0.1", port, 2, 20)), SentBuckets()
    versions = [weights(), weights(), weights(), weights(1)]
    for _, tensor in versions[1][4:5] + versions[2][4:5]:
        tensor[::100] += 0.5
    whole = sum(-(-2 * t.numel() // 64) * 64 for _, t in weights() if t.is_floating_point()) + 40
    sent = []

    def push(version: int, tensors: Any) -> None:
        result = broadcast(group, tensors, version, bucket_bytes=bucket, dtype=torch.bfloat16, last=last)
        sent.append(result.bytes)

    for version, tensors in enumerate(versions):
        push(version, tensors)
    assert sent[0] >= whole - 64 and sent[3] >= whole - 64, "a first transfer, and one in which everything changed"
    words = len(versions[1][4][1][::100])
    assert 3 * words <= sent[1] <= 3 * (words + whole // 2 // 255) and sent[2] == 0
    spawn(reads_two, f"{channel}.1")
    with pytest.raises(WeightSyncError, match="reader 0"):
        push(4, versions[3])
    spawn(hashes, f"{channel}.1", 0, 1, out, 5)
    push(5, versions[3])
    assert sent[4] == sent[3] and last.token, "after a failure everything is sent"
    found = gathered(out, 6 + 5)
    tensors_of = [*versions, versions[3]]
    assert found[0] == [checksums(tensors, dtype=torch.bfloat16) for tensors in tensors_of]
    group.close()


def test_a_killed_sampler_of_another_host_fails_every_rank_by_name(channel: str) -> None:
    out = context.Queue()
    group, _, samplers = start(channel, 3, 1, 1, out, hangs_on_host_2)
    victim = samplers[1]

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights()
        assert out.get(timeout=20) == ("hanging", 0)
        kill(victim.pid)
        yield from [(f"{n}.again", t) for n, t in weights()]

    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=rf"relay of rank 2 failed.*reader 0 of .*process {victim.pid}\) died"):
        broadcast(group, gather(), 0, bucket_bytes=4096)
    assert time.monotonic() - started < 15
    found = gathered(out, 3)
    assert "died" in found["relay 2"][0] and "relay of rank 2 failed" in found["relay 1"][0]
    assert len(found[0]) == 1  # the sampler of the other host has everything


def test_a_failing_gather_is_told_to_relays_and_readers(channel: str) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights()[:2]
        raise ArithmeticError("rank 3 said no")

    out = context.Queue()
    group, _, _ = start(channel, 2, 1, 1, out)
    with pytest.raises(ArithmeticError):
        broadcast(group, broken(), 0, bucket_bytes=4096)
    found = gathered(out, 2)
    assert "rank 3 said no" in found["relay 1"][0] and "rank 3 said no" in found[0][0]


def test_a_killed_relay_ends_the_transfer_in_time(channel: str) -> None:
    out = context.Queue()
    group, processes, _ = start(channel, 2, 1, 1, out)

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights()
        kill(processes[0].pid)
        yield from weights() * 50

    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="broadcast to 1 relays"):
        broadcast(group, gather(), 0, bucket_bytes=4096)
    assert time.monotonic() - started < 30
    assert "died" in out.get(timeout=20)[1]  # the reader of that host, which removes its segment


def test_a_relay_whose_channel_is_taken_fails_the_transfer_and_not_the_group(channel: str) -> None:
    from verl.weight_sync.shared_memory import SharedMemoryBlock

    out = context.Queue()
    blocked = SharedMemoryBlock.create(f"{channel}.1", 1, 1024, 0)
    port = free_port()
    spawn(relays, 1, 2, port, channel, 1, 2, out)
    group = WeightGroup(0, Rendezvous("127.0.0.1", port, 2, 20))
    with pytest.raises(WeightSyncError, match=r"relay of rank 1 failed.*is sending on channel"):
        broadcast(group, weights(), 0, bucket_bytes=4096)
    blocked.remove()
    blocked.close()
    spawn(hashes, f"{channel}.1", 0, 1, out)
    broadcast(group, weights(), 0, bucket_bytes=4096)
    found = gathered(out, 3)
    assert found[0] == [checksums(weights())]


def test_the_limit_of_a_meeting_holds_for_its_collectives() -> None:
    """The sender stands still; the relay gives up after the rendezvous's limit."""
    from verl.platform import detect

    rendezvous = Rendezvous("127.0.0.1", free_port(), 2, timeout=2.0)
    with ThreadPoolExecutor(2) as both:
        sender, relay = both.map(lambda rank: rendezvous.join(rank, "naive", detect("cpu")), range(2))
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"broadcast to 1 relays, seen by rank 1: .*Timed out"):
        relay.broadcast(torch.zeros(4))
    assert 1.5 < time.monotonic() - started < 30
    for group in (relay, sender):
        group.close()


def test_ranks_that_do_not_meet_and_collectives_that_are_not_there() -> None:
    with pytest.raises(WeightSyncError, match="rank 1 of 2 cannot meet the others at 127"):
        WeightGroup(1, Rendezvous("127.0.0.1", free_port(), 2, timeout=1))
    with pytest.raises(WeightSyncError, match="no collectives named 'hccl'"):
        WeightGroup(0, Rendezvous("127.0.0.1", free_port(), 1, timeout=5), "hccl")


def test_sockets_listen_on_the_address_given_only() -> None:
    server = socket.socket(fileno=listen("127.0.0.1", 0))
    assert server.getsockname()[0] == "127.0.0.1"
    server.close()
    assert address_towards("127.0.0.1", 80) == "127.0.0.1"


def test_a_lost_rank_of_nccl_raises_from_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads how while it makes the group; the environment of the training's groups is as it was."""
    names = ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    seen: list[list[str | None]] = []
    monkeypatch.setenv(names[1], "3")
    monkeypatch.delenv(names[0], raising=False)

    def group(*_: Any) -> None:
        seen.append([os.environ.get(name) for name in names])

    group.Options = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", group, raising=False)
    collective._process_group("nccl", dist.HashStore(), 0, 1, timedelta(seconds=1), "127.0.0.1")
    assert seen == [["1", "0"]] and [os.environ.get(name) for name in names] == [None, "3"]
