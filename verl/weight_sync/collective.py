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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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

_BUCKET, _DONE, _FAILED = 0, 1, 2
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
        """Rank 0's contiguous tensor to everybody, in place. WeightSyncError if a rank is gone or too late."""
        if not tensor.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with _named(f"broadcast to {self.size - 1} relays, seen by rank {self.rank}"):
            self._group.broadcast([tensor], options).wait()

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
    if plugin.extended_api:
        common = dist.distributed_c10d._DistributedBackendOptions()
        common.store, common.group_rank, common.group_size, common.timeout = store, rank, size, limit
        common.group_id, common.global_ranks_in_group = "weights", list(range(size))
        return plugin.creator_fn(common, None)
    return plugin.creator_fn(store, rank, size, limit)


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
    sink = _Broadcast(group, size, version)
    try:
        with _local(channel, readers, expected, size, version, timeout) as local:
            sink.share(local)
            moved = Copier(sink, dtype, size, threaded=group.on_host).run(weights)
            sink.end()
            if local is not None:
                local.finish()
    except BaseException as error:
        sink.fail(f"{type(error).__name__}: {error}")
        with contextlib.suppress(WeightSyncError):  # what came first is raised
            _agree(group, f"{type(error).__name__}: {error}")
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
    version, size, _ = _receive_numbers(group)
    error, moved = "", 0
    try:
        where = (channel, readers, expected, size, version, timeout)
        moved = _Relay(group, size).run(lambda: _local(*where))
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


class _Broadcast(buckets.Sink):
    """Buckets to the relays, and to a local sink, whose memory they are sent from where that is possible."""

    def __init__(self, group: WeightGroup, size: int, version: int):
        self._group, self._size = group, size
        self._local: SharedMemorySink | None = None
        self._buffer: torch.Tensor | None = None
        self._room: torch.Tensor | None = None
        self._open = True
        _send_numbers(group, version, size, 0)

    def share(self, local: SharedMemorySink | None) -> None:
        """Feed `local` too."""
        self._local = local
        if local is None or not self._group.on_host:
            self._buffer = torch.empty(self._size, dtype=torch.uint8, device=self._group.device)

    def room(self) -> torch.Tensor:
        """See Sink.room."""
        self._room = self._local.room() if self._local is not None and self._buffer is None else self._buffer
        assert self._room is not None
        return self._room

    def reserve(self, upto: int) -> None:
        """See Sink.reserve."""
        if self._local is not None and self._buffer is None:
            self._local.reserve(upto)

    def publish(self, header: bytes, used: int) -> None:
        """See Sink.publish. Samplers of this host get the bucket when the relays have it."""
        assert self._room is not None
        self._open = (
            False  # an error in the middle leaves the relays with half a bucket: nothing more can be said
        )
        _send_numbers(self._group, _BUCKET, len(header), used)
        self._group.broadcast(_text(header, len(header), self._group.device))
        self._group.broadcast(self._room[:used])
        self._open = True
        if self._local is not None:
            if self._buffer is not None:
                _copy(self._buffer[:used], self._local)
            self._local.publish(header, used)

    def end(self) -> None:
        """No more buckets."""
        self._open = False
        _send_numbers(self._group, _DONE, 0, 0)

    def fail(self, reason: str) -> None:
        """No more buckets, because of `reason`."""
        if self._open:
            text = reason.encode()[:_TEXT]
            with contextlib.suppress(WeightSyncError):  # the group broke; the caller raises what came first
                _send_numbers(self._group, _FAILED, len(text), 0)
                self._group.broadcast(_text(text, len(text), self._group.device))


def _copy(data: torch.Tensor, local: SharedMemorySink) -> None:
    room = local.room()
    local.reserve(data.numel())
    room[: data.numel()].copy_(data)


class _Relay:
    """Receives one transfer to its end, even when the host's readers fail on the way."""

    def __init__(self, group: WeightGroup, size: int):
        self._group, self._size = group, size
        self._scratch: torch.Tensor | None = None
        self._ended = False

    def run(self, open_local: Callable[[], AbstractContextManager[SharedMemorySink | None]]) -> int:
        """Bytes received. Raises what the host's side or the sender raised, after the last bucket."""
        try:
            with open_local() as local:
                moved = sum(self._to(local, header, used) for header, used in self._announced())
                if local is not None:
                    local.finish()
            return moved
        except Exception:
            if not self._ended:
                for _, used in self._announced():
                    self._group.broadcast(self._spare()[:used])
            raise

    def _announced(self) -> Iterator[tuple[bytes, int]]:
        """(header, bytes) of each bucket that comes next; its bytes are to be received by the caller."""
        group = self._group
        while True:
            kind, length, used = _receive_numbers(group)
            text = torch.empty(length, dtype=torch.uint8, device=group.device)
            group.broadcast(text)
            if kind != _BUCKET:
                self._ended = True
            if kind == _FAILED:
                reason = bytes(text.cpu().numpy()).decode(errors="replace")
                raise WeightSyncError(f"weight sync: the sender of the broadcast failed: {reason}")
            if kind == _DONE:
                return
            yield bytes(text.cpu().numpy()), used

    def _to(self, local: SharedMemorySink | None, header: bytes, used: int) -> int:
        """Receive an announced bucket and hand it on."""
        room: torch.Tensor | None = None
        try:
            if local is not None and self._group.on_host:
                room = local.room()
                local.reserve(used)
        except Exception:
            self._group.broadcast(self._spare()[:used])
            raise
        target = room if room is not None else self._spare()
        self._group.broadcast(target[:used])
        if local is not None:
            if room is None:
                _copy(target[:used], local)
            local.publish(header, used)
        return used

    def _spare(self) -> torch.Tensor:
        if self._scratch is None:
            self._scratch = torch.empty(self._size, dtype=torch.uint8, device=self._group.device)
        return self._scratch


def _send_numbers(group: WeightGroup, *numbers: int) -> None:
    group.broadcast(torch.tensor(numbers, dtype=torch.int64, device=group.device))


def _receive_numbers(group: WeightGroup) -> tuple[int, int, int]:
    numbers = torch.zeros(3, dtype=torch.int64, device=group.device)
    group.broadcast(numbers)
    first, second, third = numbers.tolist()
    return int(first), int(second), int(third)


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
