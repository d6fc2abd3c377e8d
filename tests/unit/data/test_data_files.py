"""Data files: kinds, laziness, concatenation, and what each mistake is answered with."""

from __future__ import annotations

import codecs
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.config.matching import nearest
from verl.data import files
from verl.data.files import DataError, RowFiles, contents, local_path, open_file

ROWS = [{"prompt": f"q{i}", "extra": {"index": i, "tags": ["a", "b"]}, "n": i} for i in range(7)]


def write(path: Path, rows: list[dict] = ROWS) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    elif path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in rows))
    else:
        path.write_text(json.dumps(rows, indent=1))
    return str(path)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json", "lines named .json"])
def test_every_kind_gives_plain_python_rows(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"x{suffix}")
    if suffix.startswith("lines"):
        Path(path).write_text("\n".join(json.dumps(row) for row in ROWS))
    file = open_file(path)
    assert len(file) == 7 and file.columns == ["prompt", "extra", "n"]
    assert [file.row(i) for i in (6, 0, 3)] == [ROWS[6], ROWS[0], ROWS[3]]
    assert type(file.row(2)["extra"]) is dict and type(file.row(2)["extra"]["tags"]) is list
    assert file.is_string("prompt") and not file.is_string("extra") and not file.is_string("n")


def test_files_are_concatenated_and_missing_columns_are_null(tmp_path: Path) -> None:
    one = write(tmp_path / "a.parquet", [{"prompt": "a", "x": 1}, {"prompt": "b", "x": 2}])
    two = write(tmp_path / "b.jsonl", [{"prompt": "c", "y": "z"}])
    rows = RowFiles([one, two])
    assert (len(rows), rows.columns, rows.sizes) == (3, ["prompt", "x", "y"], [2, 1])
    assert rows.row(1) == {"prompt": "b", "x": 2, "y": None}
    assert rows.row(2) == {"prompt": "c", "x": None, "y": "z"}
    assert rows.locate(2) == (1, 0)
    assert rows.rows(1, 3) == [rows.row(1), rows.row(2)]


def test_home_and_variables_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.parquet")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    assert len(RowFiles("~/x.parquet")) == len(RowFiles("$DATA_DIR/x.parquet")) == 7


def test_large_parquet_is_memory_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet")
    monkeypatch.setattr(files, "IN_MEMORY_BYTES", 10)
    rows = RowFiles(path, str(tmp_path / "cache"))
    assert [rows.row(i) for i in range(7)] == ROWS
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 1


def test_remote_files_are_copied_once(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    raw = Path(write(tmp_path / "x.parquet")).read_bytes()
    memory.pipe("/bucket/x.parquet", raw)
    cache = tmp_path / "cache"
    first = local_path("memory://bucket/x.parquet", str(cache))
    stamp = first.stat().st_mtime_ns
    assert RowFiles("memory://bucket/x.parquet", str(cache)).row(1) == ROWS[1]
    assert first.stat().st_mtime_ns == stamp
    memory.pipe("/bucket/x.parquet", raw + b" ")
    assert local_path("memory://bucket/x.parquet", str(cache)).stat().st_size == len(raw) + 1
    with pytest.raises(DataError, match="no such remote file"):
        local_path("memory://bucket/nothing.parquet", str(cache))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.parquet", None, ["no such file", "there.parquet"]),
        ("x" * 300 + ".parquet", None, ["no such file"]),
        ("empty.parquet", b"", ["empty"]),
        ("text.parquet", b"hello, this is no parquet file at all", ["not a parquet file", "starts with"]),
        ("lfs.parquet", b"version https://git-lfs.github.com/spec/v1\noid", ["git lfs pull"]),
        ("json.parquet", b'{"prompt": 1}', ["looks like JSON"]),
        ("bad.jsonl", b'{"a": 1}\n{"a": \n', ["line 2", "not JSON"]),
        ("list.jsonl", b"[1, 2]\n", ["line 1", "list"]),
        ("bad.json", b"[{]", ["not JSON"]),
        ("element.json", b"[1]", ["element 0"]),
        ("none.json", b"[]", ["no rows"]),
        ("x.csv", b"a,b", [".csv", ".parquet"]),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, words) -> None:
    write(tmp_path / "there.parquet")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        RowFiles(str(tmp_path / name))
    for word in [name, *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("before", [codecs.BOM_UTF8, b" " * 2000])
def test_an_array_begins_after_a_mark_and_blanks(tmp_path: Path, before: bytes) -> None:
    (tmp_path / "x.json").write_bytes(before + b'[{"prompt": "q"}]')
    assert len(RowFiles(str(tmp_path / "x.json"))) == 1


def test_parquet_without_rows_and_directories_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="no rows"):
        RowFiles(str(tmp_path / "none.parquet"))
    with pytest.raises(DataError, match=r"directory.*none\.parquet"):
        RowFiles(str(tmp_path))
    with pytest.raises(DataError, match="does not exist"):
        RowFiles(str(tmp_path / "no" / "x.parquet"))
    with pytest.raises(DataError, match="train_files"):
        RowFiles([])


def test_nearest_column_is_blind_to_case() -> None:
    assert nearest("reward", ["prompt", "Reward"]) == "; nearest: Reward"
    assert nearest("prompt", ["promt", "answer"]) == "; nearest: promt"
    assert nearest("data_source", ["x", "y"]) == ""


def test_copies_in_shared_memory_are_in_a_folder_of_the_users_own(tmp_path: Path) -> None:
    folder = files._private(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700 and files._private(tmp_path) == folder
    folder.chmod(0o777)
    with pytest.raises(DataError, match="others can write to it"):
        files._private(tmp_path)
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="this user's own"):
        files._private(tmp_path)


@pytest.mark.parametrize(
    "cells, filled",
    [
        ([[], []], False),
        ([None, None], False),
        (pa.array([[], None], pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.null()}))), False),
        ([[{"bytes": b"x", "path": None}], []], True),
    ],
)
def test_columns_of_nothing_are_not_filled(tmp_path: Path, cells: list, filled: bool) -> None:
    """A text model's data may have a column of images that holds none."""
    pq.write_table(pa.table({"prompt": ["a", "b"], "images": cells}), tmp_path / "rows.parquet")
    rows = open_file(str(tmp_path / "rows.parquet"))
    assert rows.filled("images") is filled and rows.filled("prompt")


def test_contents_are_known_by_their_bytes(tmp_path: Path) -> None:
    file, other = tmp_path / "a.parquet", tmp_path / "b.parquet"
    file.write_bytes(b"1")
    other.write_bytes(b"1")
    before = contents([file])
    assert before == contents([str(other)]) != contents([file, other])
    file.write_bytes(b"2")
    os.utime(file, ns=(1, 1))
    assert contents([file]) != before
    assert contents([file, tmp_path / "none"]) == contents(["hdfs://a/b.parquet"]) == ""
