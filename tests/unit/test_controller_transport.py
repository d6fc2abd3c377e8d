"""Rows to arrays and back; which rank gets what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.trajectory import Prompt, Trajectory
from verl.workers import codec
from verl.workers.plan import partition


@st.composite
def batches(draw) -> list[Trajectory]:
    """Groups of ragged responses, some empty, some columns missing on some rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for g in range(draw(st.integers(0, 4))):
        prompt = Prompt(f"{g}:é@0", rng.integers(0, 200000, draw(st.integers(1, 6))), messages=None)
        for index in range(draw(st.integers(1, 4))):
            length = draw(st.integers(0, 5))
            row = Trajectory(
                prompt,
                index,
                response_ids=rng.integers(0, 200000, length),
                response_mask=rng.random(length) < 0.5,
            )
            for name in codec.OPTIONAL:
                if draw(st.booleans()):
                    values = rng.random(length)
                    setattr(row, name, values < 0.5 if name in codec.MASKS else values.astype(np.float32))
            rows.append(row)
    return rows


@settings(max_examples=60, deadline=None)
@given(batches())
def test_rows_come_back_as_they_were(rows) -> None:
    payload = codec.encode(rows, codec.OPTIONAL)
    assert all(isinstance(a, np.ndarray) and a.dtype.kind in "iufb" and a.ndim == 1 for a in payload.values())
    back = codec.decode(payload)
    assert len(back) == len(rows)
    for old, new in zip(rows, back, strict=True):
        assert (new.uid, new.index, new.length) == (old.uid, old.index, old.length)
        assert new.response_ids.dtype == np.int64 and np.array_equal(new.response_ids, old.response_ids)
        assert np.array_equal(new.prompt.ids, old.prompt.ids)
        assert np.array_equal(new.response_mask, old.response_mask)
        for name in codec.OPTIONAL:
            was, now = getattr(old, name), getattr(new, name)
            assert (was is None) == (now is None), name
            assert was is None or (now.dtype == was.dtype and np.array_equal(now, was)), name
    assert len({id(r.prompt) for r in back}) == len({id(r.prompt) for r in rows}), (
        "a prompt goes once per group"
    )


@settings(max_examples=30, deadline=None)
@given(batches(), st.data())
def test_columns_come_back_to_any_selection_of_rows(rows, data) -> None:
    chosen = data.draw(st.permutations(range(len(rows))))[: len(rows) // 2 + 1]
    remote = codec.decode(codec.encode([rows[i] for i in chosen]))
    for row in remote:
        row.entropy = np.full(row.length, row.index, np.float32)
    before = {id(r): r.entropy for r in rows}
    codec.fill([rows[i] for i in chosen], codec.collect(remote, ["entropy", "values"]))
    for i, row in enumerate(rows):
        if i in chosen:
            assert np.array_equal(row.entropy, np.full(row.length, row.index))
        else:
            assert row.entropy is before[id(row)]


def row(uid: str, index: int, length: int, **columns) -> Trajectory:
    prompt = Prompt(uid, np.arange(3), messages=None)
    mask = np.ones(length, bool)
    return Trajectory(prompt, index, response_ids=np.arange(length), response_mask=mask, **columns)


def test_only_the_columns_asked_for_travel() -> None:
    rows = [row("a", 0, 4, advantages=np.ones(4, np.float32), entropy=np.ones(4, np.float32))]
    payload = codec.encode(rows, ["advantages"])
    assert "advantages" in payload and "entropy" not in payload


@pytest.mark.parametrize(
    ("columns", "text"),
    [({"advantages": np.ones(3, np.float32)}, "3 values for 4"), ({}, "no column that travels")],
)
def test_what_does_not_fit_is_refused(columns, text) -> None:
    with pytest.raises(ValueError, match=text):
        codec.encode([row("a", 0, 4, **columns)], ["advantages"] if columns else ["text"])


def test_an_answer_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="3 values for 4"):
        codec.fill([row("a", 0, 4)], {"entropy": np.zeros(3, np.float32)})


def test_a_prompt_with_images_is_refused_by_name() -> None:
    one = row("a", 0, 4)
    one.prompt.media["images"] = [object()]
    with pytest.raises(ValueError, match="prompt a has media"):
        codec.encode([one])


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 5), st.booleans())
def test_every_row_goes_to_exactly_one_rank(rows, ranks, balance) -> None:
    parts = partition(rows, ranks, balance=balance)
    assert len(parts) == ranks and sorted(i for part in parts for i in part) == list(range(len(rows)))
    groups = {r.uid for r in rows}
    if len(groups) >= ranks:
        homes = [{rows[i].uid for i in part} for part in parts]
        assert sum(len(home) for home in homes) == len(groups), "a group is not cut"
    assert parts == partition(rows, ranks, balance=balance)


def test_ranks_get_about_as_many_tokens() -> None:
    rng = np.random.default_rng(0)
    rows = [row(f"{g}", i, int(rng.geometric(1 / 300))) for g in range(64) for i in range(8)]
    loads = [sum(rows[i].length for i in part) for part in partition(rows, 8)]
    assert max(loads) < 1.05 * min(loads)
    unbalanced = [sum(rows[i].length for i in part) for part in partition(rows, 8, balance=False)]
    assert max(unbalanced) - min(unbalanced) > max(loads) - min(loads)


def test_fewer_groups_than_ranks_are_halved() -> None:
    rows = [row("a", i, 5) for i in range(8)]
    assert [len(part) for part in partition(rows, 4)] == [2, 2, 2, 2]
    assert [len(part) for part in partition(rows[:1], 2)] == [1, 0]
