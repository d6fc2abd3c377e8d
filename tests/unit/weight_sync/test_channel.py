"""Shared memory between real processes: same bytes for every reader, limits kept, killed sides, nothing left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.chaos.fork_server import until
from tests.weight_sync_processes import (
    channel_name,
    check_clean,
    context,
    hangs,
    hashes,
    kill,
    reads_two,
    spawn,
    stalls,
    weights,
)
from verl.platform import processes
from verl.weight_sync.channel import BucketSender, receive
from verl.weight_sync.shared_memory import SharedMemoryBlock, path_of, sweep
from verl.weight_sync.verify import WeightSyncError, checksums

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def channel(request: pytest.FixtureRequest) -> Iterator[str]:
    name = channel_name(request.node.nodeid)
    yield name
    check_clean(name)


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("bucket", [1, 4096, 1 << 20])
def test_every_reader_gets_the_same_bytes_twice(channel: str, readers: int, bucket: int) -> None:
    if bucket == 1:
        bucket = 640  # 64-byte buckets of 36 kB would be many rounds, and say no more
    out = context.Queue()
    processes = [spawn(hashes, channel, r, 2, out) for r in range(readers)]
    sender = BucketSender(channel, readers, bucket, timeout=20)
    expected = []
    for version in range(2):
        result = sender.send(iter(weights(version)), version)
        expected.append(checksums(weights(version)))
        assert result.bytes == sum(t.numel() * t.element_size() for _, t in weights())
        assert result.seconds > 0
    got = [out.get(timeout=20) for _ in range(2 * readers)]
    for reader in range(readers):
        assert [seen for r, seen in got if r == reader] == expected
    for process in processes:
        process.join(10)


def test_bfloat16_on_the_way_halves_the_bytes(channel: str) -> None:
    out = context.Queue()
    spawn(hashes, channel, 0, 1, out)
    result = BucketSender(channel, 1, 4096, dtype=torch.bfloat16, timeout=20).send(weights(), 0)
    expected = [(n, t.bfloat16() if t.is_floating_point() else t) for n, t in weights()]
    assert out.get(timeout=20)[1] == checksums(expected) == checksums(weights(), dtype=torch.bfloat16)
    assert result.bytes == sum(t.numel() * t.element_size() for _, t in expected)


def test_only_the_owner_may_read_a_segment_and_files_of_others_are_refused(channel: str) -> None:
    segment = SharedMemoryBlock.create(channel, 1, 1024, 0)
    assert os.stat(segment.path).st_mode & 0o777 == 0o600
    with pytest.raises(WeightSyncError, match="sending on channel"):
        BucketSender(channel, 1, 1024).send([], 0)
    segment.remove()
    segment.close()
    path = path_of(channel)
    path.write_bytes(b"\0" * 8192)
    path.chmod(0o644)
    with pytest.raises(WeightSyncError, match="only this user can read"):
        list(receive(channel, 0, timeout=1))
    path.chmod(0o600)
    with pytest.raises(WeightSyncError, match="another version of verl"):
        list(receive(channel, 0, timeout=1))
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(WeightSyncError, match="cannot be opened"):
        list(receive(channel, 0, timeout=1))
    path.unlink()
    with pytest.raises(ValueError, match=r"channel '../x'"):
        path_of("../x")


def test_messages_name_who_is_waited_for(channel: str) -> None:
    with pytest.raises(WeightSyncError, match=r"nothing moved for 0\.2 s; reader 4 of channel .* waits for a sender"):
        list(receive(channel, 4, timeout=0.2))
    with pytest.raises(WeightSyncError, match="waits for reader 0, which has not come, reader 1, which has not come"):
        BucketSender(channel, 2, 1024, timeout=0.2).send(weights(), 0)


def test_a_reader_that_dies_before_it_comes_is_not_waited_for(channel: str) -> None:
    ended = context.Process(target=int)
    ended.start()
    gone = (ended.pid or 0, processes.process_start_time(ended.pid or 0), processes.namespace())
    ended.join()
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=rf"process {gone[0]}, reader 1 of .* died before it came"):
        sender = BucketSender(channel, 2, 4096, timeout=60, expected=[processes.identity(), gone])
        sender.send(weights(), 0)
    far = (1, 1, processes.namespace() + 1)
    with pytest.raises(WeightSyncError, match="runs in another container"):
        BucketSender(channel, 1, 4096, timeout=60, expected=[far]).send(weights(), 0)
    assert time.monotonic() - started < 20


def test_readers_whose_call_has_ended_are_not_waited_for(channel: str) -> None:
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="ended before they had all"):
        BucketSender(channel, 2, 4096, timeout=60, over=lambda: True).send(weights(), 0)
    assert time.monotonic() - started < 20


def test_a_failing_gather_reaches_the_readers_and_a_wrong_version_the_sender(channel: str) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights()[:2]
        raise ArithmeticError("rank 3 said no")

    out = context.Queue()
    spawn(hashes, channel, 0, 1, out)
    with pytest.raises(ArithmeticError):
        BucketSender(channel, 1, 4096, timeout=20).send(broken(), 0)
    assert "failed: ArithmeticError: rank 3 said no" in out.get(timeout=20)[1]
    spawn(hashes, channel, 0, 1, out)
    with pytest.raises(WeightSyncError, match=r"reader 0 .* stopped reading"):
        BucketSender(channel, 1, 4096, timeout=20).send(weights(), 7)
    assert "carries version 7, version 0 was expected" in out.get(timeout=20)[1]


def test_gathering_goes_on_to_the_end_when_a_reader_stops(channel: str) -> None:
    """Gathering is a collective: other ranks would wait for ever for one that left it."""
    given, seen = weights() * 20, []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in given:
            seen.append(name)
            yield name, tensor

    spawn(reads_two, channel)
    with pytest.raises(WeightSyncError, match="stopped reading after"):
        BucketSender(channel, 1, 4096, timeout=20).send(gather(), 0)
    assert len(seen) == len(given)


def test_a_killed_reader_is_named_at_once(channel: str) -> None:
    out = context.Queue()
    process = spawn(hangs, channel, 0, out)
    failed: list[BaseException] = []

    def push() -> None:
        try:
            BucketSender(channel, 1, 4096, timeout=50).send(weights(), 0)
        except WeightSyncError as error:
            failed.append(error)

    thread = threading.Thread(target=push)
    thread.start()
    assert out.get(timeout=20) == ("hanging", 0)
    started = time.monotonic()
    kill(process.pid)
    thread.join(40)
    assert time.monotonic() - started < 25
    assert f"reader 0 of channel {channel!r} (process {process.pid}) died" in str(failed[0])
    process.join(5)


def test_a_segment_that_is_deleted_before_its_reader_comes_is_said_at_once(channel: str) -> None:
    sending, said = BucketSender(channel, 1, 4096, timeout=20), list[WeightSyncError]()

    def send() -> None:
        try:
            sending.send(weights(), 0)
        except WeightSyncError as error:
            said.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    until(path_of(channel).exists)
    path_of(channel).unlink()
    thread.join(5)
    assert said and f"{path_of(channel)} was deleted before all of its readers" in str(said[0])


def test_a_killed_sender_is_named_at_once_and_its_memory_removed(channel: str) -> None:
    out = context.Queue()
    process = spawn(stalls, channel, out)
    stream = receive(channel, 0, timeout=50)
    names = [next(stream)[0]]
    assert out.get(timeout=20) == "sent"
    kill(process.pid)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=rf"process {process.pid}\) died"):
        for name, _ in stream:
            names.append(name)
    assert time.monotonic() - started < 25 and not path_of(channel).exists()
    process.join(5)


def test_segments_of_the_dead_are_swept_and_their_channel_is_free(channel: str) -> None:
    out = context.Queue()
    for again in range(2):
        process = spawn(stalls, channel, out)
        until(lambda: path_of(channel).exists())
        kill(process.pid)
        process.join(5)
        if again:  # any other test's sender may have done it before
            sweep()
            assert not path_of(channel).exists()
        else:
            spawn(hashes, channel, 0, 1, out)
            BucketSender(channel, 1, 4096, timeout=20).send(weights(), 0)
            assert out.get(timeout=20)[1] == checksums(weights())


def test_memory_is_reserved_as_it_is_written(channel: str) -> None:
    """A bucket may be far larger than a small model, and larger than the memory there is."""
    out = context.Queue()
    spawn(hashes, channel, 0, 1, out)
    BucketSender(channel, 1, 1 << 40, timeout=20).send(weights(), 0)
    assert out.get(timeout=20)[1] == checksums(weights())
    segment = SharedMemoryBlock.create(channel, 1, 1 << 45, 0)
    try:
        with pytest.raises(WeightSyncError, match="update_weights_bucket_megabytes"):
            segment.reserve(0, 1 << 45)
    finally:
        segment.remove()
        segment.close()


def test_handles_of_device_memory_travel_as_plain_data(channel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The protocol around CUDA's handles, with a table in this process in the place of the driver: no device here."""
    import json

    from verl.platform.cpu import CpuPlatform

    table: list[torch.Tensor] = []

    def share(buffer: torch.Tensor) -> dict[str, Any]:
        table.append(buffer)
        return {"at": len(table) - 1}

    monkeypatch.setattr(CpuPlatform, "share_memory", lambda self, buffer: share(buffer))
    monkeypatch.setattr(CpuPlatform, "open_memory", lambda self, note: table[json.loads(json.dumps(note))["at"]])
    got: list[dict[str, str]] = []
    readers = [
        threading.Thread(target=lambda r=r: got.append(checksums(receive(channel, r, timeout=20)))) for r in range(2)
    ]
    for thread in readers:
        thread.start()
    sender = BucketSender(channel, 2, 4096, timeout=20, device=torch.device("cpu"))
    result = sender.send(iter(weights()), 0)
    for thread in readers:
        thread.join(20)
    assert got == [checksums(weights())] * 2
    assert result.bytes == sum(t.numel() * t.element_size() for _, t in weights())
    assert len(table) == 4 and len({t.data_ptr() for t in table}) == 2
