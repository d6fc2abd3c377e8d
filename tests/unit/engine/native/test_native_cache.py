"""The cache's bookkeeping: nothing is lost, shared or overwritten, whatever comes and goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.engine.rollout.base import RecordedRoutes
from verl.engine.rollout.native.cache import KVBlockPool, KVCacheLayout, KVSlotTable
from verl.engine.rollout.native.prefill_plan import PrefillPlan, PrefillSpan
from verl.errors import UserError
from verl.models.attention import AttentionOptions
from verl.platform.cpu import CpuPlatform


def make(rows: int = 2, cols: int = 4, blocks: int = 12, slots: int = 6) -> tuple[KVBlockPool, KVSlotTable]:
    pool = KVBlockPool(KVCacheLayout(rows, cols, blocks), torch.device("cpu"), torch.float32, torch.float32)
    pool.layer(0, 1, 2, 2)
    return pool, KVSlotTable(pool, slots)


def write(pool: KVBlockPool, table: KVSlotTable, slot: int, begin: int, end: int, mark: float) -> None:
    rows, cols = table.token_rows(np.full(end - begin, slot), np.arange(begin, end))
    keys, values = pool.stored(0)
    keys.view(-1, pool.layout.cols, 2)[rows, cols] = mark
    values.view(-1, pool.layout.cols, 2)[rows, cols] = -mark


def read(pool: KVBlockPool, table: KVSlotTable, slot: int, length: int) -> np.ndarray:
    rows, cols = table.token_rows(np.full(length, slot), np.arange(length))
    return pool.stored(0)[0].view(-1, pool.layout.cols, 2)[rows, cols, 0].numpy()


@given(st.lists(st.tuples(st.sampled_from(["new", "grow", "end", "repack"]), st.integers(0, 30)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_sequences_keep_their_tokens(actions: list[tuple[str, int]]) -> None:
    pool, table = make()
    other = KVSlotTable(pool, 2, from_end=True)  # a second table on the same pool
    fixed = other.acquire()
    assert fixed is not None and other.reserve(fixed, 5)
    write(pool, other, fixed, 0, 5, 999.0)
    live: dict[int, list[float]] = {}
    mark = 0.0
    for action, number in actions:
        mark += 1.0
        if action == "new" and (slot := table.acquire()) is not None:
            assert slot not in live
            live[slot] = []
        elif action == "grow" and live:
            slot = sorted(live)[number % len(live)]
            length = len(live[slot]) + 1 + number % 5
            if table.reserve(slot, length):
                write(pool, table, slot, len(live[slot]), length, mark)
                live[slot] += [mark] * (length - len(live[slot]))
        elif action == "end" and live:
            slot = sorted(live)[number % len(live)]
            table.release(slot)
            del live[slot]
        elif action == "repack":
            used, needed = table.waste()
            moved = table.repack()
            assert sorted(moved) == sorted(live) and sorted(moved.values()) == list(range(len(live)))
            live = {moved[s]: v for s, v in live.items()}
            assert table.waste() == (needed, needed) and needed <= used
        for slot, marks in live.items():
            assert read(pool, table, slot, len(marks)).tolist() == marks
        owned = [t for b in (table, other) for block_row in b.blocks for t in block_row]
        assert len(set(owned)) == len(owned) == pool.layout.blocks - pool.free_blocks
    assert read(pool, other, fixed, 5).tolist() == [999.0] * 5


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    pool, table = make(blocks=2)
    a, b, c = table.acquire(), table.acquire(), table.acquire()
    assert a is not None and b is not None and c is not None
    assert table.reserve(a, 8) and table.reserve(b, 8)  # neighbours share their block_row's blocks
    before = [list(t) for t in table.blocks]
    assert not table.reserve(c, 1) and not table.reserve(a, 9)
    assert table.blocks == before
    table.release(a)
    assert pool.free_blocks == 0
    table.release(b)
    assert pool.free_blocks == 2 and table.reserve(c, 1)


def test_new_tiles_are_clean() -> None:
    """A block's stray bytes must not be NaN: a masked weight of 0 does not silence it."""
    pool = KVBlockPool(KVCacheLayout(1, 4, 3), torch.device("cpu"), torch.float32, torch.float32)
    keys, _ = pool.layer(0, 1, 2, 2)
    keys.fill_(float("nan"))
    block = pool.take()
    assert (keys[block] == 0).all()


@pytest.mark.parametrize(
    "tokens,length,seqs", [(100_000, 300, 256), (2_000, 300, 256), (400, 300, 8), (50_000, 40_000, 4)]
)
def test_geometry_holds_one_longest_sequence(tokens: int, length: int, seqs: int) -> None:
    g = KVCacheLayout.fit(tokens, length, seqs)
    assert g.rows * g.cols * g.blocks <= tokens
    for prompt in range(1, length):
        if -(-prompt // g.cols) + -(-(length - prompt) // g.cols) > g.blocks:
            pytest.fail(f"{g} cannot hold a prompt of {prompt} and its response")


def test_geometry_refuses_a_cache_that_is_too_small() -> None:
    with pytest.raises(UserError, match="cache of 100 tokens cannot hold one sequence of max_model_len=300"):
        KVCacheLayout.fit(100, 300, 8)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_prefill_is_one_call_of_a_device_kernel(monkeypatch: pytest.MonkeyPatch, earlier: bool) -> None:
    """Spans of prompts, and of responses after what the cache holds of them and of their prompts."""
    torch.manual_seed(0)
    half = torch.bfloat16
    pool = KVBlockPool(KVCacheLayout(1, 16, 16), torch.device("cpu"), half, half, paged=True)
    for tensor in pool.layer(0, 2, 24, 24):
        tensor.normal_()
    prompts, responses = KVSlotTable(pool, 4, from_end=True), KVSlotTable(pool, 4)
    slots, other = [prompts.acquire(40), prompts.acquire(9)], responses.acquire(30)
    assert None not in (*slots, other)
    spans = [PrefillSpan(prompts, slot, 0, [3] * n, RecordedRoutes()) for slot, n in zip(slots, (40, 9), strict=True)]
    if earlier:
        spans[1:] = [
            PrefillSpan(prompts, slots[1], 4, [3] * 5, RecordedRoutes()),
            PrefillSpan(responses, other, 20, [3] * 10, RecordedRoutes(), (prompts, slots[0], 40)),
        ]
    tokens, calls = sum(len(span.ids) for span in spans), []
    query, key, value = (torch.randn(1, h, tokens, 24).to(half) for h in (4, 2, 2))

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Any, scale: float) -> tuple[torch.Tensor]:
        calls.append(part)
        starts, out = [0, *part.query_ends], []
        for start, end, first, last in zip(starts, part.query_ends, [0, *part.key_ends], part.key_ends, strict=False):
            new, total = end - start, last - first
            seen = torch.ones(new, total, dtype=torch.bool).tril(total - new)
            parts = q[start:end], k[first:last], v[first:last]
            packed = (x.transpose(0, 1)[None] for x in parts)
            attend = torch.nn.functional.scaled_dot_product_attention
            out.append(attend(*packed, seen, scale=scale, enable_gqa=True)[0].transpose(0, 1))
        return (torch.cat(out),)

    found = []
    for kernel in (None, (flash, None)):
        monkeypatch.setattr(CpuPlatform, "flash_kernel", lambda self, device, kernel=kernel: kernel)
        pool.calls.start()
        plan = PrefillPlan(pool, spans)
        found.append(plan.attend(torch.nn.Identity(), query, key, value, AttentionOptions(0.2)))
    assert len(calls) == 1
    torch.testing.assert_close(*found, atol=2e-2, rtol=2e-2)
