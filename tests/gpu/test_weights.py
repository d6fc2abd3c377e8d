"""Weights of a device to another process: through the host's memory, and as handles of device memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.weight_sync_processes import channel_name, check_clean, context, spawn, weights


def read(channel: str, results: Any) -> None:
    """Checksums of what comes over the channel, and on which kind of device it lay."""
    from verl.weight_sync.channel import receive
    from verl.weight_sync.verify import checksums

    found: dict[str, str] = {}
    kinds = set()
    for name, tensor in receive(channel, 0, timeout=60):
        kinds.add(tensor.device.type)
        found |= checksums([(name, tensor.clone())])
    results.put((found, sorted(kinds)))


@pytest.mark.parametrize("way", ["host", pytest.param("handles", marks=pytest.mark.needs_cuda)])
def test_another_process_gets_the_same_bytes(platform: Any, way: str, record_property: Any) -> None:
    from verl.weight_sync.channel import BucketSender
    from verl.weight_sync.verify import checksums

    device = platform.device()
    sent = [(name, t.to(device)) for name, t in weights()]
    sent += [(f"large.{i}", torch.randn(1024, 4096, device=device)) for i in range(8)]
    channel = channel_name(f"gpu-{way}")
    results = context.Queue()
    process = spawn(read, channel, results)
    sender = BucketSender(channel, 1, 32 << 20, device=device if way == "handles" else None, timeout=60)
    try:
        first = sender.send(sent, 1)
        found, kinds = results.get(timeout=60)
    finally:
        process.join(20)
        check_clean(channel)
    record_property("gb_per_s_first", first.bytes / first.seconds / 1e9)
    assert found == checksums(sent)
    assert kinds == ([device.type] if way == "handles" else ["cpu"])
