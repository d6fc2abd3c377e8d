"""Packs and micro-batches: order, budgets, what is computed and what is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.training.engine_cases import branching_rows, rows_of
from verl.engine.training.packing import MicroBatching, pack, split_rows
from verl.trajectory import Prompt, Trajectory

groups_of = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(0, 24), min_size=1, max_size=6)), max_size=5)


@given(
    groups=groups_of,
    tokens=st.integers(1, 150),
    size=st.one_of(st.none(), st.integers(1, 7)),
    share=st.booleans(),
)
def test_rows_stay_in_order_and_within_the_budget(groups, tokens, size, share):
    rows = rows_of(groups)
    how = MicroBatching(tokens=tokens, rows=size, share_prompt=None if share else False)
    parts = split_rows(rows, how)
    assert [r for part in parts for r in part] == rows
    assert all(parts)
    for part in parts:
        if size is not None:
            assert len(part) <= size
        else:
            assert pack(part, how).size <= tokens or len([r for r in part if r.length]) == 1


@given(groups=groups_of, share=st.booleans())
def test_every_response_token_once(groups, share):
    rows = rows_of(groups)
    batch = pack(rows, MicroBatching(share_prompt=None if share else False))
    ids, targets = batch.input_ids.numpy(), batch.targets.numpy()
    assert list(targets) == [t for r in rows for t in r.response_ids]
    at = 0
    for r in rows:
        source = batch.source.numpy()[at : at + r.length]
        at += r.length
        if r.length:
            assert ids[source[0]] == r.prompt.ids[-1]
            assert list(ids[source[1:]]) == list(r.response_ids[:-1])
            first = len(r.prompt.ids) - 1
            assert list(batch.positions.numpy()[source]) == list(range(first, first + r.length))
    ends = [s.end for s in batch.segments]
    assert [s.start for s in batch.segments] == [0, *ends[:-1]][: len(ends)]


def test_the_prompt_is_computed_once_and_last_tokens_never():
    rows = rows_of([(10, [5, 5, 1, 0]), (10, [0, 0])])
    assert pack(rows, MicroBatching()).size == 10 + 4 + 4 + 0
    assert pack(rows, MicroBatching(share_prompt=False)).size == 3 * 10 + 4 + 4 + 0
    assert pack([], MicroBatching()).size == 0


def test_a_group_is_not_cut_where_it_fits_the_next_pack():
    rows = rows_of([(10, [30, 30]), (10, [20, 20])])
    assert [len(p) for p in split_rows(rows, MicroBatching(tokens=100))] == [2, 2]
    assert [len(p) for p in split_rows(rows, MicroBatching(tokens=60))] == [1, 1, 2]


def test_responses_to_a_prompt_larger_than_a_pack_stay_together_up_to_the_budget():
    rows = rows_of([(50, [6, 6, 6]), (50, [6])])
    for limit, sizes in ((0, [1, 1, 1, 1]), (60, [2, 1, 1]), (100, [3, 1])):
        assert [len(p) for p in split_rows(rows, MicroBatching(tokens=20, limit=limit))] == sizes
    repeated = MicroBatching(tokens=20, limit=100, share_prompt=False)
    assert [len(p) for p in split_rows(rows, repeated)] == [1, 1, 1, 1]


def test_one_by_one_for_layers_with_state():
    rows = rows_of([(3, [4, 4])])
    how = MicroBatching(one_by_one=True)
    assert [len(p) for p in split_rows(rows, how)] == [1, 1]
    assert len(pack(rows, how).segments) == 2


def test_same_uid_but_another_prompt_is_not_shared():
    a, b = rows_of([(5, [3])]) + rows_of([(5, [3])], seed=9)
    assert a.uid == b.uid and len(pack([a, b], MicroBatching()).segments) == 2


@given(
    count=st.integers(1, 12), seed=st.integers(0, 99), tokens=st.sampled_from([60, 150, 9999]), repeated=st.booleans()
)
def test_rows_of_a_tree_compute_what_they_share_once(count, seed, tokens, repeated):
    rows, how = branching_rows(count, seed, every_segment=repeated), MicroBatching(tokens=tokens)
    parts = split_rows(rows, how)
    assert [row for part in parts for row in part] == rows
    for part in parts:
        batch, whole = pack(part, how), [np.concatenate([r.context_ids, r.response_ids[:-1]]) for r in part]
        assert batch.size <= tokens or len(part) == 1
        for (row, path), sequence in zip(batch.paths, whole, strict=True):
            places = np.concatenate([np.arange(start, start + size) for start, size in path])
            assert np.array_equal(batch.input_ids.numpy()[places], sequence)
            assert np.array_equal(batch.positions.numpy()[places], np.arange(len(sequence)))
            last = next(s for s in batch.segments if s.end == places[-1] + 1)
            seen = [place for span in (*last.prefix, (last.start, last.end)) for place in range(*span)]
            assert seen == places.tolist() and row in part
        # What two rows share is at least what the later one's context was made of.
        apart = sum(map(len, whole))
        assert batch.size <= apart - 16 * (len(part) - 1)


def test_a_prompt_without_tokens():
    empty = Prompt(uid="0:7@0", ids=np.zeros(0, np.int64), messages=None)
    row = Trajectory(empty, 0, np.ones(3, np.int64), np.ones(3, bool))
    with pytest.raises(ValueError, match="0:7@0"):
        pack([row], MicroBatching())
