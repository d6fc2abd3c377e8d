"""Checkpoints: round trip, damage, retention, failures, other systems' layouts, random states."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.saving import save
from verl.checkpoint import CheckpointError, manifest, newest, open_checkpoint, read, resolve_resume
from verl.checkpoint.read import clean
from verl.checkpoint.write import CheckpointWriter


class Events(list):
    def __call__(self, kind: str, **fields: Any) -> None:
        self.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self]


def content(step: int, name: str, size: int = 5000) -> bytes:
    return random.Random(f"{step}/{name}").randbytes(size)


def parts_for(step: int) -> dict[str, Any]:
    def actor(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(content(step, "model"))
        (directory / "config.json").write_text("{}")

    def optim(directory: Path) -> None:
        (directory / "deep").mkdir()
        (directory / "deep" / "part_0").write_bytes(content(step, "optim"))

    return {"actor": actor, "state/actor_optim": optim}


def write(root: Path, step: int, **kwargs: Any) -> Path | None:
    return save(root, step, parts_for(step), loop_state={"position": step * 10, "beta": 0.1}, **kwargs)


def test_round_trip(tmp_path):
    events = Events()
    assert newest(tmp_path / "absent") is newest(tmp_path) is None
    path = write(tmp_path, 3, on_event=events)
    assert path == tmp_path / "global_step_3"
    found = newest(tmp_path)
    assert found is not None
    assert (found.step, found.path) == (3, path)
    assert found.loop_state == {"step": 3, "position": 30, "beta": 0.1}
    assert (found.part("actor") / "model.safetensors").read_bytes() == content(3, "model")
    assert (found.part("state/actor_optim") / "deep" / "part_0").read_bytes() == content(3, "optim")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert events.kinds() == ["checkpoint_saved"]
    assert events[0][1]["bytes"] == found.manifest.size > 10_000
    assert {p.name for p in tmp_path.iterdir()} == {"global_step_3", "latest_checkpointed_iteration.txt"}
    with pytest.raises(CheckpointError, match=r"no critic/.*save_contents"):
        found.part("critic")


@pytest.mark.parametrize("hashes", [True, False])
def test_a_file_of_another_size_is_named_whether_or_not_contents_are_read(tmp_path, hashes):
    path = write(tmp_path, 3)
    with (path / "actor" / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match=r"actor/model.safetensors has \d+ bytes instead of \d+"):
        open_checkpoint(path, hashes=hashes)


def test_retention_deletes_the_oldest_and_nothing_that_is_not_ours(tmp_path):
    """Also in a run started again from step 1 where an older run left step 100; newest is what was sealed last."""
    foreign = tmp_path / "global_step_50" / "actor"
    foreign.mkdir(parents=True)
    (foreign / "model_world_size_1_rank_0.pt").write_bytes(b"x")
    for step, left in ((98, [50, 98]), (99, [50, 98, 99]), (100, [50, 99, 100]), (1, [1, 50, 100])):
        write(tmp_path, step, keep=2)
        kept = {p.name for p in manifest.step_directories(tmp_path)}
        assert kept == {f"global_step_{number}" for number in left} and newest(tmp_path).step == step
    assert manifest.stale_entries(tmp_path) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    write(tmp_path, 7)
    path = save(tmp_path, 7, {"actor": lambda d: (d / "new").write_text("new")}, loop_state={})
    assert path is not None and [p.name for p in (path / "actor").iterdir()] == ["new"]
    assert manifest.stale_entries(tmp_path) == []
    open_checkpoint(path)


class Killed(BaseException):
    """Stands for the process ending at this very call: no handler of ours may run."""


CALLS = ["fsync", "rename", "replace", "mkdir", "rmdir", "unlink"]


def count_and_stop(monkeypatch, at: int, error: BaseException) -> list[int]:
    """Let the file system calls that saving makes succeed until call number `at`, which raises."""
    calls = [0]

    def counted() -> None:
        calls[0] += 1
        if calls[0] == at or (calls[0] > at and isinstance(error, Killed)):
            raise error

    def wrap(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted()
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    real_open = open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "w" in mode:
            counted()
        return real_open(file, mode, *args, **kwargs)

    monkeypatch.setattr("builtins.open", opened)
    return calls


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step"])
@pytest.mark.parametrize("kind", ["kill", "disk full"])
def test_stop_at_every_single_call(tmp_path, kind, again):
    """Whatever call is the last one (or fails), the newest complete checkpoint is the old or the new one, whole."""
    step = 2 if again else 3
    outcomes = set()
    write(tmp_path / "start", 1)
    write(tmp_path / "start", 2)
    for at in range(1, 200):
        root = tmp_path / str(at)
        shutil.copytree(tmp_path / "start", root)
        events = Events()
        error = Killed() if kind == "kill" else OSError(errno.ENOSPC, "No space left on device")
        parts = {"actor": lambda d: (d / "model.safetensors").write_bytes(content(99, "model"))}
        result = None
        with pytest.MonkeyPatch.context() as patch:
            calls = count_and_stop(patch, at, error)
            with contextlib.suppress(Killed):
                result = save(root, step, parts, loop_state={"n": 99}, keep=2, on_event=events)
        found = newest(root)
        assert found is not None
        new = found.loop_state.get("n") == 99
        outcomes.add(new)
        assert found.step == (step if new else 2)
        expected = content(99, "model") if new else content(2, "model")
        assert (found.part("actor") / "model.safetensors").read_bytes() == expected
        assert not list(root.glob("global_step_*.tmp"))
        if kind == "disk full":
            assert (result is None) == ("checkpoint_failed" in events.kinds())
        if result is not None:
            assert new
        if calls[0] < at:
            break
    else:
        pytest.fail("saving makes more calls than expected")
    assert outcomes == {False, True}


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_a_file_or_link_in_the_place_of_the_temporary_folder_is_removed(tmp_path, kind):
    for step in (1, 2):  # one in the way of the save, one that only a start meets
        if kind == "file":
            (tmp_path / f"global_step_{step}.tmp").write_text("x")
        else:
            (tmp_path / "elsewhere").mkdir(exist_ok=True)
            target = "elsewhere" if kind == "link" else "nowhere"
            (tmp_path / f"global_step_{step}.tmp").symlink_to(tmp_path / target)
    assert write(tmp_path, 1) is not None
    clean(tmp_path)
    assert newest(tmp_path).step == 1 and not list(tmp_path.glob("*.tmp"))
    assert kind != "link" or (tmp_path / "elsewhere").is_dir(), "what a link points to stays"


def test_stale_left_overs_are_removed_but_a_sealed_one_is_published(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "global_step_2").rename(tmp_path / "global_step_2.tmp")
    (tmp_path / "global_step_3.tmp" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_1.deleted0.tmp").mkdir()
    assert newest(tmp_path, tidy=False).step == 1
    assert len(manifest.stale_entries(tmp_path)) == 3
    events = Events()
    clean(tmp_path, on_event=events)
    assert manifest.stale_entries(tmp_path) == []
    assert newest(tmp_path).step == 2
    left = ["checkpoint_stale_removed"] * 2 + ["checkpoint_unfinished"]
    assert sorted(events.kinds()) == ["checkpoint_completed", *left]


def test_resolve_resume(tmp_path):
    root = tmp_path / "run"
    write(root, 1)
    write(root, 2)
    assert resolve_resume("disable", None, root) is None
    assert resolve_resume("auto", None, root).step == 2
    assert resolve_resume("auto", None, tmp_path / "fresh") is None
    assert resolve_resume("resume_path", root, tmp_path / "fresh").step == 2
    assert resolve_resume("resume_path", str(root / "global_step_1") + "/", tmp_path / "fresh").step == 1
    assert resolve_resume("resume_path", root / "global_step_1" / "actor", tmp_path / "fresh").step == 1
    for mode, path, message in [
        ("resume_path", tmp_path / "nowhere", "does not exist"),
        ("resume_path", tmp_path, "no global_step_N"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            resolve_resume(mode, path, root)


def make(path: Path, *names: str) -> Path:
    for name in names:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"{}")
    return path


def test_other_layouts_are_recognised_and_explained(tmp_path):
    nine = "global_step_9"
    shards = make(tmp_path / "a" / nine, "actor/model_world_size_8_rank_0.pt", "actor/fsdp_config.json")
    face = "actor/huggingface"
    saved = make(tmp_path / "b" / nine, f"{face}/config.json", f"{face}/model.safetensors")
    megatron = make(tmp_path / "c" / nine, "actor/dist_ckpt/x", "actor/transformer_config.json")
    plain = make(tmp_path / "hf", "config.json", "model.safetensors")
    assert "peft" in read.foreign(make(tmp_path / "peft", "adapter_config.json"))
    assert not any(map(read.foreign, (tmp_path / "a", tmp_path / "nothing")))
    for path, advice in (shards, "merged"), (saved, f"model.path=.*{face}"), (megatron, "dist_ckpt"):
        with pytest.raises(CheckpointError, match=advice):
            resolve_resume("resume_path", path, tmp_path / "run")
        events = Events()
        assert resolve_resume("auto", None, path.parent, on_event=events) is None
        assert "public verl" in events[0][1]["message"]
    with pytest.raises(CheckpointError, match=r"actor_rollout_ref\.model\.path"):
        resolve_resume("resume_path", plain, tmp_path / "run")


def test_newer_format_is_refused_with_the_reason(tmp_path):
    path = write(tmp_path, 1)
    record = json.loads((path / "manifest.json").read_text())
    record["format"] = 99
    (path / "manifest.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="format 99"):
        open_checkpoint(path)


def test_a_manifest_that_was_changed_is_none_and_one_from_before_its_own_seal_is(tmp_path):
    write(tmp_path, 1)
    file = write(tmp_path, 2) / "manifest.json"
    sealed = file.read_text()
    for old, new in (
        ('"serial": 2', '"serial": 9'),
        ('"size": 5000', '"size": 5001'),
        ('"step": 2', '"step": 7'),
    ):
        assert old in sealed
        file.write_text(sealed.replace(old, new))
        assert newest(tmp_path).step == 1
        with pytest.raises(CheckpointError, match="not what was written"):
            open_checkpoint(file.parent)
    record = json.loads(sealed)
    del record["sha256"]
    file.write_text(json.dumps(record))
    assert newest(tmp_path).step == 2


def test_links_are_refused(tmp_path):
    events = Events()
    linked = {"actor": lambda d: (d / "x").symlink_to("/etc/hosts")}
    assert save(tmp_path, 1, linked, loop_state={}, on_event=events) is None
    assert "not a plain file" in events[0][1]["error"]


def test_random_states_continue_bit_for_bit(tmp_path):
    import torch

    from verl.checkpoint import rng

    def draw() -> tuple[Any, ...]:
        plain, numpy = (random.random(), random.gauss(0, 1)), (np.random.rand(), np.random.randn())
        return plain, numpy, torch.rand(3).tolist()

    draw()
    rng.save(tmp_path)
    expected = [draw() for _ in range(3)]
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        rng.load(tmp_path)
        assert [draw() for _ in range(3)] == expected
    (tmp_path / "rng.json").write_text("{")
    with pytest.raises(CheckpointError, match="random states"):
        rng.load(tmp_path)


def test_reading_and_writing_need_no_torch():
    code = "import sys, verl.checkpoint; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_a_save_that_fails_with_the_run_does_not_say_that_the_run_goes_on(tmp_path):
    class Lost(RuntimeError):
        ends_the_run = True

    def lost(directory: Path) -> None:
        raise Lost("training worker 1 died")

    events = Events()
    unsealed = CheckpointWriter(tmp_path, 1, on_event=events)
    with pytest.raises(Lost):
        unsealed.fill({"actor": lost}, {})
    (kind, fields), *_ = events
    assert kind == "checkpoint_failed" and "training worker 1 died" in fields["message"]
    assert "goes on" not in fields["message"] and "stay" in fields["message"]


def test_a_bit_of_a_manifest_flipped_is_found_or_changes_nothing(tmp_path):
    top = write(tmp_path, 1)
    file, whole, found = top / manifest.NAME, manifest.read_manifest(top), 0
    content = file.read_bytes()
    for place, byte in enumerate(content):
        file.write_bytes(content[:place] + bytes([byte ^ 1 << place % 8]) + content[place + 1 :])
        try:
            assert manifest.read_manifest(top) == whole, place
        except CheckpointError:
            found += 1
    assert found > 0.9 * len(content)
