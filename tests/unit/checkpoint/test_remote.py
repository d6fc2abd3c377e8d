"""Copies of checkpoints behind a URL: complete or not there, found and fetched again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.checkpoint.test_seal import content, write
from verl.checkpoint import CheckpointError, newest, open_checkpoint
from verl.checkpoint.remote import RemoteCopies


@pytest.fixture(params=["directory", "file", "memory"])
def url(request, tmp_path) -> str:
    if request.param == "memory":
        import fsspec

        fsspec.filesystem("memory").store.clear()
        return f"memory://{tmp_path.name}/copies"
    folder = tmp_path / "away" / "copies"
    return str(folder) if request.param == "directory" else f"file://{folder}"


def test_a_copy_comes_back_as_it_was(tmp_path, url) -> None:
    here, there = tmp_path / "run", tmp_path / "other_machine"
    copies = RemoteCopies(url)
    assert copies.newest() is None
    for step in (1, 2):
        assert copies.put(write(here, step)) > 10_000
    found = copies.newest()
    assert found is not None and (found.step, found.serial) == (2, 2)
    path = copies.fetch(found, there)
    assert path == there / "global_step_2"
    assert (path / "actor/model.safetensors").read_bytes() == content(2, "model")
    if "://" not in url:
        assert Path(url, "latest_checkpointed_iteration.txt").read_text() == "2"
    assert newest(there).loop_state == open_checkpoint(here / "global_step_2").loop_state


def test_what_was_sealed_last_is_newest_whatever_its_step(tmp_path, url) -> None:
    copies = RemoteCopies(url)
    for step in (7, 3):
        copies.put(write(tmp_path / "run", step))
    assert copies.newest().step == 3


def test_a_copy_that_broke_off_is_not_there(tmp_path, monkeypatch) -> None:
    away = tmp_path / "away"
    copies = RemoteCopies(str(away))
    copies.put(write(tmp_path / "run", 1))
    second = write(tmp_path / "run", 2)
    import fsspec

    local = type(fsspec.filesystem("file"))
    plain = local.put_file

    def torn(self, source, target, **options):
        if "actor_optim" in target:
            raise OSError(28, "No space left on device")
        return plain(self, source, target, **options)

    monkeypatch.setattr(local, "put_file", torn)
    with pytest.raises(CheckpointError, match=r"default_hdfs_dir=.*copying global_step_2 .*failed.*No space"):
        copies.put(second)
    assert (away / "global_step_2/actor/model.safetensors").exists() and copies.newest().step == 1
    monkeypatch.undo()
    copies.put(second)
    assert copies.newest().step == 2


def test_a_step_written_again_is_never_half_old(tmp_path, monkeypatch) -> None:
    """While a copy of the same step is replaced, its old manifest must not vouch for new files."""
    away = tmp_path / "away"
    copies = RemoteCopies(str(away))
    path = write(tmp_path / "run", 4)
    copies.put(path)
    (path / "actor/model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        copies.put(path)
    assert copies.newest() is None


def test_a_damaged_copy_is_refused_and_nothing_stays(tmp_path) -> None:
    away, there = tmp_path / "away", tmp_path / "there"
    copies = RemoteCopies(str(away))
    copies.put(write(tmp_path / "run", 5))
    file = away / "global_step_5/actor/model.safetensors"
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(CheckpointError, match="other content"):
        copies.fetch(copies.newest(), there)
    assert not (there / "global_step_5").exists() and newest(there) is None


@pytest.mark.parametrize("name", ["../../stolen", "actor/../../../stolen", "{root}/stolen"])
def test_a_manifest_that_names_files_outside_of_its_folder_is_refused(tmp_path, name: str) -> None:
    away, there = tmp_path / "away", tmp_path / "there/run"
    copies = RemoteCopies(str(away))
    copies.put(write(tmp_path / "run", 5))
    name = name.format(root=tmp_path / "there")
    seal = away / "global_step_5/manifest.json"
    record = json.loads(seal.read_text())
    record["files"][name] = record["files"]["actor/model.safetensors"]
    del record["sha256"]
    seal.write_text(json.dumps(record))
    (tmp_path / "stolen").write_bytes(content(5, "model"))
    with pytest.raises(CheckpointError, match=r"manifest.json names a file outside of its folder \('.*stolen'\)"):
        copies.fetch(copies.newest(), there)
    assert not (tmp_path / "there/stolen").exists()
    with pytest.raises(CheckpointError, match="outside of its folder"):
        open_checkpoint(away / "global_step_5")


def test_what_cannot_be_reached_is_named(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"trainer.default_hdfs_dir=nosuch://x: .*nosuch"):
        RemoteCopies("nosuch://x").newest()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match="copying global_step_1 there failed"):
        RemoteCopies(str(blocked / "below")).put(write(tmp_path / "run", 1))
