"""Weights between processes of one host: through two buckets of shared memory, written and read at the same time.

    sender's caller ── gathers ──▶ queue ── sender's thread ──▶ bucket 0 │ bucket 1 ──▶ readers 0 … n-1

While the caller gathers the next tensor (a collective, when the model is sharded), a thread copies the one before
into a bucket, and the readers load the bucket before that. In memory are two buckets, at most three gathered tensors,
and, for a reader, one tensor that was larger than a bucket.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass

import torch

from verl.platform import platform_of
from verl.platform.processes import Identity, alive, namespace
from verl.weight_sync import buckets, shared_memory
from verl.weight_sync.shared_memory import DONE, FAILED, RUNNING, SharedMemoryBlock, path_of, wait
from verl.weight_sync.verify import SyncResult, WeightSyncError

TIMEOUT = 300.0
"""Seconds without any progress after which a side gives up."""

HOST_BUCKET = 16 << 20
"""Most bytes of a bucket in host memory, whatever was asked for: sender and reader meet in the processor's cache, where
buckets of 64 MiB measured half as fast, and two of them fit into a container's smallest /dev/shm."""

DEVICE_BUCKET = 256 << 20
"""Most bytes of a bucket on a device, whatever was asked for: two buckets, and as much memory of gathered tensors, lie
beside the trainer's memory and the sampler's just when both are short of memory."""

_EARLY = 4 << 20  # bytes from which on a bucket is published as it is when its readers have nothing to do


def host_bucket(wanted: int) -> int:
    """Bytes that a bucket in host memory gets where `wanted` were asked for."""
    return buckets.bucket_size(min(wanted, HOST_BUCKET))


@dataclass
class Channel:
    """What one transfer goes through, on the side that writes.

    name: letters, digits, `_ . -`. readers: how many processes read it. expected: those processes, by reader number.
    The sender does not wait for one that dies before it comes, nor for any when `over()` says that the call that they
    serve has ended. timeout: seconds without progress after which the sender gives up.
    """

    name: str
    readers: int
    _: KW_ONLY
    expected: Sequence[Identity] = ()
    over: Callable[[], bool] = lambda: False
    timeout: float = TIMEOUT


@dataclass
class BucketSender(Channel):
    """A channel that sends weights to `readers` processes of this host, each of which calls `receive` with its name.

    bucket_bytes: most bytes of one bucket (at most HOST_BUCKET, on a device DEVICE_BUCKET); two are in memory.
    dtype: what floating point weights are converted to before they are written; None sends them as they are.
    device: the CUDA device that sender and readers share: buckets then stay on it, and only their handles travel. None:
        through the host's memory.
    """

    bucket_bytes: int
    _: KW_ONLY
    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def __post_init__(self) -> None:
        most = HOST_BUCKET if self.device is None else DEVICE_BUCKET
        self.bucket_bytes = buckets.bucket_size(min(self.bucket_bytes, most))
        shared_memory.sweep()

    def send(self, weights: buckets.Weights, version: int) -> SyncResult:
        """Make every reader have all weights; returns when they do. `bytes` counts each tensor once.

        A tensor may be looked at until the call returns, so what `weights` yields must not be written again by then.
        `weights` is used up even when a reader fails, for it may be a collective in which other ranks wait; after that,
        WeightSyncError says which reader failed, and how.
        """
        started = time.monotonic()
        if self.device is None:
            sink = SharedMemorySink(self, self.bucket_bytes, version)
        else:
            sink = HandleSink(self, self.bucket_bytes, version, self.device)
        with sink:
            moved = buckets.pack_while_gathering(weights, sink, dtype=self.dtype)
            sink.finish()
        return SyncResult(bytes=moved, seconds=time.monotonic() - started)


class SharedMemorySink(buckets.Sink):
    """The writing side of one transfer. A context: an exception inside tells the readers and removes the file."""

    def __init__(self, channel: Channel, bucket_bytes: int, version: int, *, on_device: bool = False):
        self._channel = channel
        where = (channel.name, channel.readers, bucket_bytes, version)
        self._segment = SharedMemoryBlock.create(*where, on_device=on_device)
        self._readers = list(self._segment.readers)
        self._number = 0

    def __enter__(self) -> SharedMemorySink:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._segment.finish(f"{type(error).__name__}: {error}")
        self._readers = []
        self._segment.remove()
        self._segment.close()

    def room(self) -> torch.Tensor:
        """See Sink.room: bucket n is free when every reader has taken bucket n - 2."""
        needed = self._number - 1
        self._wait(lambda: self._least() >= needed, needed)
        return self._segment.room(self._number)

    def reserve(self, upto: int) -> None:
        """See Sink.reserve."""
        self._segment.reserve(self._number, upto)

    def early(self, used: int) -> bool:
        """Readers that wait get what there is, if it is worth a round."""
        return used >= _EARLY and self._least() >= self._number

    def publish(self, header: bytes, used: int) -> None:
        """See Sink.publish."""
        self._segment.publish(self._number, header, used)
        self._number += 1

    def finish(self) -> None:
        """No more buckets: wait until every reader has them all."""
        self._segment.finish()
        self._wait(lambda: all(reader.status == DONE for reader in self._readers), self._number)

    def _wait(self, until: Callable[[], bool], needed: int) -> None:
        wait(until, self._check, self._channel.timeout, lambda: self._waiting(needed))

    def _least(self) -> int:
        return min(reader.taken for reader in self._readers)

    def _check(self) -> None:
        if not all(reader.status for reader in self._readers) and not self._segment.path.exists():
            raise WeightSyncError(f"{self._segment.path} was deleted before all of its readers had opened it")
        if self._channel.over() and any(reader.status != DONE for reader in self._readers):
            raise WeightSyncError(f"channel {self._channel.name!r}: its readers ended before they had all")
        for number, reader in enumerate(self._readers):
            where = f"reader {number} of channel {self._channel.name!r} (process {reader.pid})"
            if not reader.status and number < len(self._channel.expected):
                self._look_for(number, self._channel.expected[number])
            if reader.status == FAILED:
                raise WeightSyncError(f"{where} stopped reading after {reader.taken} buckets")
            if reader.status == RUNNING and not alive(reader.pid, reader.start):
                raise WeightSyncError(f"{where} died after {reader.taken} buckets")

    def _look_for(self, number: int, expected: Identity) -> None:
        pid, start, where = expected
        text = f"process {pid}, reader {number} of channel {self._channel.name!r},"
        if where != namespace():
            raise WeightSyncError(f"{text} runs in another container than the sender: start both in one")
        # It may have come, and gone, since its fields were looked at.
        if not alive(pid, start) and not self._readers[number].status:
            raise WeightSyncError(f"{text} died before it came")

    def _waiting(self, needed: int) -> str:
        late = []
        for number, reader in enumerate(self._readers):
            if not reader.status:
                late.append(f"reader {number}, which has not come")
            elif reader.status != DONE and reader.taken <= needed:
                late.append(f"reader {number} (process {reader.pid}, {reader.taken} buckets taken)")
        return f"the sender of channel {self._channel.name!r} waits for {', '.join(late)}"


_HANDLES_BYTES = 1 << 16


class HandleSink(SharedMemorySink):
    """A `SharedMemorySink` whose buckets stay on `device`, for readers of the same device: the segment carries the
    counters, the headers, and instead of a bucket's bytes the handles of the two device buffers, one per reader."""

    def __init__(self, channel: Channel, bucket_bytes: int, version: int, device: torch.device):
        self._buffers = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        super().__init__(channel, _HANDLES_BYTES, version, on_device=True)

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
        platform.synchronize(buffer.device)  # a thread's current device is the first one
        handles = [platform.share_memory(buffer) for _ in self._readers] if self._number < 2 else []
        text = json.dumps({"used": used, "kind": platform.name, "handles": handles}).encode("ascii")
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
        yield header, buffer[: note["used"]]
        platform_of(buffer.device).synchronize(buffer.device)


def receive(
    channel: str, reader: int, *, timeout: float = TIMEOUT, version: int | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the channel's next transfer, (name, tensor), as reader number `reader` of it.

    May be called before the sender begins; then it waits. A tensor is a view of shared memory, valid until the next
    one is asked for: copy it. All of them must be read; a caller that stops earlier fails the transfer for all.
    version: the version that is expected. Raises WeightSyncError when the sender fails, dies, or does nothing for
    `timeout` seconds, and when another version or another number of readers is on the channel.
    """
    segment = _attach(channel, reader, timeout)
    complete = False
    try:
        carried = segment.control.version
        if version is not None and carried != version:
            text = f"channel {channel!r} carries version {carried}, version {version} was expected"
            raise WeightSyncError(text)
        stream = _buckets(segment, channel, reader, timeout)
        yield from buckets.unpack(opened(stream, reader) if segment.control.on_device else stream)
        complete = True
    finally:
        segment.leave(reader, done=complete)
        if not segment.sender_alive():
            segment.remove()
        segment.close()


@contextmanager
def called_off(places: Iterable[tuple[str, int]], version: int, why: str) -> Iterator[None]:
    """In this block, readers that wait for a sender of the channels get a WeightSyncError with `why`.

    `places`: channels, and numbers of readers on them. A channel that has a sender is left alone: it ends by itself.
    """
    readers: dict[str, int] = {}
    for channel, number in places:
        readers[channel] = max(readers.get(channel, 0), number + 1)
    with ExitStack() as stack:
        for channel, count in readers.items():
            with suppress(WeightSyncError):  # its sender is there
                segment = SharedMemoryBlock.create(channel, count, 1, version)
                stack.callback(segment.close)
                stack.callback(segment.remove)
                segment.finish(why)
        yield


def _attach(channel: str, reader: int, timeout: float) -> SharedMemoryBlock:
    """The segment of a living sender, as soon as there is one that this reader has not read."""
    path = path_of(channel)
    attached: list[SharedMemoryBlock] = []

    def come() -> bool:
        if not shared_memory.live_sender(path) or (segment := SharedMemoryBlock.open(path)) is None:
            return False
        count = len(segment.readers)
        if reader < count and segment.attach(reader):
            attached.append(segment)
            return True
        segment.close()
        if reader >= count:
            raise WeightSyncError(f"channel {channel!r} has {count} readers, there is no reader {reader}")
        return False

    who = f"reader {reader} of channel {channel!r} waits for a sender to begin"
    wait(come, lambda: None, timeout, lambda: who)
    return attached[0]


def _buckets(
    segment: SharedMemoryBlock, channel: str, reader: int, timeout: float
) -> Iterator[tuple[bytes, torch.Tensor]]:
    control, number = segment.control, 0

    def look() -> None:
        if control.status == RUNNING and not segment.sender_alive():
            raise WeightSyncError(
                f"the sender of channel {channel!r} (process {control.pid}) died after {number} buckets"
            )

    def who() -> str:
        return f"reader {reader} of channel {channel!r} waits for bucket {number} of process {control.pid}"

    def moved() -> bool:
        return bool(control.produced > number or control.status != RUNNING)

    while True:
        wait(moved, look, timeout, who)
        if control.status == FAILED:
            reason = control.reason.decode(errors="replace")
            raise WeightSyncError(f"the sender of channel {channel!r} failed: {reason}")
        if control.produced <= number:
            return
        yield segment.bucket(number)
        number += 1
        segment.taken(reader, number)


_TRIAL = ("trial", torch.arange(256, dtype=torch.uint8))


def offer(
    channel: str, readers: int, device: torch.device | None, timeout: float, expected: Sequence[Identity] = ()
) -> str:
    """The sender's side of a first, small transfer: what went wrong, "" for nothing. Handles of device memory depend on
    drivers, containers and which devices a process sees; a trial finds out before a model's weights are half loaded."""
    try:
        sender = BucketSender(channel, readers, 4096, timeout=timeout, expected=expected, device=device)
        sender.send([_TRIAL], 0)
    except Exception as error:  # whatever it is, this way does not work here: the caller takes another
        return f"{type(error).__name__}: {error}"
    return ""


def attempt(channel: str, reader: int, timeout: float) -> str:
    """A reader's side of `offer`: what went wrong, "" for nothing."""
    try:
        weights = [(name, tensor.cpu().clone()) for name, tensor in receive(channel, reader, timeout=timeout)]
    except Exception as error:  # as above
        return f"{type(error).__name__}: {error}"
    same = len(weights) == 1 and weights[0][0] == _TRIAL[0] and torch.equal(weights[0][1], _TRIAL[1])
    return "" if same else "other bytes came than were sent"
