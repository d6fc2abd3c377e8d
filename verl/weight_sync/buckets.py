"""Named tensors ↔ buckets: flat bytes of at most a given size, with a JSON header that says what lies where.

    (name, tensor) ── pack ──▶ header, bytes ── any transport ──▶ header, bytes ── unpack ──▶ (name, tensor)

A tensor that does not fit into what is left of a bucket goes on in the next one, in slices, so no side ever needs
room for more than its buckets, and the receiver for one tensor that came in slices. Nothing here is executed or
unpickled: a header is JSON, checked against the bucket's size before a byte is read.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Queue

import torch

from verl.platform import platform_of
from verl.weight_sync.verify import Weights, WeightSyncError

ALIGN = 64
"""Every part starts at a multiple of this many bytes: any data type can be viewed in place."""

HEADER_BYTES = 1 << 18
"""Most bytes of a bucket's header; a bucket of very many small tensors is closed when its header is full."""

_HUGE = 4 << 20  # bytes from which on huge pages are worth asking for

_FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_OTHERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in (*_FLOATS, *_OTHERS)}


@dataclass(frozen=True, slots=True)
class Part:
    """Elements start … start + count of the tensor `name`, at byte `offset` of the bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    count: int
    offset: int

    @property
    def size(self) -> int:
        """Bytes in the bucket."""
        return self.count * self.dtype.itemsize

    @property
    def whole(self) -> bool:
        """The tensor's only part."""
        return self.count == math.prod(self.shape)


def bucket_size(wanted: int) -> int:
    """`wanted` bytes as a bucket can have them: a multiple of ALIGN."""
    return -(-wanted // ALIGN) * ALIGN


def converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The data type `tensor` travels in: `dtype` for floating point ones, its own for others or when None."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


class Sink(ABC):
    """Where `pack` puts buckets: one at a time is filled, then published."""

    @abstractmethod
    def room(self) -> torch.Tensor:
        """The next empty bucket, uint8 [bucket size, a multiple of ALIGN]; waits until one is free."""

    @abstractmethod
    def publish(self, header: bytes, used: int) -> None:
        """The bucket that `room` gave is full: `used` bytes, described by `header`."""

    def reserve(self, upto: int) -> None:  # noqa: B027
        """The bucket's bytes below `upto` are about to be written."""

    def early(self, used: int) -> bool:
        """True to publish now, with `used` bytes, instead of filling the bucket."""
        return False


class _Filling:
    """A bucket being filled."""

    def __init__(self, sink: Sink):
        self._sink = sink
        self.room = sink.room()
        self.used = 0
        self._entries: list[str] = []
        self._header = 2

    def add(self, name: str, flat: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Copy as many elements of `flat` from `start` as fit; returns how many, -1 if not even a part fits.

        A tensor that an empty bucket could hold is not cut: the receiver can then use it where it lies.
        """
        offset = -(-self.used // ALIGN) * ALIGN
        remaining = flat.numel() - start
        count = min(remaining, max(0, self.room.numel() - offset) // dtype.itemsize)
        cut = count < remaining
        if cut and (count == 0 or (self._entries and remaining * dtype.itemsize <= self.room.numel())):
            return -1
        entry = json.dumps([name, _name(dtype), list(shape), start, count, offset])
        if self._header + len(entry) + 1 > HEADER_BYTES:
            if not self._entries:
                raise WeightSyncError(f"a weight's name is too long ({len(name)} characters)")
            return -1
        self._entries.append(entry)
        self._header += len(entry) + 1
        self.used = offset + count * dtype.itemsize
        if count:
            self._sink.reserve(self.used)
            self.room[offset : self.used].view(dtype).copy_(flat[start : start + count])
        return count

    def publish(self) -> None:
        """Hand it over. The header is ASCII JSON: a list of [name, dtype, shape, start, count, offset]."""
        self._sink.publish(f"[{','.join(self._entries)}]".encode("ascii"), self.used)


@torch.no_grad()
def pack(weights: Weights, sink: Sink, *, dtype: torch.dtype | None = None) -> int:
    """Copy weights into the sink's buckets; returns the bytes of all tensors as they travelled.

    dtype: what floating point weights are converted to on the way; None leaves them. `weights` is used up even when the
    sink fails: gathering them may be a collective in which other ranks wait.
    """
    stream, moved = iter(weights), 0
    filling: _Filling | None = None
    try:
        for name, tensor in stream:
            kind = converted(tensor, dtype)
            if _name(kind) not in _DTYPES:
                raise WeightSyncError(f"{name} has data type {kind}, which does not travel")
            flat, shape = tensor.detach().reshape(-1), tuple(tensor.shape)
            moved += flat.numel() * kind.itemsize
            start, complete = 0, False
            while not complete:
                filling = filling or _Filling(sink)
                count = filling.add(name, flat, start, shape, kind)
                start += max(count, 0)
                complete = count >= 0 and start == flat.numel()
                if not complete or sink.early(filling.used):
                    filling.publish()
                    filling = None
        if filling is not None:
            filling.publish()
        return moved
    finally:
        for _ in stream:
            continue


def pack_while_gathering(weights: Weights, sink: Sink, *, dtype: torch.dtype | None = None) -> int:
    """`pack` in a thread of its own, while the caller's thread gathers the next tensor. One gathered tensor waits."""
    gathered: Queue[tuple[str, torch.Tensor] | None] = Queue(maxsize=1)
    with ThreadPoolExecutor(1, "weight-sync-copy") as thread:
        packing = thread.submit(pack, iter(gathered.get, None), sink, dtype=dtype)
        try:
            for item in weights:
                gathered.put(item)
        finally:
            gathered.put(None)
    return packing.result()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parse(header: bytes, size: int) -> list[Part]:
    """The parts of a bucket of `size` bytes. Raises WeightSyncError for a header that cannot be right."""
    try:
        entries = json.loads(header)
        parts = [Part(n, _DTYPES[d], tuple(map(int, s)), int(a), int(c), int(o)) for n, d, s, a, c, o in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightSyncError(f"a bucket's header cannot be read ({error})") from error
    for part in parts:
        total = math.prod(part.shape)
        inside = 0 <= part.offset <= part.offset + part.size <= size and part.offset % ALIGN == 0
        exist = 0 <= part.start <= part.start + part.count <= total and (part.count or not total)
        if not (inside and exist and min(part.shape, default=0) >= 0):
            text = "names bytes outside it, or elements that do not exist"
            raise WeightSyncError(f"a bucket's header {text} ({part})")
    return parts


def _whole(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room for a tensor that comes in slices. In host memory in huge pages where the kernel has them: it is new memory
    in every transfer, and faulting an embedding in by small pages took half of the reader's time."""
    size = math.prod(shape) * dtype.itemsize
    if not platform_of(device).on_host or size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def unpack(buckets: Iterable[tuple[bytes, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of buckets (header, uint8 bytes), in the order they were packed.

    A tensor is a view of its bucket, valid until the next tensor is asked for; one that came in slices is put
    together in memory of its own. Raises WeightSyncError when slices are missing or out of order.
    """
    name, joined, filled = "", None, 0
    for header, data in buckets:
        for part in parse(header, data.numel()):
            values = data[part.offset : part.offset + part.size].view(part.dtype)
            if joined is None and part.whole:
                yield part.name, values.view(part.shape)
                continue
            if joined is None:
                name, filled = part.name, 0
                joined = _whole(part.shape, part.dtype, data.device)
            if (part.name, part.start) != (name, filled) or part.dtype != joined.dtype:
                raise WeightSyncError(f"element {filled} of {name} was due, {part.start} of {part.name} came")
            joined.view(-1)[filled : filled + part.count].copy_(values)
            filled += part.count
            if filled == joined.numel():
                yield name, joined
                joined = None
    if joined is not None:
        raise WeightSyncError(f"the stream ended after {filled} of {joined.numel()} elements of {name}")
