"""What every trainer does with its checkpoints: background sealing, copies elsewhere, parts left out, refusals."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.checkpoint.test_seal import Events, content, parts_for
from verl.checkpoint import CheckpointError, newest
from verl.checkpoint.remote import RemoteCopies
from verl.checkpoint.write import CheckpointWriter
from verl.errors import UserError
from verl.tracking.step_metrics import Counters
from verl.trainer.checkpoints import Storage
from verl.trainer.step_record import RefusedSteps, TooManyRefused
from verl.trajectory import Prompt, Trajectory
from verl.workers.update_plan import Refusal, UpdateResult


class Records:
    """Stands for Tracking: keeps events and notices."""

    def __init__(self, root: Path):
        self.run_dir = root
        self.events = Events()
        self.notices: list[str] = []
        self.unsaved = ""

    def event(self, kind: str, **fields: Any) -> None:
        self.events(kind, **fields)

    def resumed(self, step: int, record: Any = None) -> None:
        """Nothing is logged here."""

    def rely_on(self, what: str, path: Path) -> None:
        """Nothing is looked for here."""

    def notice(self, text: str) -> None:
        self.notices.append(text)


def storage(root: Path, *, narrowed: bool = False, contents: dict | None = None, **settings: Any) -> Storage:
    trainer = dict.fromkeys(
        [
            "default_hdfs_dir",
            "resume_from_path",
            "max_ckpt_to_keep",
            "max_actor_ckpt_to_keep",
            "max_critic_ckpt_to_keep",
        ]
    )
    trainer |= {"resume_mode": "auto", "del_local_ckpt_after_load": False, "device": "cpu"}
    whole = ["model", "optimizer", "extra"]
    held = {"save_contents": whole, "load_contents": whole, "async_save": False} | (contents or {})
    groups = {"trainer": SimpleNamespace(**trainer | settings), "select": lambda key: SimpleNamespace(**held)}
    own = {
        "trainer": settings | {"default_local_dir": str(root)},
        "api_key": "sk-1",
        "groups": {"mine": held},
    }
    config = SimpleNamespace(**groups, was_set=lambda key: narrowed, to_dict=lambda: own)
    return Storage(config, "checkpoint", Records(root))  # type: ignore[arg-type]


def resume(of: Storage, checkpoint: Any, restore: Any = lambda checkpoint: None) -> int:
    return of.resume(checkpoint, {}, restore, model_key="model.path")


def records(of: Storage) -> Any:
    return of._tracking


def save(of: Storage, step: int) -> None:
    of.save(step, parts_for(step), {"position": step})


def test_a_save_in_the_background_is_not_there_until_it_is_sealed(tmp_path, monkeypatch) -> None:
    going = threading.Event()
    plain = CheckpointWriter._seal

    def held(self: CheckpointWriter) -> Any:
        assert going.wait(30)
        return plain(self)

    monkeypatch.setattr(CheckpointWriter, "_seal", held)
    one = storage(tmp_path, contents={"async_save": True})
    going.set()
    save(one, 1)
    one.wait()
    going.clear()
    save(one, 2)  # returns while the thread is held
    # What another process would find if this one were killed now.
    assert newest(tmp_path, tidy=False).step == 1 and (tmp_path / "global_step_2.tmp").is_dir()
    going.set()
    one.finish()
    found = newest(tmp_path)
    assert found.step == 2 and (found.part("actor") / "model.safetensors").read_bytes() == content(2, "model")
    assert records(one).events.kinds() == ["checkpoint_saved"] * 2


def test_the_next_save_waits_for_the_one_before(tmp_path, monkeypatch) -> None:
    order: list[str] = []
    plain = CheckpointWriter._seal

    def slow(self: CheckpointWriter) -> Any:
        threading.Event().wait(0.2)
        order.append(f"sealed {self._step}")
        return plain(self)

    monkeypatch.setattr(CheckpointWriter, "_seal", slow)
    one = storage(tmp_path, contents={"async_save": True}, max_ckpt_to_keep=1)
    for step in (1, 2, 3):
        one.save(step, {"actor": lambda d, s=step: order.append(f"filled {s}")}, {})
    one.finish()
    assert order == [f"{what} {step}" for step in (1, 2, 3) for what in ("filled", "sealed")]
    assert [p.name for p in tmp_path.glob("global_step_*")] == ["global_step_3"]


@pytest.mark.parametrize("background", [False, True])
def test_a_failure_is_said_when_it_happens_and_at_the_end(tmp_path, background) -> None:
    def full(directory: Path) -> None:
        raise OSError(28, "No space left on device")

    one = storage(tmp_path, contents={"async_save": background})
    save(one, 1)
    one.save(2, {"actor": full}, {})
    one.finish()
    assert records(one).events.kinds() == ["checkpoint_saved", "checkpoint_failed"]
    said = records(one).unsaved
    assert "step 2 was NOT written (OSError" in said and "the newest checkpoint is global_step_1" in said
    save(one, 3)
    one.finish()
    assert not records(one).unsaved, "mended"


def test_a_refused_save_leaves_the_older_one_newest(tmp_path) -> None:
    one = storage(tmp_path)
    save(one, 1)
    assert one.refuses(2, [row("a", 5)], log_probs_of([]), "actor.optim.lr")
    one.finish()
    assert newest(tmp_path).step == 1
    kind, fields = records(one).events[-1]
    assert kind == "checkpoint_refused" and "step 2 is not saved: its weights" in fields["message"]
    assert "lower actor.optim.lr" in fields["message"]
    assert "step 2 was NOT written" in records(one).unsaved


@pytest.mark.parametrize("background", [False, True])
def test_copies_elsewhere_are_found_again(tmp_path, background) -> None:
    away = str(tmp_path / "away")
    one = storage(tmp_path / "a", default_hdfs_dir=away, contents={"async_save": background})
    save(one, 1)
    save(one, 2)
    one.finish()
    assert records(one).events.kinds().count("checkpoint_copied") == 2
    other = storage(tmp_path / "b", default_hdfs_dir=away)
    found = other.find()
    assert (found.step, found.path) == (2, tmp_path / "b" / "global_step_2")
    assert "fetching global_step_2" in records(other).notices[0]
    again = storage(tmp_path / "b", default_hdfs_dir=away)
    assert again.find().step == 2 and not records(again).notices, "it is here now"
    save(again, 3)
    assert RemoteCopies(away).newest().step == 3, "the count of seals goes on"
    assert storage(tmp_path / "c", default_hdfs_dir=away, resume_mode="disable").find() is None


def test_copies_that_cannot_be_reached(tmp_path) -> None:
    one = storage(tmp_path, default_hdfs_dir="nosuch://x")
    with pytest.raises(CheckpointError, match=r"nosuch.*resume_mode=disable starts anew"):
        one.find()
    save(one, 1)
    assert [k for k in records(one).events.kinds() if "copy" in k] == ["checkpoint_copy_failed"]
    assert one.find().step == 1 and "going on from" in records(one).notices[-1]


def test_a_local_checkpoint_is_deleted_after_loading_only_if_there_is_another(tmp_path) -> None:
    away = str(tmp_path / "away")
    one = storage(tmp_path / "run", default_hdfs_dir=away, del_local_ckpt_after_load=True)
    save(one, 1)
    found = one.find()
    resume(one, found)
    assert not found.path.exists() and one.find().step == 1, "fetched anew"
    alone = storage(tmp_path / "alone", del_local_ckpt_after_load=True)
    save(alone, 1)
    resume(alone, alone.find())
    assert newest(tmp_path / "alone").step == 1 and "is kept" in records(alone).notices[-1]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (MemoryError(), MemoryError),
        (torch.OutOfMemoryError(), torch.OutOfMemoryError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), RuntimeError),
        (ValueError("nonsense"), CheckpointError),
    ],
)
def test_only_what_a_checkpoint_is_to_blame_for_says_to_move_it_away(tmp_path, error, raised) -> None:
    one = storage(tmp_path)
    save(one, 1)

    def fail(checkpoint: Any) -> None:
        raise error

    with pytest.raises(raised):
        resume(one, one.find(), fail)
    assert ("checkpoint_not_loaded" in records(one).events.kinds()) is (raised is CheckpointError)


def test_parts_that_are_not_read_are_named(tmp_path) -> None:
    one = storage(tmp_path, narrowed=True, contents={"load_contents": ["hf_model", "extra"]})
    save(one, 1)
    assert [one.wants(part) for part in ("model", "optimizer", "extra")] == [True, False, True]
    resume(one, one.find())
    assert "resumed without optimizer" in records(one).notices[-1]
    less = storage(tmp_path, contents={"save_contents": ["model"], "load_contents": ["model"]})
    assert all(less.wants(part) for part in ("model", "optimizer", "extra")), "nobody asked for less"


@pytest.mark.parametrize(("then", "now", "refused"), [("fsdp2", "megatron", True), ("fsdp2", "fsdp", False)])
def test_the_optimizer_of_another_engine_is_not_read(tmp_path, then, now, refused) -> None:
    one = storage(tmp_path)
    one._given["engine"] = {"strategy": then}
    save(one, 1)
    other, weights = storage(tmp_path), storage(tmp_path, narrowed=True, contents={"load_contents": ["model", "extra"]})
    other._given["engine"] = weights._given["engine"] = {"strategy": now}
    if refused:
        with pytest.raises(UserError, match=rf"engine.strategy={then} wrote .* {now} does not .*load_contents=\[model"):
            resume(other, other.find())
    else:
        resume(other, other.find())
    resume(weights, weights.find())


def test_settings_that_changed_are_named(tmp_path) -> None:
    save(storage(tmp_path, total_epochs=3), 1)
    same = storage(tmp_path, total_epochs=3, resume_mode="auto", new_key=1)
    resume(same, same.find())
    assert not records(same).notices
    other = storage(tmp_path, contents={"async_save": True}, total_epochs=4, resume_mode="resume_path")
    found = newest(tmp_path)
    resume(other, found)
    changed = "trainer.total_epochs: 3 then, 4 now; groups.mine.async_save: False then, True now"
    assert records(other).notices == [f"settings that changed since global_step_1: {changed}"]
    compiled = storage(tmp_path, total_epochs=3, resume_mode="resume_path")
    compiled._given["compiled kernels"] = "compiled kernels"  # as on a machine that has them
    resume(compiled, found)
    assert "settings that changed since global_step_1: compiled kernels: " in records(compiled).notices[-1]
    assert "sk-1" not in (found.path / "state" / "loop.json").read_text()


# ------------------------------------------------------------------------------------------ weights and updates


def row(uid: str, length: int) -> Trajectory:
    mask = np.ones(length, bool)
    return Trajectory(Prompt(uid, np.arange(3), "q"), 0, np.arange(length), mask, loss_mask=mask.copy())


def log_probs_of(asked: list[int]) -> Callable[[Trajectory], np.ndarray]:
    """Log-probs of which that of a fifth token is not finite; notes the lengths that it is asked for."""

    def log_probs(t: Trajectory) -> np.ndarray:
        asked.append(t.length)
        return np.where(np.arange(t.length) == 4, np.nan, -1.0)

    return log_probs


def test_weights_are_asked_about_the_longest_row(tmp_path) -> None:
    one, asked, rows = storage(tmp_path), [], [row("a", 0), row("b", 2), row("c", 5)]
    assert [one.refuses(1, rows[:n], log_probs_of(asked), "lr") for n in (3, 2, 1)] == [True, False, False]
    assert asked == [5, 2]
    assert not storage(tmp_path, contents={"save_contents": ["extra"]}).refuses(1, rows, log_probs_of([]), "lr")


def test_refused_steps_in_a_row_are_counted_over_a_resume(tmp_path) -> None:
    tracking: Any = Records(tmp_path)
    bad = UpdateResult({}, refused=[Refusal("the loss is nan", [row("a", 2)])])
    counters = Counters()
    first = RefusedSteps(3, tracking, counters)
    for step in (1, 2):
        first.note(step, bad)
        first.check()
    resumed = Counters()
    resumed.load(counters.state())
    second = RefusedSteps(3, tracking, resumed)
    second.check()
    second.note(3, bad)
    with pytest.raises(TooManyRefused, match=r"3 steps in a row.*the loss is nan"):
        second.check()
    assert resumed.refused_steps == 3
    second.note(4, UpdateResult({}, updates=1))
    assert resumed.refused_in_a_row == 0


def test_a_batch_that_cannot_be_dumped_for_lack_of_room_is_an_event(tmp_path) -> None:
    tracking: Any = Records(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        refusal = Refusal("the loss is nan", [row("a", 2)])
        RefusedSteps(3, tracking, Counters()).note(1, UpdateResult({}, refused=[refusal]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = dict(tracking.events)
    assert "File too large" in told["dump_failed"]["error"] and told["refused_update"]["step"] == 1
