"""Copies in shared memory are in a folder of the user's own: others may write beside it, not in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.data import files
from verl.data.files import DataError


def test_the_folder_is_private(tmp_path: Path) -> None:
    folder = files._private(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700 and files._private(tmp_path) == folder


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    files._private(tmp_path).chmod(0o777)
    with pytest.raises(DataError, match="others can write to it"):
        files._private(tmp_path)


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder = files._private(tmp_path)
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="this user's own"):
        files._private(tmp_path)
