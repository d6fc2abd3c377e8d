"""JSON lines that survive a kill: one write per line, a torn last line mended when the file is opened again."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def jsonable(value: Any) -> Any:
    """The value in terms of JSON: numpy and tensors become lists and numbers, NaN and infinities null, the rest str."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(v) for v in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    return str(value)


def line(record: Mapping[str, Any]) -> bytes:
    """One object as UTF-8 with its line end. Lone surrogates, which no reader would take, become "?"."""
    text = json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace") + b"\n"


def mend(path: Path) -> int:
    """Cut a torn last line off; returns the bytes removed (0: nothing to mend, or no such file)."""
    if not path.is_file():
        return 0
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        at = end
        while at > 0:
            start = max(0, at - 65536)
            file.seek(start)
            found = file.read(at - start).rfind(b"\n")
            if found >= 0:
                at = start + found + 1
                break
            at = start
        file.truncate(at)
        return end - at


class JsonLines:
    """Appends objects to a file, one write each. What cannot be written (disk full) is kept and tried again.

    `on_error(error)` hears of the first failure in a row; nothing here raises OSError.
    """

    def __init__(self, path: Path, on_error: Callable[[OSError], None]):
        self.path = path
        self._on_error = on_error
        self._pending = b""
        self._failing = self._closed = False
        self._handle = -1
        self._flush()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one object; visible to readers when this returns."""
        self._pending += line(record)
        self._flush()

    def _flush(self) -> None:
        if not self._closed:
            self._guarded(self._write)

    def _write(self) -> None:
        if self._handle < 0:
            mend(self.path)
            self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        while self._pending:
            self._pending = self._pending[os.write(self._handle, self._pending) :]

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._failing = False
        except OSError as error:
            if not self._failing:
                self._failing = True
                self._on_error(error)

    def close(self) -> None:
        """Try once more to write what is pending, sync, close. May be called twice."""
        self._flush()
        if self._handle >= 0 and not self._closed:
            self._guarded(lambda: os.fsync(self._handle))
            os.close(self._handle)
        self._closed = True


def write_whole(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file under its final name only when it is complete and on disk. OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    try:
        with open(beside, "wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """`write_whole` of JSON lines."""
    write_whole(path, map(line, records))
