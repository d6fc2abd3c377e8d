"""What travels between the run and its scoring processes: one line of ASCII JSON a message, never a pickle.

Values JSON lacks (bytes, tuples, decimals, dates, dicts with other keys than text) travel tagged and come back as they
were; numpy scalars and arrays come back as numbers and lists.
"""

from __future__ import annotations

import base64
import datetime
from collections.abc import Mapping
from decimal import Decimal

# Bound here, so that a reward function that replaces json.dumps changes no message.
from json import dumps, loads
from typing import Any

_TAG = "$type"
_DATES: dict[str, Any] = {"datetime": datetime.datetime, "date": datetime.date, "time": datetime.time}


class NotPlain(TypeError):
    """A value is of a kind that cannot be sent to a scoring process; the message names the path to it."""


def encode(message: Any, name: str = "message") -> bytes:
    """One line. NotPlain names the place (in `name`) and the type of what cannot travel."""
    return dumps(to_plain(message, name), separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes) -> Any:
    """The message of a line. ValueError for a line that holds none."""
    return from_plain(loads(line))


def to_plain(value: Any, where: str = "value") -> Any:
    """`value` as something JSON can write. NotPlain names the place and type of what cannot travel."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        if all(isinstance(k, str) for k in value) and _TAG not in value:
            return {str(k): to_plain(v, f"{where}.{k}") for k, v in value.items()}
        pairs = [[to_plain(k, f"{where} key"), to_plain(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {_TAG: "dict", "v": pairs}
    if isinstance(value, list | tuple):
        items = [to_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "v": items}
    if isinstance(value, bytes | bytearray):
        return {_TAG: "bytes", "v": base64.b64encode(bytes(value)).decode("ascii")}
    if isinstance(value, Decimal):
        return {_TAG: "decimal", "v": str(value)}
    for name, kind in _DATES.items():
        if isinstance(value, kind):
            return {_TAG: name, "v": value.isoformat()}
    for simple in (str, int, float):  # subclasses: enumerations, numpy's float64
        if isinstance(value, simple):
            return simple(value)
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
