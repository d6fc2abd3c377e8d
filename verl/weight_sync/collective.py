"""Weights between hosts: one broadcast to a relay per host, which feeds the shared memory of its host.

    training rank 0 ── pack ──▶ bucket ══ broadcast ══▶ relay of host 1 ── shared memory ──▶ its samplers
                                   ║                └═▶ relay of host 2 ── shared memory ──▶ its samplers
                                   └── shared memory ──▶ samplers of rank 0's own host

A bucket is filled in the memory that the samplers of the root's host read, sent from there, and received in the memory
that the samplers of the other host read: nothing is copied in between (over gloo; over a device's library it goes
through one buffer on the device). While a relay's samplers load a bucket, the next one is on its way. With
`SentBuckets` on every side only what changed in a bucket travels (`verl.weight_sync.delta`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verl.platform import Platform, platform_of
from verl.platform.network import address_towards, listen, time_limit
from verl.weight_sync import buckets
from verl.weight_sync.channel import TIMEOUT, Channel, SharedMemorySink
from verl.weight_sync.delta import SentBuckets
from verl.weight_sync.verify import SyncResult, WeightSyncError

_BEGIN, _BUCKET, _CHANGES, _DONE, _FAILED = range(5)
_TEXT = 1024
DELTA = "delta_sharded"
"""The backend that sends what changed, through host memory."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one broadcast meet: rank 0's address and a free port on it, and how many they are.

    timeout: seconds for the rendezvous and for each collective of the group.
    """

    address: str
    port: int
    size: int
    timeout: float = TIMEOUT

    def join(self, rank: int, backend: str, platform: Platform) -> WeightGroup:
        """The group as that rank. backend: `checkpoint_engine.backend`; `naive` and `delta_sharded` go through host
        memory."""
        if backend in ("naive", DELTA) or platform.on_host:
            return WeightGroup(rank, self)
        return WeightGroup(rank, self, backend, platform.device())


class WeightGroup:
    """The ranks between which weights travel: rank 0 sends, the others are relays. No part of the training's groups.

    rendezvous: where they meet; rank 0 listens there only. backend: gloo (host memory), nccl or hccl (device memory;
    `device` is this rank's). nccl and hccl are written from the libraries' documentation and have never run.
    Raises WeightSyncError when the ranks do not meet in time.
    """

    def __init__(
        self,
        rank: int,
        rendezvous: Rendezvous,
        backend: str = "gloo",
        device: torch.device = torch.device("cpu"),
    ):
        self.rank, self.size = rank, rendezvous.size
        self.device = device
        self.on_host = platform_of(self.device).on_host
        self._told = 0
        limit, where = time_limit(rendezvous.timeout), (rendezvous.address, rendezvous.port)
        with _named(f"rank {rank} of {self.size} cannot meet the others at {where[0]}:{where[1]}"):
            self._store = dist.TCPStore(
                *where,
                self.size,
                is_master=rank == 0,
                timeout=limit,
                wait_for_workers=False,
                master_listen_fd=listen(*where) if rank == 0 else None,
            )
            store = dist.PrefixStore("weights", self._store)
            self._group = _process_group(backend, store, rank, self.size, limit, address_towards(*where))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's contiguous tensor to all ranks, in place. WeightSyncError if a rank is gone or too late."""
        if not tensor.numel():
            return
        with _named(f"broadcast to {self.size - 1} relays, seen by rank {self.rank}"):
            self._group.broadcast(tensor, 0).wait()

    def announce(self, kind: int, text: str = "", used: int = 0) -> None:
        """Rank 0 says what comes: a kind, a text, and how many bytes of a bucket follow."""
        self._store.set(f"told/{self._told}", json.dumps([kind, text, used]))
        self._told += 1

    def next_announcement(self) -> tuple[int, str, int]:
        """What rank 0 tells next."""
        with _named(f"the sender is gone, seen by rank {self.rank}"):
            kind, text, used = json.loads(self._store.get(f"told/{self._told}"))
        self._told += 1
        return kind, text, used

    def gather(self, text: str) -> list[str]:
        """The text of every rank, cut to so many bytes, by rank."""
        content = bytearray(text.encode()[:_TEXT].ljust(_TEXT, b"\0"))
        encoded = torch.frombuffer(content, dtype=torch.uint8)
        out = [torch.empty_like(encoded, device=self.device) for _ in range(self.size)]
        with _named(f"the end of a transfer, seen by rank {self.rank}"):
            self._group.allgather([out], [encoded.to(self.device)]).wait()
        return [bytes(part.tolist()).rstrip(b"\0").decode(errors="replace") for part in out]

    def close(self) -> None:
        """Leave."""
        with contextlib.suppress(AttributeError):
            self._group.shutdown()
        del self._group, self._store


def _process_group(backend: str, store: dist.Store, rank: int, size: int, limit: timedelta, address: str) -> Any:
    """A `torch.distributed.ProcessGroup` of its own."""
    options: Any
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = limit
        return dist.ProcessGroupGloo(store, rank, size, options)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        with _waits_that_raise():
            return dist.ProcessGroupNCCL(store, rank, size, options)
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None:
        raise WeightSyncError(
            f"torch here has no collectives named {backend!r}: install the device's torch package, or set "
            "actor_rollout_ref.rollout.checkpoint_engine.backend=naive"
        )
    common = dist.distributed_c10d._DistributedBackendOptions()
    common.store, common.group_rank, common.group_size, common.timeout = store, rank, size, limit
    common.group_id, common.global_ranks_in_group = "weights", list(range(size))
    return plugin.creator_fn(common, None)


@contextmanager
def _waits_that_raise() -> Iterator[None]:
    """A group made in this block raises from `wait` where a rank is lost; by default torch's watchdog ends the
    process."""
    wanted = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def _named(operation: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        if isinstance(error, WeightSyncError):
            raise
        raise WeightSyncError(f"{operation}: {error}") from error


def broadcast(
    group: WeightGroup,
    weights: buckets.Weights,
    version: int,
    *,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
    channel: Channel | None = None,
    last: SentBuckets | None = None,
) -> SyncResult:
    """Rank 0's side: weights to the relays, and to the readers of this host on `channel`, if any.

    The other ranks call `relay` meanwhile. As with `BucketSender.send`, `weights` is used up whatever happens, and
    WeightSyncError names the host that failed. Returns when all samplers of all hosts have everything. last: of the
    last transfer; only what changed since travels, and `bytes` counts what is broadcast.
    """
    started = time.monotonic()
    size = buckets.bucket_size(bucket_bytes)
    token = "" if last is None else secrets.token_hex(8)
    group.announce(_BEGIN, json.dumps([version, size, token]))
    _same_start(group, last)
    try:
        with nullcontext() if channel is None else SharedMemorySink(channel, size, version) as local:
            sink = _Broadcast(group, _place(group, size, local), last)
            pack = buckets.pack_while_gathering if group.on_host else buckets.pack
            moved = pack(weights, sink, dtype=dtype)
            group.announce(_DONE)
            if local is not None:
                local.finish()
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(WeightSyncError):  # what came first is raised
            group.announce(_FAILED, reason)
            _agree(group, reason)
        raise
    _agree(group, "")
    if last is not None:
        last.token = token
    return SyncResult(bytes=moved if last is None else sink.sent, seconds=time.monotonic() - started)


def relay(group: WeightGroup, channel: Channel, last: SentBuckets | None = None) -> SyncResult:
    """A relay's side of one `broadcast`: what comes goes to the readers of this host on `channel`.

    A reader that fails does not keep the other hosts from getting their buckets; after the last one every rank raises
    WeightSyncError with its name. `bytes` counts the gaps between tensors too. last: where the sender has one.
    """
    started = time.monotonic()
    version, size, token = json.loads(group.next_announcement()[1])
    _same_start(group, last)
    incoming = _Incoming(group, last)
    error, moved = "", 0
    try:
        with SharedMemorySink(channel, size, version) as local:
            here = _place(group, size, local)
            for header, used in incoming:
                room = here.room()
                here.reserve(used)
                incoming.receive(room)
                here.publish(header, used)
                moved += used
            local.finish()
    except Exception as caught:  # told to every rank, and raised here by _agree
        error = str(caught) if isinstance(caught, WeightSyncError) else f"{type(caught).__name__}: {caught}"
        incoming.drain(size)
    _agree(group, error)
    if last is not None:
        last.token = token
    return SyncResult(bytes=moved, seconds=time.monotonic() - started)


def _same_start(group: WeightGroup, last: SentBuckets | None) -> None:
    """Forget the last transfer's buckets where one of the ranks has others, or none. A transfer that fails leaves
    none."""
    if last is not None:
        tokens = group.gather(last.token)
        if not last.token or len(set(tokens)) > 1:
            last.forget()
        last.token = ""


def _place(group: WeightGroup, size: int, local: SharedMemorySink | None) -> buckets.Sink:
    """Where buckets lie on this host: in the memory that its readers read, or in a buffer that is copied there."""
    if local is not None and group.on_host:
        return local
    # zeros: what lies between tensors is the same in every transfer, too
    return _Buffer(torch.zeros(size, dtype=torch.uint8, device=group.device), local)


class _Buffer(buckets.Sink):
    """One bucket outside of shared memory: on a device, or on a host without readers."""

    def __init__(self, buffer: torch.Tensor, local: SharedMemorySink | None):
        self._buffer, self._local = buffer, local

    def room(self) -> torch.Tensor:
        """See Sink.room."""
        return self._buffer

    def publish(self, header: bytes, used: int) -> None:
        """See Sink.publish."""
        if self._local is not None:
            room = self._local.room()
            self._local.reserve(used)
            room[:used].copy_(self._buffer[:used])
            self._local.publish(header, used)


class _Broadcast(buckets.Sink):
    """Rank 0's side: buckets to the relays, then to the readers of this host. sent: bytes that were broadcast."""

    def __init__(self, group: WeightGroup, here: buckets.Sink, last: SentBuckets | None):
        self._group, self._here, self._last = group, here, last
        self._number = self.sent = 0

    def room(self) -> torch.Tensor:
        """See Sink.room."""
        self._room = self._here.room()
        return self._room

    def reserve(self, upto: int) -> None:
        """See Sink.reserve."""
        self._here.reserve(upto)

    def publish(self, header: bytes, used: int) -> None:
        """See Sink.publish."""
        bucket = self._room[: used + used % 2]  # whole words; a room's size is even
        changes = None if self._last is None else self._last.changes(self._number, header, bucket)
        sent = bucket if changes is None else changes
        self._group.announce(_BUCKET if changes is None else _CHANGES, header.decode("ascii"), sent.numel())
        self._group.broadcast(sent)
        self._here.publish(header, bucket.numel())
        self._number, self.sent = self._number + 1, self.sent + sent.numel()


class _Incoming:
    """Rank 0's buckets, as a relay receives them: (header, bytes) of each; `receive` it before the next."""

    def __init__(self, group: WeightGroup, last: SentBuckets | None):
        self._group, self._last, self._ended = group, last, False
        self._number, self._pending, self._header, self._changes = -1, 0, b"", False

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        while not self._ended:
            kind, text, self._pending = self._group.next_announcement()
            if kind == _FAILED:
                self._ended = True
                raise WeightSyncError(f"the sender of the broadcast failed: {text}")
            if kind == _DONE:
                self._ended = True
                return
            self._number, self._header, self._changes = self._number + 1, text.encode("ascii"), kind == _CHANGES
            yield self._header, self._used()

    def _used(self) -> int:
        if self._changes:
            assert self._last is not None
            return 2 * self._last.words(self._number).numel()
        return self._pending

    def receive(self, room: torch.Tensor) -> None:
        """Fill the room with the bucket that was announced and has not been received."""
        used, self._pending = self._pending, 0
        if not self._changes:
            self._group.broadcast(room[:used])
            if self._last is not None:
                self._last.store(self._number, self._header, room[:used])
            return
        assert self._last is not None
        changes = torch.empty(used, dtype=torch.uint8)
        self._group.broadcast(changes)
        bucket = self._last.apply(self._number, changes)
        room[: bucket.numel()].copy_(bucket)

    def drain(self, size: int) -> None:
        """To the end, after the readers of this host have failed: the other hosts are to get their buckets."""
        if not self._ended:
            scratch = torch.empty(size, dtype=torch.uint8, device=self._group.device)
            if self._pending:
                self.receive(scratch)
            for _ in self:
                self.receive(scratch)


def _agree(group: WeightGroup, error: str) -> None:
    """End of a transfer: every rank says how it went. Raises WeightSyncError with the first failure."""
    try:
        reports = group.gather(error)
    except WeightSyncError as broken:
        raise WeightSyncError(error or str(broken)) from broken
    for rank, text in enumerate(reports):
        if text:
            where = "the sender" if rank == 0 else f"the relay of rank {rank}"
            raise WeightSyncError(text if rank == group.rank else f"{where} failed: {text}")
