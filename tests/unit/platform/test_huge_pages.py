"""Large tensors of the host's memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from verl.platform import huge_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 3, 9000])  # of 512 numbers: nothing, less than a page, several and a part of one
def test_a_tensor_as_any_other(rows: int, dtype: torch.dtype) -> None:
    tensor = huge_pages.empty((rows, 512), dtype)
    assert tensor.shape == (rows, 512) and tensor.dtype == dtype and tensor.is_contiguous()
    tensor.copy_(torch.arange(rows)[:, None])
    assert torch.equal(tensor.float().amax(1), torch.arange(rows).to(dtype).float()) if rows else True


def test_memory_goes_with_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    memories = []
    memory = huge_pages.mmap.mmap

    class Watched(memory):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: object, **named: object) -> None:
            memories.append(weakref.ref(self))

    monkeypatch.setattr(huge_pages.mmap, "mmap", Watched)
    tensor = huge_pages.empty((huge_pages.SIZE,), torch.float32)
    assert memories and memories[0]() is not None
    del tensor
    gc.collect()
    assert memories[0]() is None
