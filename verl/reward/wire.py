"""What travels between the run and its scoring processes: JSON in frames over pipes, never a pickle.

A frame is 4 bytes of length (big endian) and that many bytes of ASCII JSON. Values JSON lacks (bytes, tuples,
decimals, dates, dicts with other keys than text) travel tagged and come back as they were; numpy scalars and
arrays come back as numbers and lists.
"""

from __future__ import annotations

import base64
import datetime
import json
import struct
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_TAG = "$type"
_HEADER = struct.Struct(">I")
_DATES: dict[str, Any] = {"datetime": datetime.datetime, "date": datetime.date, "time": datetime.time}


class NotPlain(TypeError):
    """A value is of a kind that cannot be sent to a scoring process; `where` is the path to it."""


def to_plain(value: Any, where: str = "value") -> Any:
    """`value` as something json can write. NotPlain names the place and type of what cannot travel."""
    if value is None or isinstance(value, bool | str):
        return str(value) if type(value) not in (bool, str, type(None)) else value
    if type(value) in (int, float):
        return value
    if isinstance(value, Mapping):
        if all(isinstance(k, str) for k in value) and _TAG not in value:
            return {str(k): to_plain(v, f"{where}.{k}") for k, v in value.items()}
        pairs = [[to_plain(k, f"{where} key"), to_plain(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {_TAG: "dict", "v": pairs}
    if isinstance(value, list):
        return [to_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "v": [to_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, bytes | bytearray):
        return {_TAG: "bytes", "v": base64.b64encode(bytes(value)).decode("ascii")}
    if isinstance(value, Decimal):
        return {_TAG: "decimal", "v": str(value)}
    for name, kind in _DATES.items():
        if isinstance(value, kind):
            return {_TAG: name, "v": value.isoformat()}
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if hasattr(value, "tolist"):  # numpy arrays and scalars, torch tensors
        return to_plain(value.tolist(), where)
    raise NotPlain(f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent")


def from_plain(value: Any) -> Any:
    """Inverse of `to_plain`."""
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {k: from_plain(v) for k, v in value.items()}
    content = value["v"]
    if kind == "tuple":
        return tuple(from_plain(v) for v in content)
    if kind == "dict":
        return {from_plain(k): from_plain(v) for k, v in content}
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "decimal":
        return Decimal(content)
    return _DATES[kind].fromisoformat(content)


def pack(message: Any) -> bytes:
    """One frame. The message must be plain (see `to_plain`)."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return _HEADER.pack(len(body)) + body


class Unpacker:
    """Takes bytes as they come and gives whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Messages completed by `data`, oldest first."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + size
            if len(self._buffer) < end:
                break
            messages.append(json.loads(bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return messages
