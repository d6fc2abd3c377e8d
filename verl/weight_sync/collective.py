"""Weights between hosts: one broadcast to a relay per host, which feeds the shared memory of its host.

    training rank 0 ── pack ──▶ bucket ══ broadcast ══▶ relay of host 1 ── shared memory ──▶ its samplers
                                   ║                └═▶ relay of host 2 ── shared memory ──▶ its samplers
                                   └── shared memory ──▶ samplers of rank 0's own host

A bucket is filled in the memory that the samplers of the root's host read, sent from there, and received in the memory
that the samplers of the other host read: nothing is copied in between (over gloo; over a device's library it goes
through one buffer on the device). While a relay's samplers load a bucket, the next one is on its way.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from verl.platform import platform_of
from verl.platform.network import address_towards, listen
from verl.platform.processes import Identity
from verl.weight_sync import buckets
from verl.weight_sync.base import SyncResult, WeightSyncError
from verl.weight_sync.copier import Copier
from verl.weight_sync.shared_memory import TIMEOUT, SharedMemorySink

if TYPE_CHECKING:
    from verl.platform import Platform

_BEGIN, _BUCKET, _DONE, _FAILED = range(4)
_TEXT = 1024


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one broadcast meet: rank 0's address and a free port on it, and how many they are.

    timeout: `nccl_timeout`, seconds for each collective of the group; None leaves it to those who join.
    """

    address: str
    port: int
    size: int
    timeout: float | None = None

    def join(self, rank: int, backend: str, platform: Platform, timeout: float) -> WeightGroup:
        """The group as that rank. backend: `checkpoint_engine.backend`; `naive` goes through host memory.

        `timeout` holds if the rendezvous has none.
        """
        on_host = backend == "naive" or platform.on_host
        return WeightGroup(
            rank,
            self.size,
            self.address,
            self.port,
            backend="gloo" if on_host else backend,
            device=None if on_host else platform.device(),
            timeout=timeout if self.timeout is None else self.timeout,
        )


class WeightGroup:
    """The ranks between which weights travel: rank 0 sends, the others are relays. No part of the training's groups.

    rank, size: of this process and of all. master_addr, master_port: where they meet; rank 0 listens there only.
    backend: gloo (host memory), nccl or hccl (device memory; `device` is this rank's). nccl and hccl are written from
    the libraries' documentation and have never run.
    timeout: seconds for the rendezvous and for every broadcast. Raises WeightSyncError when the ranks do not meet.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        master_addr: str,
        master_port: int,
        *,
        backend: str = "gloo",
        device: torch.device | None = None,
        timeout: float = TIMEOUT,
    ):
        self.rank, self.size = rank, size
        self.device = device or torch.device("cpu")
        self.on_host = platform_of(self.device).on_host
        limit = timedelta(seconds=timeout)
        with _named(f"rank {rank} of {size} cannot meet the others at {master_addr}:{master_port}"):
            self._store = dist.TCPStore(
                master_addr,
                master_port,
                size,
                is_master=rank == 0,
                timeout=limit,
                wait_for_workers=False,
                master_listen_fd=listen(master_addr, master_port) if rank == 0 else None,
            )
            store = dist.PrefixStore("weights", self._store)
            own = address_towards(master_addr, master_port)
            self._group = _process_group(backend, store, rank, size, limit, own)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's contiguous tensor to all ranks, in place. WeightSyncError if a rank is gone or too late."""
        if not tensor.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with _named(f"broadcast to {self.size - 1} relays, seen by rank {self.rank}"):
            self._group.broadcast([tensor], options).wait()

    def announce(self, kind: int, text: bytes = b"", used: int = 0) -> None:
        """Rank 0 says what comes: a kind, a text, and how many bytes of a bucket follow."""
        self.broadcast(torch.tensor([kind, len(text), used], dtype=torch.int64, device=self.device))
        self.broadcast(_text(text, len(text), self.device))

    def hear(self) -> tuple[int, bytes, int]:
        """What rank 0 announces."""
        numbers = torch.zeros(3, dtype=torch.int64, device=self.device)
        self.broadcast(numbers)
        kind, length, used = map(int, numbers.tolist())
        text = torch.empty(length, dtype=torch.uint8, device=self.device)
        self.broadcast(text)
        return kind, bytes(text.cpu().numpy()), used

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor, by rank."""
        out = [torch.empty_like(tensor) for _ in range(self.size)]
        with _named(f"the end of a transfer, seen by rank {self.rank}"):
            self._group.allgather([out], [tensor]).wait()
        return out

    def close(self) -> None:
        """Leave."""
        with contextlib.suppress(AttributeError):
            self._group.shutdown()
        del self._group, self._store


def _process_group(
    backend: str, store: dist.Store, rank: int, size: int, limit: timedelta, address: str
) -> dist.ProcessGroup:
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = limit
        return dist.ProcessGroupGloo(store, rank, size, options)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, options)
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None:
        raise WeightSyncError(
            f"weight sync: torch here has no collectives named {backend!r}: install the device's torch package, or set "
            "actor_rollout_ref.rollout.checkpoint_engine.backend=naive"
        )
    common = dist.distributed_c10d._DistributedBackendOptions()
    common.store, common.group_rank, common.group_size, common.timeout = store, rank, size, limit
    common.group_id, common.global_ranks_in_group = "weights", list(range(size))
    return plugin.creator_fn(common, None)


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        if isinstance(error, WeightSyncError):
            raise
        raise WeightSyncError(f"weight sync: {what}: {error}") from error


def broadcast(
    group: WeightGroup,
    weights: Iterable[tuple[str, torch.Tensor]],
    version: int,
    *,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
    channel: str = "",
    readers: int = 0,
    expected: Sequence[Identity] = (),
    timeout: float = TIMEOUT,
) -> SyncResult:
    """Rank 0's side: weights to the relays, and to the `readers` of this host on `channel`, if any.

    The other ranks call `relay` meanwhile. As with `BucketSender.send`, `weights` is used up whatever happens, and
    WeightSyncError names the host that failed. Returns when all samplers of all hosts have everything.
    """
    started = time.monotonic()
    size = buckets.bucket_size(bucket_bytes)
    sink = _Broadcast(group)
    try:
        group.announce(_BEGIN, json.dumps([version, size]).encode())
        with _local(channel, readers, expected, size, version, timeout) as local:
            sink.host = _Host(group, size, local)
            moved = Copier(sink, dtype, size, threaded=group.on_host).run(weights)
            sink.end(_DONE)
            if local is not None:
                local.finish()
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(WeightSyncError):  # what came first is raised
            sink.end(_FAILED, reason)
            _agree(group, reason)
        raise
    _agree(group, "")
    return SyncResult(bytes=moved, seconds=time.monotonic() - started)


def relay(
    group: WeightGroup,
    channel: str,
    readers: int,
    *,
    expected: Sequence[Identity] = (),
    timeout: float = TIMEOUT,
) -> SyncResult:
    """A relay's side of one `broadcast`: what comes goes to the `readers` of this host on `channel`, the processes
    `expected`.

    A reader that fails does not keep the other hosts from getting their buckets; after the last one every rank raises
    WeightSyncError with its name. `bytes` counts the gaps between tensors too.
    """
    started = time.monotonic()
    version, size = json.loads(group.hear()[1])
    error, moved = "", 0
    try:
        with (
            _Incoming(group, size) as incoming,
            _local(channel, readers, expected, size, version, timeout) as local,
        ):
            host = _Host(group, size, local)
            for header, used in incoming.announced():
                room = host.room()
                host.reserve(used)
                incoming.receive(room)
                host.publish(header, used)
                moved += used
            if local is not None:
                local.finish()
    except Exception as caught:  # told to every rank, and raised here by _agree
        error = str(caught) if isinstance(caught, WeightSyncError) else f"{type(caught).__name__}: {caught}"
    _agree(group, error)
    return SyncResult(bytes=moved, seconds=time.monotonic() - started)


def _local(
    channel: str, readers: int, expected: Sequence[Identity], size: int, version: int, timeout: float
) -> AbstractContextManager[SharedMemorySink | None]:
    if not readers:
        return nullcontext()
    return SharedMemorySink(channel, readers, size, version, timeout=timeout, expected=expected)


class _Host(buckets.Sink):
    """Buckets on one host: in the memory that its readers read, or in a buffer of the device that is copied there."""

    def __init__(self, group: WeightGroup, size: int, local: SharedMemorySink | None):
        self._local, self._direct = local, local is not None and group.on_host
        self._buffer = None if self._direct else torch.empty(size, dtype=torch.uint8, device=group.device)

    def room(self) -> torch.Tensor:
        """See Sink.room."""
        if self._buffer is not None:
            return self._buffer
        assert self._local is not None
        return self._local.room()

    def reserve(self, upto: int) -> None:
        """See Sink.reserve."""
        if self._direct and self._local is not None:
            self._local.reserve(upto)

    def publish(self, header: bytes, used: int) -> None:
        """See Sink.publish."""
        if self._local is None:
            return
        if self._buffer is not None:
            room = self._local.room()
            self._local.reserve(used)
            room[:used].copy_(self._buffer[:used])
        self._local.publish(header, used)


class _Broadcast(buckets.Sink):
    """Rank 0's side: buckets of this host to the relays, then to its readers."""

    host: _Host

    def __init__(self, group: WeightGroup):
        self._group = group
        self._open = True

    def room(self) -> torch.Tensor:
        """See Sink.room."""
        self._room = self.host.room()
        return self._room

    def reserve(self, upto: int) -> None:
        """See Sink.reserve."""
        self.host.reserve(upto)

    def publish(self, header: bytes, used: int) -> None:
        """See Sink.publish. Readers of this host get the bucket when the relays have it."""
        # An error in the middle leaves the relays with half a bucket: nothing more can be said.
        self._open = False
        self._group.announce(_BUCKET, header, used)
        self._group.broadcast(self._room[:used])
        self._open = True
        self.host.publish(header, used)

    def end(self, kind: int, reason: str = "") -> None:
        """No more buckets: all are sent, or something failed because of `reason`."""
        if self._open:
            self._open = False
            self._group.announce(kind, reason.encode()[:_TEXT])


class _Incoming:
    """Rank 0's buckets, as a relay receives them. As a context: to the end, even when the host's readers fail on the way."""

    def __init__(self, group: WeightGroup, size: int):
        self._group, self._size = group, size
        self._pending, self._ended = 0, False

    def __enter__(self) -> _Incoming:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not self._ended:
            scratch = torch.empty(self._size, dtype=torch.uint8, device=self._group.device)
            self.receive(scratch)
            for _ in self.announced():
                self.receive(scratch)

    def announced(self) -> Iterator[tuple[bytes, int]]:
        """(header, bytes) of each bucket that comes next; `receive` it before the next."""
        while not self._ended:
            kind, text, self._pending = self._group.hear()
            self._ended = kind != _BUCKET
            if kind == _FAILED:
                reason = text.decode(errors="replace")
                raise WeightSyncError(f"weight sync: the sender of the broadcast failed: {reason}")
            if kind == _BUCKET:
                yield text, self._pending

    def receive(self, room: torch.Tensor) -> None:
        """The bytes that were announced and have not been received."""
        used, self._pending = self._pending, 0
        self._group.broadcast(room[:used])


def _text(text: bytes, size: int, device: torch.device) -> torch.Tensor:
    padded = torch.zeros(size, dtype=torch.uint8)
    if text:
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return padded.to(device)


def _agree(group: WeightGroup, error: str) -> None:
    """End of a transfer: every rank says how it went. Raises WeightSyncError with the first failure."""
    try:
        reports = group.gather(_text(error.encode()[:_TEXT], _TEXT, group.device))
    except WeightSyncError as broken:
        raise WeightSyncError(error or str(broken)) from broken
    for rank, report in enumerate(reports):
        text = bytes(report.cpu().numpy()).rstrip(b"\0").decode(errors="replace")
        if text:
            where = "the sender" if rank == 0 else f"the relay of rank {rank}"
            raise WeightSyncError(text if rank == group.rank else f"weight sync: {where} failed: {text}")
