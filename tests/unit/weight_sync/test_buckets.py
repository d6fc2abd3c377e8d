"""Buckets: what is packed comes out the same, whatever the sizes; a bucket is never overfilled; bad headers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.weight_sync import buckets
from verl.weight_sync.verify import WeightSyncError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool)


class Kept(buckets.Sink):
    """Keeps a copy of every bucket."""

    def __init__(self, size: int, early: int | None = None):
        self.size, self.at, self.kept = buckets.bucket_size(size), early, []
        self.reserved = 0

    def room(self) -> torch.Tensor:
        self.reserved = 0
        self.buffer = torch.full((self.size,), 255, dtype=torch.uint8)
        return self.buffer

    def reserve(self, upto: int) -> None:
        assert upto <= self.size
        self.reserved = max(self.reserved, upto)

    def early(self, used: int) -> bool:
        return self.at is not None and used >= self.at

    def publish(self, header: bytes, used: int) -> None:
        assert used - buckets.ALIGN < self.reserved or used == 0  # an empty tensor at the end moves `used` only
        self.kept.append((header, self.buffer[:used].clone()))


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-100, 100, shape, generator=generator)
    return values > 0 if dtype == torch.bool else values.to(dtype)


SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=8)


@settings(max_examples=150, deadline=None)
@given(tensors=TENSORS, size=st.integers(1, 700), early=st.none() | st.integers(0, 300))
def test_what_goes_in_comes_out(
    tensors: list[tuple[tuple[int, ...], torch.dtype]], size: int, early: int | None
) -> None:
    given_ = [(f"w{i}", make(shape, dtype, i)) for i, (shape, dtype) in enumerate(tensors)]
    sink = Kept(size, early)
    moved = buckets.pack(given_, sink)
    assert moved == sum(t.numel() * t.element_size() for _, t in given_)
    got = [(name, tensor.clone()) for name, tensor in buckets.unpack(sink.kept)]
    assert [name for name, _ in got] == [name for name, _ in given_]
    for (_, a), (_, b) in zip(given_, got, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("refused", [False, True])
def test_large_tensors_are_put_together_in_memory_of_their_own(
    dtype: torch.dtype, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if refused:  # a kernel without huge pages responses EINVAL
        monkeypatch.setattr(buckets.mmap, "MADV_HUGEPAGE", -1)
    given_ = [("a", make((129, 32768), dtype, 1)), ("b", make((128, 32769), dtype, 2))]
    sink = Kept(1 << 20)
    buckets.pack(given_, sink)
    got = dict(buckets.unpack(sink.kept))  # kept past the next one: they are no views of a bucket
    for name, tensor in given_:
        assert got[name].dtype == dtype and got[name].shape == tensor.shape
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8))


def test_tensors_that_fit_an_empty_bucket_are_not_cut() -> None:
    sink = Kept(1024)
    buckets.pack([("a", torch.ones(200)), ("b", torch.ones(200)), ("c", torch.ones(10))], sink)
    parts = [[p.name for p in buckets.parse(h, d.numel())] for h, d in sink.kept]
    assert parts == [["a"], ["b", "c"]]


def test_floating_point_weights_are_converted_and_others_are_not() -> None:
    weight, count = torch.randn(5, 7), torch.arange(3)
    sink = Kept(64)
    moved = buckets.pack([("w", weight), ("n", count)], sink, dtype=torch.bfloat16)
    got = {name: t.clone() for name, t in buckets.unpack(sink.kept)}
    assert moved == 35 * 2 + 3 * 8
    assert torch.equal(got["w"], weight.bfloat16()) and torch.equal(got["n"], count)


def test_strided_tensors_travel_as_they_look() -> None:
    base = torch.arange(24.0).view(4, 6)
    sink = Kept(4096)
    buckets.pack([("t", base.T), ("s", base[:, ::2])], sink)
    got = {name: t.clone() for name, t in buckets.unpack(sink.kept)}
    assert torch.equal(got["t"], base.T) and torch.equal(got["s"], base[:, ::2])


def test_very_many_small_tensors_fill_the_header_first() -> None:
    names = [f"layer.{i}.{'x' * 200}" for i in range(3000)]
    sink = Kept(1 << 20)
    buckets.pack(((n, torch.ones(1)) for n in names), sink)
    assert len(sink.kept) > 1 and all(len(h) <= buckets.HEADER_BYTES for h, _ in sink.kept)
    assert [n for n, _ in buckets.unpack(sink.kept)] == names


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"nonsense", "cannot be read"),
        (b'[["w","float32",[2],0,2]]', "cannot be read"),
        (b'[["w","object",[2],0,2,0]]', "cannot be read"),
        (b'[["w","float32",[200],0,200,0]]', "outside"),
        (b'[["w","float32",[2],0,2,-64]]', "outside"),
        (b'[["w","float32",[2],0,2,3]]', "outside"),
        (b'[["w","float32",[2],1,2,0]]', "do not exist"),
        (b'[["w","float32",[2],0,0,0]]', "do not exist"),
    ],
)
def test_headers_that_cannot_be_right_are_refused(header: bytes, words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        buckets.parse(header, 256)


def test_missing_slices_are_noticed() -> None:
    sink = Kept(64)
    buckets.pack([("a", torch.ones(100))], sink)
    with pytest.raises(WeightSyncError, match="element 16 of a was due, 32 of a came"):
        list(buckets.unpack(sink.kept[:1] + sink.kept[2:]))
    with pytest.raises(WeightSyncError, match="ended after 16 of 100"):
        list(buckets.unpack(sink.kept[:1]))


def test_types_that_do_not_travel() -> None:
    with pytest.raises(WeightSyncError, match=r"z has data type torch.complex64"):
        buckets.pack([("z", torch.zeros(2, dtype=torch.complex64))], Kept(64))
