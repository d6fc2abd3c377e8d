"""Weights between processes that share a device: buckets stay in device memory, only their handles travel.

The shared memory segment of the channel carries the counters, the headers, and in place of a bucket's bytes the
handles of the two device buffers, one for each reader.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from verl.platform import platform_of
from verl.weight_sync.base import WeightSyncError
from verl.weight_sync.shared_memory import SharedMemorySink

_HANDLES_BYTES = 1 << 16


class HandleSink(SharedMemorySink):
    """A `SharedMemorySink` whose buckets are on `device`."""

    def __init__(
        self,
        channel: str,
        readers: int,
        bucket_bytes: int,
        version: int,
        *,
        device: torch.device,
        **options: Any,
    ):
        self._buffers = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        super().__init__(channel, readers, _HANDLES_BYTES, version, on_device=True, **options)

    def room(self) -> torch.Tensor:
        """See Sink.room."""
        super().room()
        return self._buffers[self._number % 2]

    def reserve(self, upto: int) -> None:
        """Device memory is there already."""

    def publish(self, header: bytes, used: int) -> None:
        """See Sink.publish. The device is done with the bucket when the readers hear of it."""
        buffer = self._buffers[self._number % 2]
        platform = platform_of(buffer.device)
        platform.synchronize()
        told = [platform.share_memory(buffer) for _ in self._readers] if self._number < 2 else []
        text = json.dumps({"used": used, "kind": platform.name, "handles": told}).encode("ascii")
        if len(text) > _HANDLES_BYTES:
            raise WeightSyncError(f"weight sync: {len(self._readers)} readers of one device are too many")
        super().reserve(len(text))
        super().room()[: len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        super().publish(header, len(text))


def opened(notes: Iterable[tuple[bytes, torch.Tensor]], reader: int) -> Iterator[tuple[bytes, torch.Tensor]]:
    """(header, handles) of buckets → (header, the bucket's bytes on the device)."""
    buffers: list[torch.Tensor] = []
    for number, (header, data) in enumerate(notes):
        note = json.loads(bytes(data.numpy()))
        if number < 2:
            buffers.append(platform_of(note["kind"]).open_memory(note["handles"][reader]))
        buffer = buffers[number % 2]
        if not 0 <= note["used"] <= buffer.numel():
            raise WeightSyncError("weight sync: a bucket of impossible size on the device")
        yield header, buffer[: note["used"]]
        platform_of(buffer.device).synchronize()
