"""A list of tensors that holds code is refused before any of it runs."""

from __future__ import annotations

import os
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from verl.engine.training.fsdp.optimizer_state import StateReader, load_state, save_state
from verl.errors import UserError


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, torch.optim.Optimizer, dict[str, Any]]:
    parameter = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    names = {"layer.weight": parameter}
    save_state(tmp_path / "optim", optimizer, names, 7)
    return tmp_path / "optim", optimizer, names


def test_what_torch_writes_is_read(saved) -> None:
    folder, optimizer, names = saved
    before = {k: v.clone() for k, v in optimizer.state[names["layer.weight"]].items()}
    optimizer.state.clear()
    assert load_state(folder, optimizer, names) == 7
    after = optimizer.state[names["layer.weight"]]
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


def test_the_list_is_the_one_that_torch_reads(tmp_path: Path) -> None:
    state = {
        "a": torch.randn(3),
        "b/c": torch.zeros(2, 2, dtype=torch.bfloat16),
        "n": torch.tensor(1),
        "e": torch.zeros(0),
    }
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    mine, theirs = StateReader(tmp_path).read_metadata(), dcp.FileSystemReader(tmp_path).read_metadata()
    assert mine.state_dict_metadata == theirs.state_dict_metadata
    assert {k: v.relative_path for k, v in mine.storage_data.items()} == {
        k: v.relative_path for k, v in theirs.storage_data.items()
    }


class Bomb:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.target),)


def test_code_in_the_list_does_not_run(saved, tmp_path: Path) -> None:
    folder, optimizer, names = saved
    trap = tmp_path / "trap"
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(trap)))
    with pytest.raises(UserError, match=r"mkdir.*not read"):
        load_state(folder, optimizer, names)
    assert not trap.exists()
    with pytest.raises(FileExistsError):  # the bomb is a real one
        trap.mkdir()
        pickle.loads(pickle.dumps(Bomb(trap)))


def test_files_outside_of_the_folder_and_rubbish_are_refused(saved) -> None:
    folder, optimizer, names = saved
    listing = pickle.loads((folder / ".metadata").read_bytes())
    for stored in listing.storage_data.values():
        stored.relative_path = PurePosixPath("../elsewhere.distcp")
    (folder / ".metadata").write_bytes(pickle.dumps(listing))
    with pytest.raises(UserError, match="outside of its folder"):
        load_state(folder, optimizer, names)
    for rubbish in (b"", b"not a pickle", pickle.dumps({"a": 1})):
        (folder / ".metadata").write_bytes(rubbish)
        with pytest.raises(UserError, match="no list of tensors"):
            load_state(folder, optimizer, names)
