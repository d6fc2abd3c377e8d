"""Data files as numbered rows: parquet, JSON arrays and JSON lines, local or remote, read lazily.

Rows come out as plain Python values: structs are dicts, lists are lists, never arrays. Nothing here
imports torch, so that `--check` can look at files in milliseconds.
"""

from __future__ import annotations

import codecs
import difflib
import hashlib
import json
import os
import re
import shutil
import stat
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.matching import nearest
from verl.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

Paths = str | Sequence[str]
"""One file, or several that are read one after the other."""
# A parquet file larger than this, decoded, is unpacked once into the cache and memory-mapped from there.
IN_MEMORY_BYTES = 256 * 2**20
MOST_NESTED = 64
"""Levels of lists and objects in a row: what copies, sends and writes rows works by recursion."""


class DataError(UserError):
    """The user's data or its description cannot be used. The message says what to change.

    `records` are rows of data_report.jsonl that explain a refusal, where there are any.
    """

    def __init__(self, message: str, records: Sequence[dict[str, Any]] = ()):
        super().__init__(message)
        self.records = list(records)


class UnreadableRow(dict[str, Any]):
    """Stands for a row that cannot be had as Python values: it has no columns. `problem`, `detail`: as of a bad row."""

    def __init__(self, problem: str, detail: str):
        super().__init__()
        self.problem = problem
        self.detail = detail


# ---------------------------------------------------------------------------------------------------- places


def is_remote(path: str) -> bool:
    """True for URLs such as s3://bucket/x or hdfs://host/x; file:// counts as local."""
    return "://" in path and not path.startswith("file://")


def local_path(path: str, cache_dir: str | None = None, *, use_shm: bool = False) -> Path:
    """The local file of `path`: `~` and variables expanded; a remote one is copied once to `cache_dir`.

    A cached copy is used again while its size equals the remote one's. With `use_shm` the result is a copy
    in /dev/shm. Raises DataError for a missing file, a directory, or a protocol that cannot be read.
    """
    if is_remote(path):
        local = _fetch(path, cache_dir)
    else:
        local = Path(os.path.expandvars(path.removeprefix("file://"))).expanduser()
    if os.path.isdir(local):
        files = sorted(p.name for p in local.iterdir() if p.suffix in _READERS)
        content = f"it holds {', '.join(files[:6])}" if files else "it holds no parquet, json or jsonl file"
        raise DataError(f"{path}: this is a directory, name the file itself ({content})")
    if not os.path.isdir(local.parent):
        problem = f"no such file (the folder {local.parent} does not exist)"
        raise DataError(f"{path}: {problem}; `verl prepare` makes data sets")
    if not os.path.exists(local):  # Path.exists raises for a name that is too long
        raise DataError(f"{path}: no such file{files_beside(local, tuple(_READERS))}")
    shm = Path("/dev/shm")
    if use_shm and shm.is_dir() and shm not in local.parents:
        copy = _cached(str(_private(shm)), str(local.resolve()), local.name)
        if not copy.exists() or copy.stat().st_size != local.stat().st_size:
            with written_whole(copy) as beside:
                shutil.copyfile(local, beside)
        return copy
    return local


def _private(shared: Path) -> Path:
    """This user's own folder in one that all users may write to. DataError if it belongs to another user."""
    folder = shared / f"verl-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        why = "others can write to it or it is not this user's own"
        raise DataError(f"{folder}: {why}; remove it, or leave use_shm off")
    return folder


def files_beside(path: Path, suffixes: tuple[str, ...]) -> str:
    """For messages about a file that is missing: the names like its own in its folder, else the first ones."""
    names = sorted(p.name for p in path.parent.glob("*") if p.suffix in suffixes)
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.4) or names[:3]
    return f"; in that folder: {', '.join(close)}" if close else ""


def contents(paths: Sequence[Any]) -> str:
    """A digest of local files' bytes, of their sizes alone above a gigabyte; "" where one is no local file."""
    files = [Path(str(path)).expanduser() for path in paths]
    if not all(file.is_file() for file in files):
        return ""
    return _digest(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


@cache
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    sizes = [size for _, size, _ in files]
    digest = hashlib.sha256(repr(sizes).encode())
    for file, *_ in files if sum(sizes) <= 2**30 else ():
        with file.open("rb") as opened:
            hashlib.file_digest(opened, lambda: digest)
    return digest.hexdigest()[:16]


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """A path beside `target`, which takes its place once the block has written it, and is removed if it fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield beside
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def naming(path: str, failure: str) -> Iterator[None]:
    """Turn any exception of a library into a DataError that names the file and the failure.

    Damaged bytes and unreachable services raise almost anything.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: {failure}: {_said(error)}") from error


def _said(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def _cached(cache_dir: str | None, key: str, name: str) -> Path:
    cache = Path(os.path.expanduser(cache_dir or "~/.cache/verl/rlhf"))
    return cache / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}-{name[-50:]}"


def _fetch(url: str, cache_dir: str | None) -> Path:
    import fsspec

    target = _cached(cache_dir, url, url.split("?", 1)[0].rsplit("/", 1)[-1])
    with naming(url, f"copying it to {target.parent} (data.cache_dir) failed"):
        system, remote = fsspec.core.url_to_fs(url)
        try:
            size = system.info(remote).get("size")
        except FileNotFoundError as error:
            raise DataError(f"{url}: no such remote file") from error
        if not (target.exists() and size in (None, target.stat().st_size)):
            with written_whole(target) as beside:
                system.get_file(remote, str(beside))
    return target


# --------------------------------------------------------------------------------------------------- one file


class RowFile(ABC):
    """One file. `path` is what the user wrote, `local` where it lies; columns in file order."""

    def __init__(self, path: str, local: Path):
        self.path = path
        self.local = local
        self.columns: list[str] = []

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Rows start..stop−1 (from 0) as plain Python values; UnreadableRow for one that cannot be had so."""

    @abstractmethod
    def is_string(self, column: str) -> bool:
        """True if the column holds strings (by schema; JSON: where any value is one)."""

    def need(self, name: str, key: str, hint: str = "") -> None:
        """DataError where there is no such column; `key` is the config key that names the column ("" if none)."""
        if name not in self.columns:
            fix = f"rename it, or set {key}=COLUMN" if key else "rename the column"
            choices = f"{nearest(name, self.columns)} (columns: {', '.join(self.columns)})"
            raise DataError(f"{self.path}: there is no column {name!r}{choices}; {fix}{hint}")

    def row(self, number: int) -> dict[str, Any]:
        """Row `number`."""
        return self.rows(number, number + 1)[0]

    def first(self, count: int) -> list[dict[str, Any]]:
        """The first rows, as few as there are."""
        return self.rows(0, min(count, len(self)))

    def values(self, column: str) -> list[Any]:
        """The different values of a column where they are plain, else all; None where one cannot be had."""
        return [row.get(column) for row in self.rows(0, len(self))]

    def filled(self, column: str) -> bool:
        """True if the column holds anything, as far as can be told without reading much."""
        return any(row.get(column) for row in self.first(1000))


class ParquetFile(RowFile):
    """Parquet. Only the footer is read on opening; the rows on first use."""

    def __init__(self, path: str, local: Path, cache_dir: str | None = None):
        import pyarrow.parquet as pq

        super().__init__(path, local)
        with naming(path, f"not a parquet file ({_looks_like(local)})"):
            self._meta = pq.read_metadata(local)
            self._schema = self._meta.schema.to_arrow_schema()
            self.columns = list(self._schema.names)
            groups = [self._meta.row_group(i) for i in range(self._meta.num_row_groups)]
        if twice := [name for name, count in Counter(self.columns).items() if count > 1]:
            raise DataError(f"{path}: column {twice[0]!r} is there more than once; rename or drop one")
        if sum(group.num_rows for group in groups) != self._meta.num_rows:
            raise DataError(f"{path}: damaged: its parts do not have the number of rows that it states")
        self._decoded_bytes = sum(group.total_byte_size for group in groups)
        self._cache_dir = cache_dir
        self._table: pa.Table | None = None

    def __len__(self) -> int:
        return int(self._meta.num_rows)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_table": None}

    def is_string(self, column: str) -> bool:
        import pyarrow.types as kind

        column_type = self._schema.field(column).type
        if kind.is_dictionary(column_type):
            column_type = column_type.value_type
        return bool(kind.is_string(column_type) or kind.is_large_string(column_type))

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        if not 0 <= start < stop <= len(self):
            raise IndexError(f"{self.path}: rows {start}..{stop} of {len(self)}")
        return _python_rows(self._open().slice(start, stop - start))

    def first(self, count: int) -> list[dict[str, Any]]:
        """The first rows; no more is read."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        with naming(self.path, "reading it failed"):
            batch = next(pq.ParquetFile(self.local).iter_batches(batch_size=count))
        return _python_rows(pa.Table.from_batches([batch]))

    def values(self, column: str) -> list[Any]:
        """As of any file; the column alone is read."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        with naming(self.path, f"reading column {column!r} failed"):
            cells = pq.read_table(self.local, columns=[column], partitioning=None).column(column)
            if self.is_string(column):
                cells = cells.unique()
        return [row.get(column) for row in _python_rows(pa.table({column: cells}))]

    def filled(self, column: str) -> bool:
        """As of any file, from the statistics: nothing is read."""
        with naming(self.path, "its statistics cannot be read"):
            leaves = [(number, self._meta.schema.column(number)) for number in range(self._meta.num_columns)]
            column_leaves = [number for number, leaf in leaves if leaf.path.split(".")[0] == column]
            # A column of nulls alone, also of empty lists that tell no type, has no statistics.
            typed = [number for number in column_leaves if leaves[number][1].logical_type.type != "UNKNOWN"]
            groups = [self._meta.row_group(number) for number in range(self._meta.num_row_groups)]
            statistics = [(c.num_values, c.statistics) for group in groups for c in map(group.column, typed)]
            return any(s is None or s.null_count is None or count > s.null_count for count, s in statistics)

    def _open(self) -> pa.Table:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._table is None:
            with naming(self.path, "reading it failed"):
                if self._decoded_bytes <= IN_MEMORY_BYTES:
                    table = pq.read_table(self.local, partitioning=None)
                else:
                    table = pa.ipc.open_file(pa.memory_map(str(self._unpack()))).read_all()
            if (table.num_rows, table.column_names) != (len(self), self.columns):
                raise DataError(f"{self.path}: damaged: its rows or columns are others than it states")
            self._table = table
        return self._table

    def _unpack(self) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        facts = self.local.stat()
        key = f"{self.local.resolve()}|{facts.st_size}|{facts.st_mtime_ns}"
        target = _cached(self._cache_dir, key, f"{self.local.stem}.arrow")
        if not target.exists():
            source = pq.ParquetFile(self.local)
            with (
                written_whole(target) as beside,
                pa.OSFile(str(beside), "wb") as sink,
                pa.ipc.new_file(sink, source.schema_arrow) as writer,
            ):
                for batch in source.iter_batches(batch_size=1024):
                    writer.write_batch(batch)
        return target


def _python_rows(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a table; UnreadableRow for one with text that is not UTF-8, a time out of range and the like."""
    try:
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows
    except Exception:  # it depends on the type; which rows, is found below
        return [_python_row(table, number) for number in range(len(table))]


def _python_row(table: pa.Table, number: int) -> dict[str, Any]:
    row = {}
    for name in table.column_names:
        try:
            row[name] = table.column(name)[number].as_py()
        except Exception as error:
            return UnreadableRow("unreadable cell", f"column {name!r}: {_said(error)}")
    return row


class JsonFile(RowFile):
    """A JSON array of objects, or one JSON object per line (blank lines are not rows); held in memory as text."""

    def __init__(self, path: str, local: Path, cache_dir: str | None = None):
        super().__init__(path, local)
        content, unit = local.read_bytes().removeprefix(codecs.BOM_UTF8), "line"
        if local.suffix.lower() == ".json" and content.lstrip()[:1] == b"[":
            numbered, unit = list(enumerate(self._parse("the file", content))), "element"
        else:
            lines = enumerate(content.split(b"\n"), 1)
            numbered = [(i, self._parse(f"line {i}", line)) for i, line in lines if line.strip()]
        self._strings: dict[str, bool] = {}
        self._rows: list[str | UnreadableRow] = []
        for number, value in numbered:
            if not isinstance(value, dict):
                raise DataError(f"{path}: {unit} {number} is a JSON {type(value).__name__}, not an object")
            for name, cell in value.items():
                self._strings[name] = self._strings.get(name, False) or isinstance(cell, str)
            self._rows.append(_kept(value))
        self.columns = list(self._strings)

    def _parse(self, where: str, text: bytes) -> Any:
        try:
            return json.loads(text)
        except RecursionError as error:
            raise DataError(f"{self.path}: {where} is nested more than {MOST_NESTED} levels deep") from error
        except ValueError as error:
            raise DataError(f"{self.path}: {where} is not JSON: {error}") from error

    def __len__(self) -> int:
        return len(self._rows)

    def is_string(self, column: str) -> bool:
        return self._strings.get(column, False)

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        return [self._row(stored) for stored in self._rows[start:stop]]

    def _row(self, stored: str | UnreadableRow) -> dict[str, Any]:
        if isinstance(stored, UnreadableRow):
            return stored
        value = json.loads(stored)
        return {name: value.get(name) for name in self.columns}


def _kept(value: dict[str, Any]) -> str | UnreadableRow:
    """A JSON object as text, or why it cannot be a row."""
    if _nested_too_deep(value):
        return UnreadableRow("nested too deep", f"more than {MOST_NESTED} levels of lists and objects")
    text = json.dumps(value)
    try:
        if "\\ud" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return UnreadableRow("unreadable cell", f"text with half of a surrogate pair: {_said(error)}")
    return text


def _nested_too_deep(value: Any, levels: int = MOST_NESTED) -> bool:
    if not isinstance(value, list | dict):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_nested_too_deep(item, levels - 1) for item in inside)


def _looks_like(local: Path) -> str:
    with local.open("rb") as file:
        head = file.read(64)
    kinds = {
        b"version https://git-lfs": "it is a Git LFS pointer: run `git lfs pull`",
        **dict.fromkeys((b"{", b"["), "it looks like JSON: name it .jsonl or .json"),
        b"<": "it looks like a web page",
        b"PAR1": "it begins as one: cut short or damaged",
    }
    kinds_by_start = (text for start, text in kinds.items() if head.lstrip().startswith(start))
    return next(kinds_by_start, f"it starts with {head[:8]!r}")


_READERS: dict[str, Any] = {".parquet": ParquetFile} | dict.fromkeys((".jsonl", ".ndjson", ".json"), JsonFile)


_TASKS = "tasks:"
TASK_FILES = ("task.toml", "task.yaml")
"""What a folder of Harbor, and one of terminal-bench, has."""


def tasks_of(folder: Path) -> list[Path]:
    """The folders of tasks in a folder, or it alone if it is one."""
    if any((folder / name).is_file() for name in TASK_FILES):
        return [folder]
    return sorted({file.parent for name in TASK_FILES for file in folder.glob(f"*/{name}")})


class TaskRows(RowFile):
    """Rows of tasks that have no file of their own. DataError for a path that names none.

    tasks:500, tasks:500-600   places in the taskset of an environment: extra_info.index
    tasks:FOLDER               task folders of Harbor or terminal-bench: extra_info.task
    """

    def __init__(self, path: str):
        place = path.removeprefix(_TASKS)
        super().__init__(path, Path(place).expanduser())
        self.columns = ["data_source", "extra_info"]
        if ends := re.fullmatch(r"(?:(\d+)-)?(\d+)", place):
            self._tasks: list[dict[str, Any]] = [{"index": i} for i in range(int(ends[1] or 0), int(ends[2]))]
        else:
            folders = tasks_of(self.local)
            self._tasks = [{"task": "" if folder == self.local else folder.name} for folder in folders]
        if not self._tasks:
            raise DataError(
                f"{path}: it names no tasks: tasks:500, tasks:500-600, or tasks:FOLDER with folders of tasks"
            )

    def __len__(self) -> int:
        return len(self._tasks)

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """See `RowFile.rows`."""
        source = self.local.name if "task" in self._tasks[0] else "tasks"
        return [{"data_source": source, "extra_info": task} for task in self._tasks[start:stop]]

    def is_string(self, column: str) -> bool:
        """See `RowFile.is_string`."""
        return column == "data_source"


def open_file(path: str, cache_dir: str | None = None, *, use_shm: bool = False) -> RowFile:
    """Open one file by its extension (parquet, json, jsonl), or the rows of `tasks:…`. Raises DataError, also for a
    file without rows."""
    if path.startswith(_TASKS):
        return TaskRows(path)
    local = local_path(path, cache_dir, use_shm=use_shm)
    suffix = Path(path.split("?", 1)[0]).suffix.lower()
    if suffix not in _READERS:
        raise DataError(f"{path}: unknown kind of file {suffix!r}; known: {', '.join(_READERS)}")
    if local.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty (0 bytes)")
    file: RowFile = _READERS[suffix](path, local, cache_dir)
    if len(file) == 0:
        raise DataError(f"{path}: the file has no rows")
    return file


# ------------------------------------------------------------------------------------------------ several files


class RowFiles:
    """Files one after the other as one sequence of rows. Columns are the union, in order of appearance.

    `files` may be one path or a list. Raises DataError for anything that cannot be opened.
    """

    def __init__(self, files: Paths, cache_dir: str | None = None, *, use_shm: bool = False):
        paths = [files] if isinstance(files, str | os.PathLike) else list(files)
        if not paths:
            raise DataError("no data file is named; set data.train_files (or data.val_files)")
        self.files = [open_file(str(path), cache_dir, use_shm=use_shm) for path in paths]
        self.paths = [file.path for file in self.files]
        self.columns = list(dict.fromkeys(name for file in self.files for name in file.columns))
        self._starts = [0]
        for file in self.files:
            self._starts.append(self._starts[-1] + len(file))

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def sizes(self) -> list[int]:
        """Rows of each file."""
        return [len(file) for file in self.files]

    def locate(self, index: int) -> tuple[int, int]:
        """(file number, row number in that file) of the row `index` of the whole."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    def row(self, index: int) -> dict[str, Any]:
        """Row `index` of the whole; a column that its file lacks is None."""
        return self.rows(index, index + 1)[0]

    __getitem__ = row

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Rows start..stop−1 of the whole."""
        out: list[dict[str, Any]] = []
        for number, file in enumerate(self.files):
            first = self._starts[number]
            low, high = max(start, first), min(stop, first + len(file))
            out += file.rows(low - first, high - first) if low < high else []
        return [self._with_every_column(row) for row in out] if len(self.files) > 1 else out

    def _with_every_column(self, row: dict[str, Any]) -> dict[str, Any]:
        return row if isinstance(row, UnreadableRow) else {name: row.get(name) for name in self.columns}


def notice(text: str) -> None:
    """One line to the user, on standard error."""
    print(f"[data] {text}", file=sys.stderr, flush=True)
