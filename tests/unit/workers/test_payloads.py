"""What travels between driver and workers arrives as it was sent; which rank gets what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counting import instructions
from verl.engine.rollout.base import Completion, SamplingParams
from verl.trajectory import COLUMNS, Media, Segment
from verl.workers import payloads
from verl.workers.update_plan import partition

OPTIONAL = [name for name in COLUMNS if name not in ("response_ids", "response_mask")]


@st.composite
def batches(draw) -> list[Segment]:
    """Groups of ragged responses, some empty, some with a context of their own, some columns missing on some rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for g in range(draw(st.integers(0, 4))):
        shared = rng.integers(0, 200000, draw(st.integers(1, 6)))
        of_shared = shared.astype(np.int16)
        for index in range(draw(st.integers(1, 4))):
            length = draw(st.integers(0, 5))
            context = shared if draw(st.booleans()) else rng.integers(0, 200000, 3)
            row = Segment(
                context,
                rng.integers(0, 200000, length),
                rng.random(length) < 0.5,
                uid=f"{g}:é@0",
                index=index,
                shared=length + 2 * index,
            )
            for name in OPTIONAL:
                if draw(st.booleans()):
                    values = (rng.random(length) * 2).astype(COLUMNS[name].dtype)
                    row.put(
                        name,
                        np.array([b"\0" * int(3 * v) for v in values], object) if values.dtype == object else values,
                    )
                    if COLUMNS[name].context:
                        values = context.astype(COLUMNS[name].dtype)
                        row.context_columns[name] = of_shared if context is shared else values
            rows.append(row)
    return rows


@settings(max_examples=60, deadline=None)
@given(batches())
def test_rows_come_back_as_they_were(rows) -> None:
    payload = payloads.encode(rows, OPTIONAL)
    back = payloads.decode(payload)
    for old, new in zip(rows, back, strict=True):
        assert (new.uid, new.index, new.shared) == (old.uid, old.index, old.shared)
        assert new.context_ids.tolist() == old.context_ids.tolist()
        assert new.columns.keys() == old.columns.keys()
        for name, was in old.columns.items():
            now = new.columns[name]
            assert now.dtype == COLUMNS[name].dtype and np.array_equal(now, was), name
        assert new.context_columns.keys() == old.context_columns.keys()
        for name, was in old.context_columns.items():
            assert np.array_equal(new.context_columns[name], was), name
    once = [len({id(row.context_columns.get("routed_experts")) for row in both}) for both in (rows, back)]
    assert once[0] == once[1], "what is said of a context goes once, too"
    contexts = len({id(row.context_ids) for row in rows})
    assert len({id(row.context_ids) for row in back}) == contexts, "a context goes once for all that share it"


@settings(max_examples=30, deadline=None)
@given(batches(), st.data())
def test_columns_come_back_to_any_selection_of_rows(rows, data) -> None:
    chosen = data.draw(st.permutations(range(len(rows))))[: len(rows) // 2 + 1]
    remote = payloads.decode(payloads.encode([rows[i] for i in chosen]))
    for row in remote:
        row.entropy = np.full(row.length, row.index, np.float32)
    before = {id(r): r.entropy for r in rows}
    payloads.fill([rows[i] for i in chosen], payloads.collect(remote, ["entropy", "values"]))
    for i, row in enumerate(rows):
        if i in chosen:
            assert np.array_equal(row.entropy, np.full(row.length, row.index))
        else:
            assert row.entropy is before[id(row)]


def row(uid: str, index: int, length: int, **columns) -> Segment:
    return Segment(np.arange(3), np.arange(length), np.ones(length, bool), uid=uid, index=index, **columns)


def test_only_the_columns_asked_for_travel() -> None:
    rows = [row("a", 0, 4, advantages=np.ones(4, np.float32), entropy=np.ones(4, np.float32))]
    payload = payloads.encode(rows, ["advantages"])
    assert sorted(payload["columns"]) == ["advantages", "response_ids", "response_mask"]
    assert payload["columns"]["response_ids"].dtype == np.int32


@pytest.mark.parametrize(
    ("columns", "text"),
    [({"advantages": np.ones(3, np.float32)}, "3 values for 4"), ({}, "'text' is not a column")],
)
def test_what_does_not_fit_is_refused(columns, text) -> None:
    with pytest.raises(ValueError, match=text):
        payloads.encode([row("a", 0, 4, **columns)], ["advantages"] if columns else ["text"])


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="3 values for 4"):
        payloads.fill([row("a", 0, 4)], {"entropy": np.zeros(3, np.float32)})


def test_images_go_once_and_stay_one_object() -> None:
    media = Media({"pixel_values": np.ones((4, 6), np.float32), "image_grid_thw": np.array([[1, 2, 2]])}, 1)
    rows = [row("a", 0, 4), row("a", 1, 3), row("b", 0, 2)]
    rows[0].media = rows[1].media = media
    payload = payloads.encode(rows)
    inputs = [one.inputs for one in payloads.distinct_media(row.media for row in rows)]
    found = payloads.decode(payload, inputs)
    assert len(payload["media"]) == len(inputs) == 1 and found[0].media is found[1].media and found[2].media is None
    assert found[0].media.key == media.key and found[0].media.tokens == media.images == 1
    asks = [payloads.GenerateRequest(name, np.arange(3), SamplingParams(max_tokens=1), "g", media) for name in "xy"]
    again = [payloads.decode_requests(payloads.encode_requests([ask]), inputs)[0].media for ask in asks]
    assert again[0] is again[1] is found[0].media


def test_images_that_came_to_others_go_alone() -> None:
    inputs = {"pixel_values": np.ones((4, 6), np.float32), "image_grid_thw": np.array([[1, 2, 2]])}
    own, shown = Media(inputs, 1), Media({**inputs, "pixel_values": np.zeros((4, 6), np.float32)}, 1)
    rows = [row("a", 0, 4), row("a", 1, 3)]
    rows[0].media, rows[1].media = own, Media.joined([own, shown])
    sent = payloads.distinct_media(row.media for row in rows)
    assert [one.key for one in sent] == [own.key, shown.key]
    first, second = (r.media for r in payloads.decode(payloads.encode(rows), [one.inputs for one in sent]))
    assert first is not None and second is not None and rows[1].media.leaves == (own, shown)
    assert second.key == rows[1].media.key and second.leaves[0] is first and second.images == second.tokens == 2
    for name, value in rows[1].media.inputs.items():
        assert np.array_equal(second.inputs[name], value)


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


# -- sampling --------------------------------------------------------------------------------------------------------


def completion(length: int, text: str | None, **fields) -> Completion:
    return Completion(np.arange(length), np.linspace(-1, 0, length, dtype=np.float32), "stop", text=text, **fields)


def test_responses_arrive_as_they_were_sent() -> None:
    sent = [
        payloads.GenerateResult("a", completion(3, "é漢🙂 \ufffd\x00\n", versions=(1, 2), num_preempted=4)),
        payloads.GenerateResult("b", error=("ValueError", "too long")),
        payloads.GenerateResult("c", completion(2, None)),
        payloads.GenerateResult("d", completion(0, "")),
        payloads.GenerateResult("e", completion(1, "half \ud83d")),
    ]
    came = payloads.decode_results(payloads.encode_results(sent))
    assert [a.id for a in came] == list("abcde") and came[1].error == ("ValueError", "too long")
    for mine, theirs in zip(came, sent, strict=True):
        if theirs.completion is None:
            assert mine.completion is None
            continue
        one, other = mine.completion, theirs.completion
        assert one.token_ids.dtype == np.int64 and one.token_ids.tolist() == other.token_ids.tolist()
        assert one.log_probs.dtype == np.float32 and one.log_probs.tolist() == other.log_probs.tolist()
        for name in ("finish_reason", "versions", "num_preempted", "text"):
            assert getattr(one, name) == getattr(other, name)
    assert payloads.decode_results(payloads.encode_results([])) == []


def test_requests_arrive_as_they_were_sent() -> None:
    every = SamplingParams(9, 0.5, 0.9, 7, 0.1, 1.2, ("</a>", "\n"), (5, 6), True, 2**62, 4)
    prompt = np.arange(4)
    sent = [
        payloads.GenerateRequest("a", prompt, every, "g"),
        payloads.GenerateRequest("b", prompt.copy(), every, "g"),
        payloads.GenerateRequest("c", np.arange(2), SamplingParams(max_tokens=1)),
    ]
    payload = payloads.encode_requests(sent)
    assert payload["lengths"].tolist() == [4, 2], "a group's prompt goes once"
    came = payloads.decode_requests(payload)
    assert [(a.id, a.group, a.prompt_ids.tolist(), a.sampling) for a in came] == [
        (a.id, a.group, a.prompt_ids.tolist(), a.sampling) for a in sent
    ]


@pytest.mark.parametrize("text", [None, "x"])
def test_a_response_costs_the_same_however_long_it_is(text: str | None) -> None:
    def cost(length: int) -> int:
        done = completion(length, text and text * length)
        payload = payloads.encode_results([payloads.GenerateResult("a", done), payloads.GenerateResult("b", done)])
        return instructions(lambda: payloads.decode_results(payload))

    assert 0 < cost(4096) == cost(2)
