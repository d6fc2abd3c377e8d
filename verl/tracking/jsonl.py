"""JSON lines that survive a kill: one write per line, a torn last line mended when the file is opened again."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.data.files import written_whole


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
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    os.truncate(path, whole)
    return len(content) - whole


class JsonLines:
    """Appends objects to a file, one write each. What cannot be written (disk full) is kept and tried again.

    `warn(text)` hears of the first failure in a row, and of a file that something else took away, which is begun anew;
    nothing here raises OSError.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]):
        self.path = path
        self._warn = warn
        self._pending = b""
        self.failing = False
        """True while lines wait that cannot be written."""
        self._handle = -1
        self._flush()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one object; visible to readers when this returns."""
        self._pending += line(record)
        self._flush()

    def _flush(self, *, sync: bool = False) -> None:
        try:
            if self._handle >= 0 and self._taken_away():
                where = (
                    "it was deleted or replaced while the run wrote to it, "
                    f"with what else was in {self.path.parent} perhaps"
                )
                self._warn(f"{self.path} is gone: {where}; what it held is lost, later lines go to a new one")
                self._let_go()
            if self._handle < 0:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                mend(self.path)
                self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            while self._pending:
                self._pending = self._pending[os.write(self._handle, self._pending) :]
            if sync:
                os.fsync(self._handle)
            self.failing = False
        except OSError as error:
            if not self.failing:
                further = "the run goes on, the lines are kept and tried again"
                self._warn(f"{self.path} cannot be written ({error}); {further}")
            self.failing = True

    def _taken_away(self) -> bool:
        """True if what is open is no longer the file of that name: lines would go where nobody finds them."""
        try:
            return not os.path.samestat(os.fstat(self._handle), os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return True

    def close(self) -> None:
        """Try once more to write what is pending, sync, close. May be called twice."""
        self._flush(sync=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def write_whole(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file under its final name only when it is complete and on disk. OSError if it cannot be written."""
    with written_whole(path) as beside, open(beside, "wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """`write_whole` of JSON lines."""
    write_whole(path, map(line, records))
