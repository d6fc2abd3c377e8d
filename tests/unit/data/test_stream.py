"""Order and position: every epoch a permutation, batches never mix epochs, a position is two integers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import tiny_tokenizer
from verl.config import load
from verl.data.curriculum import DifficultyPools, EasyToHard, Frontier
from verl.data.dataset import PromptDataset, epoch_order
from verl.data.files import DataError
from verl.data.load_object import SOURCES, load_extern_object, load_module
from verl.data.plugins import AbstractCurriculumSampler, collate_fn
from verl.data.rows import BadRow
from verl.data.stream import PromptStream, open_stream
from verl.trajectory import Batch, Prompt, Trajectory


class Rows:
    """A data set of `size` rows; the rows in `broken` fail when they are drawn."""

    def __init__(self, size: int, broken: tuple[int, ...] = ()):
        self.size, self.broken = size, broken

    def __len__(self) -> int:
        return self.size

    def order(self, *, seed: int, shuffle: bool, epoch: int = 0) -> np.ndarray:
        return epoch_order(self.size, seed, epoch) if shuffle else np.arange(self.size)

    def prompt(self, row: int, epoch: int = 0) -> Prompt:
        if row in self.broken:
            raise BadRow("gone", "remote image")
        return Prompt(uid=f"0:{row}@{epoch}", ids=np.array([row]), messages=[], row=row, epoch=epoch)


def stream(size: int = 10, batch: int = 3, broken: tuple[int, ...] = (), **kw: Any) -> PromptStream:
    return PromptStream(Rows(size, broken), batch_size=batch, **({"seed": 1, "shuffle": True} | kw))


def uids(prompts: list[Prompt]) -> list[str]:
    return [p.uid for p in prompts]


@given(size=st.integers(1, 40), batch=st.integers(1, 40), seed=st.integers(0, 2**40), steps=st.integers(1, 12))
def test_an_epoch_uses_each_row_at_most_once(size: int, batch: int, seed: int, steps: int) -> None:
    if batch > size:
        with pytest.raises(DataError, match="fewer than data"):
            stream(size, batch)
        return
    one = stream(size, batch, seed=seed)
    assert one.steps_per_epoch == size // batch and one.unused_per_epoch == size % batch
    drawn = [one.take() for _ in range(steps)]
    flat = [u for prompts in drawn for u in uids(prompts)]
    assert len(set(flat)) == len(flat) == steps * batch
    for number, prompts in enumerate(drawn):
        assert {p.epoch for p in prompts} == {number // (size // batch)}
    expected = epoch_order(size, seed, 0)[:batch].tolist()
    assert [p.row for p in drawn[0]] == expected


@settings(max_examples=50)
@given(data=st.data(), size=st.integers(3, 20), batch=st.integers(1, 3), cut=st.integers(0, 10))
def test_resume_draws_what_the_uninterrupted_run_draws(data: Any, size: int, batch: int, cut: int) -> None:
    draws = data.draw(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=12, max_size=12))
    whole = stream(size, batch)
    expected, saved = [], None
    for number, (n, cross) in enumerate(draws):
        if number == cut:
            saved = json.loads(json.dumps(whole.state()))
        expected.append(uids(whole.take(n, cross=cross)))
    again = stream(size, batch)
    assert set(saved) == {"epoch", "offset"}
    again.load_state(saved)
    assert [uids(again.take(n, cross=cross)) for n, cross in draws[cut:]] == expected[cut:]


def test_refills_cross_into_the_next_epoch() -> None:
    one = stream(5, 2, shuffle=False)
    assert uids(one.take()) == ["0:0@0", "0:1@0"]
    assert uids(one.take(4, cross=True)) == ["0:2@0", "0:3@0", "0:4@0", "0:0@1"]
    assert uids(one.take()) == ["0:1@1", "0:2@1"]
    assert uids(one.take(12, cross=True))[-1] == "0:4@3" and one.state() == {"epoch": 3, "offset": 5}
    with pytest.raises(DataError, match="6 prompts"):
        one.take(6)


def test_a_row_that_fails_is_replaced_by_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    one = stream(6, 2, broken=(1,), shuffle=False)
    assert uids(one.take()) == ["0:0@0", "0:2@0"]
    assert [s["row"] for s in one.skipped] == [1] and "gone" in capsys.readouterr().err
    assert uids(one.take()) == ["0:3@0", "0:4@0"]
    assert uids(one.take()) == ["0:0@1", "0:2@1"]
    with pytest.raises(DataError, match="2 rows in a row failed"):
        stream(2, 1, broken=(0, 1)).take()
    with pytest.raises(DataError, match="6 rows in a row failed"):  # the only row that the sampler gives
        stream(6, 1, broken=(3,), sampler=Always(3)).take()
    limited = stream(6, 1, broken=(1, 4), shuffle=False, max_bad_ratio=0.2)
    assert uids([one for _ in range(3) for one in limited.take()]) == ["0:0@0", "0:2@0", "0:3@0"]
    with pytest.raises(DataError, match=r"2 of 6 rows of epoch 0 failed .*max_bad_row_ratio=0.2.*remote image"):
        limited.take()


# ------------------------------------------------------------------------------------------- samplers, plugins


class Always:
    """One row an epoch, without saying so."""

    def __init__(self, row: int) -> None:
        self.row = row

    def __iter__(self) -> Iterator[int]:
        yield self.row


class Plain:
    """Deterministic but for its own generator, which moves on with every epoch; gives row 0 twice."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        yield 0
        yield from self.rng.permutation(6).tolist()


class Stateful:
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield (self.at * 5) % 7

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("kind", [Plain, Stateful])
@pytest.mark.parametrize("cut", [0, 1, 2, 5])
def test_custom_samplers_resume(kind: Any, cut: int) -> None:
    whole = stream(7, 3, sampler=kind())
    expected = []
    for number in range(8):
        if number == cut:
            saved = json.loads(json.dumps(whole.state()))
        expected.append(uids(whole.take()))
    flat = [u for step in expected for u in step]
    assert len(set(flat)) == len(flat)
    again = stream(7, 3, sampler=kind())
    again.load_state(saved)
    assert [uids(again.take()) for _ in range(cut, 8)] == expected[cut:]


@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_prompts_that_go_back_to_the_stream_are_drawn_again(kind: Any) -> None:
    expected = [uids(step) for step in map(stream(7, 3, sampler=kind()).take, [3] * 8)]
    one, drawn = stream(7, 3, sampler=kind()), []
    for number in range(8):
        before = one.state()
        drawn.append(uids(one.take()))
        if number in (1, 2, 4):
            one.take()
            one.load_state(before)
            assert uids(one.take()) == drawn[-1]
    assert drawn == expected


def test_a_sampler_that_learns_and_has_no_state_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    sampler = Plain()
    sampler.update = lambda batch: None  # type: ignore[attr-defined]
    stream(7, 3, sampler=sampler)
    assert "Plain learns (update) and has no state_dict" in capsys.readouterr().err
    sampler.state_dict = dict  # type: ignore[attr-defined]
    stream(7, 3, sampler=sampler)
    assert not capsys.readouterr().err


def test_curriculum_sampler_is_asked_only_as_needed() -> None:
    class Curriculum(AbstractCurriculumSampler):
        def __init__(self, data_source: Any, data_config: Any):
            self.given, self.level = 0, 0

        def __iter__(self) -> Iterator[int]:
            while True:
                self.given += 1
                yield self.level

        def update(self, batch: Any) -> None:
            self.level = batch

    sampler = Curriculum(None, None)
    one = stream(9, 2, sampler=sampler)
    assert [p.row for p in one.take()] == [0, 0] and sampler.given == 2
    one.update(4)
    assert [p.row for p in one.take()] == [4, 4]


@pytest.mark.parametrize(("kind", "first"), [(Frontier, 2), (DifficultyPools, 2), (EasyToHard, 1)])
def test_curricula_draw_by_pass_rate_and_resume_exactly(kind: Any, first: int) -> None:
    """Nine rows with a mean pass rate of a quarter."""
    rates = [1.0, 0.75, 0.5, *[0.0] * 6]

    def trained(prompts: list[Any]) -> Batch:
        rows = []
        for p in prompts:
            right = int(4 * rates[p.number])
            scores = [1.0] * right + [0.0] * (4 - right)
            rows += [Trajectory(p, i, np.zeros(1), np.ones(1, bool), score=s) for i, s in enumerate(scores)]
            rows.append(Trajectory(p, 4, np.zeros(1), np.ones(1, bool)))  # it has no score
        return Batch(rows)

    def build() -> Any:
        return stream(9, 2, sampler=kind(range(9), SimpleNamespace(seed=3)))

    one = build()
    drawn: list[int] = []
    for step in range(150):
        if step == 40:
            saved = json.loads(json.dumps(one.state()))
        prompts = one.take()
        assert len({p.number for p in prompts}) == 2 and all(p.number == p.row for p in prompts)
        drawn += [p.number for p in prompts]
        one.update(trained(prompts))
    counts = np.bincount(drawn[60:], minlength=9)
    assert counts.min() > 0 and counts[first] > 2 * counts[3] and counts[first] > counts[0]
    assert one.epoch == 150 // 4, "four batches of two from nine rows"
    again = build()
    again.load_state(saved)
    again_drawn = []
    for _ in range(40, 60):
        prompts = again.take()
        again_drawn += [p.number for p in prompts]
        again.update(trained(prompts))
    assert again_drawn == drawn[80:120]


@pytest.mark.parametrize("accuracy", [None, "yes", float("nan")])
def test_an_accuracy_that_is_no_number_is_the_score(accuracy: Any) -> None:
    one = stream(9, 2, sampler=(sampler := Frontier(range(9), SimpleNamespace(seed=3))))
    prompts = one.take()
    rows = [Trajectory(p, 0, np.zeros(1), np.ones(1, bool), score=0.5, score_parts={"acc": accuracy}) for p in prompts]
    one.update(Batch(rows))
    assert sampler.rates == {p.number: 0.5 for p in prompts}


def test_sampler_outside_of_the_data_is_refused() -> None:
    with pytest.raises(DataError, match="row 9"):
        stream(5, 1, sampler=[9]).take()
    with pytest.raises(DataError):
        stream(5, 1, sampler=[]).take()


PLUGIN = """
from verl.data.plugins import AbstractSampler, RLHFDataset

class Backwards(AbstractSampler):
    def __init__(self, data_source, data_config):
        self.size = len(data_source)
        assert data_source[0]["raw_prompt"][0]["role"] == "user" and data_config.train_batch_size == 2
    def __len__(self):
        return self.size
    def __iter__(self):
        return iter(range(self.size - 1, -1, -1))

class Shouting(RLHFDataset):
    def __getitem__(self, item):
        row = super().__getitem__(item)
        if item == 1:
            raise KeyError("answer")
        row["raw_prompt"][0]["content"] += "!"
        return row
"""


def test_custom_dataset_and_sampler_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "plug.py").write_text(PLUGIN)
    truth = {"style": "rule", "ground_truth": "1"}
    rows = [{"data_source": "openai/gsm8k", "prompt": f"q{i}", "reward_model": truth} for i in range(5)]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    words = [f"train_files={tmp_path}/x.jsonl", "val_files=null", "train_batch_size=2"]
    words += ["max_bad_row_ratio=0.5", f"custom_cls={{path:{tmp_path}/plug.py,name:Shouting}}"]
    words += [f"sampler={{class_path:{tmp_path}/plug.py,class_name:Backwards}}"]
    config = load(["actor_rollout_ref.model.path=x", *(f"data.{word}" for word in words)])
    data = PromptDataset(config.data.train_files, config, tiny_tokenizer())
    assert len(data) == 4 and data.bad_rows[0]["problem"] == "custom dataset failed"
    assert "KeyError" in data.bad_rows[0]["detail"]
    first = open_stream(data, config).take()
    assert [(p.row, p.messages[0]["content"]) for p in first] == [(4, "q4!"), (3, "q3!")]
    config.data.train_max_samples = 3
    chosen = PromptDataset(config.data.train_files, config, tiny_tokenizer())
    config.data.custom_cls.path = None
    assert [p.row for p in map(chosen.prompt, range(3))] != [0, 2, 3], "drawn from those that can be used"


@pytest.mark.parametrize("source", [b"x = 1\ndef f(:\n", b"x = 1\n\0", b"# \xff\nx = '\xff'\n"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_syntax_error_stays_one_and_says_where(tmp_path: Path, source: bytes, kept: bool, monkeypatch) -> None:
    (tmp_path / "mod.py").write_bytes(source)
    if kept:
        monkeypatch.setitem(SOURCES, str(tmp_path / "mod.py"), source)
    with pytest.raises(SyntaxError) as error:
        load_extern_object(f"{tmp_path}/mod.py", "f")
    assert (error.value.filename, error.value.lineno) == (
        f"{tmp_path}/mod.py",
        2,
    ) and "(mod.py, line 2)" in str(error.value)


def test_load_extern_object(tmp_path: Path) -> None:
    (tmp_path / "helper_for_mod.py").write_text("value = 3")
    (tmp_path / "mod.py").write_text("from helper_for_mod import value\ndef compute(): return value")
    assert load_extern_object(f"{tmp_path}/mod.py", "compute")() == 3
    assert load_module(f"{tmp_path}/mod.py") is load_module(f"{tmp_path}/mod.py")
    assert load_extern_object("pkg://json", "loads") is json.loads
    missing = (
        (f"{tmp_path}/none.py", "x", "no such file"),
        ("pkg://no_such_module_here", "x", "no_such_module_here"),
    )
    for path, name, words in (*missing, (f"{tmp_path}/mod.py", "compte", "nearest: compute ")):
        with pytest.raises(DataError, match=words):
            load_extern_object(path, name)
    (tmp_path / "ends.py").write_text("import sys; sys.exit(0)")
    for path in (f"{tmp_path}/ends.py", "pkg://ends"):
        with pytest.raises(DataError, match=r"ends.*sys.exit\(0\)"):
            load_module(path)
    for path, kind in ((f"{tmp_path}/none.py", FileNotFoundError), (f"{tmp_path}/mod.py", AttributeError)):
        with pytest.raises(kind):
            load_extern_object(path, "compte")


def test_collate_fn() -> None:
    import torch

    out = collate_fn([{"a": torch.tensor([1, 2]), "b": [1]}, {"a": torch.tensor([3, 4]), "b": [2, 3]}])
    assert out["a"].tolist() == [[1, 2], [3, 4]] and out["b"].dtype == object and out["b"][1] == [2, 3]
