"""Processes for the weight sync tests: readers that report what they saw, sides that hang, from one clean parent.

They come from a fork server that has torch imported: as fast as forking, without the threads of the test's process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "verl.weight_sync.collective", "verl.weight_sync.verify"])


def spawn(target: Any, *args: Any) -> Any:
    """Start target(*args) in a process of its own."""
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def kill(pid: int) -> None:
    """SIGKILL, once the process has let go of the queue it reported through: others could not use it otherwise."""
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)


def channel_name(test: str) -> str:
    """A channel that no other test and no other run of this one uses."""
    return f"test-{os.getpid()}-{abs(hash(test)) % 10**8}"


def check_clean(channel: str) -> None:
    """Fail, and clean up, if a segment of the channel is left."""
    from verl.weight_sync.shared_memory import folder

    left = sorted(folder().glob(f"*{channel}*"))
    for file in left:
        file.unlink()
    assert not left, f"segments left: {left}"


def weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """Small weights of many kinds, 50 kB."""
    generator = torch.Generator().manual_seed(seed)
    return [
        ("embed", torch.randn(300, 40, generator=generator)),
        ("empty", torch.zeros(0, 3)),
        ("scalar", torch.randn((), generator=generator)),
        ("half", torch.randn(77, generator=generator).bfloat16()),
        ("big", torch.randn(9000, generator=generator)),
        ("count", torch.arange(5)),
    ]


def hashes(channel: str, reader: int, pushes: int, out: Any, first: int = 0) -> None:
    """A reader: receives `pushes` transfers of versions first, first + 1, …; reports (reader, checksums or the error's
    text)."""
    from verl.weight_sync.channel import receive
    from verl.weight_sync.verify import checksums

    torch.set_num_threads(1)
    for version in range(first, first + pushes):
        try:
            out.put((reader, checksums(receive(channel, reader, timeout=20, version=version))))
        except Exception as error:
            out.put((reader, f"{type(error).__name__}: {error}"))


def reads_two(channel: str) -> None:
    """A reader that stops after two tensors."""
    from verl.weight_sync.channel import receive

    stream = receive(channel, 0, timeout=20)
    next(stream), next(stream)
    stream.close()  # type: ignore[attr-defined]


def hangs(channel: str, reader: int, out: Any) -> None:
    """A reader that stands still at the first tensor."""
    from verl.weight_sync.channel import receive

    stream = receive(channel, reader, timeout=20)
    next(stream)
    out.put(("hanging", reader))
    time.sleep(60)


def hangs_on_host_2(channel: str, reader: int, pushes: int, out: Any) -> None:
    """A reader that stands still if it is on the channel of rank 2."""
    if channel.endswith(".2"):
        hangs(channel, reader, out)
    hashes(channel, reader, pushes, out)


def stalls(channel: str, out: Any) -> None:
    """A sender that stands still before the end."""
    from verl.weight_sync.channel import BucketSender

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights()
        out.put("sent")
        time.sleep(60)

    BucketSender(channel, 1, 4096, timeout=20).send(slow(), 0)


def relays(
    rank: int, size: int, port: int, channel: str, readers: int, pushes: int, out: Any, delta: bool = False
) -> None:
    """A relay: reports ("relay N", bytes or the error's text) of each transfer. delta: it keeps the buckets."""
    from verl.weight_sync.collective import Channel, Rendezvous, WeightGroup, relay
    from verl.weight_sync.delta import SentBuckets
    from verl.weight_sync.verify import WeightSyncError

    torch.set_num_threads(1)
    group, last = WeightGroup(rank, Rendezvous("127.0.0.1", port, size, 20)), SentBuckets() if delta else None
    for _ in range(pushes):
        try:
            out.put((f"relay {rank}", relay(group, Channel(f"{channel}.{rank}", readers, timeout=10), last).bytes))
        except WeightSyncError as error:
            out.put((f"relay {rank}", str(error)))
