"""From what was written to the type the schema names: numbers, booleans, lists of one, null, paths."""

from __future__ import annotations

import math
import os
import re
import typing
from typing import Any

from verl.config.grammar import NULLS, GrammarError, Value, parse_value, split
from verl.config.schema.base import Map
from verl.config.schema.fields import Field, type_name

_TRUE = {"true", "yes", "on", "1", "y"}
_FALSE = {"false", "no", "off", "0", "n"}
_NUMBER = re.compile(r"[+-]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.I)
_NAME_BYTES, _PATH_BYTES = 255, 4096  # of Linux
_KINDS = {bool: "True or False", int: "a whole number", float: "a number"}


def coerce(value: Value, field: Field) -> Any:
    """The value in the key's type. Raises GrammarError."""
    data = value.data
    if data is None or (isinstance(data, str) and data in NULLS and field.nullable):
        if field.nullable:
            return None
        if field.is_map:
            return Map()
        raise GrammarError(f"may not be null; expected {type_name(field)}")
    if field.is_map:
        return _mapping(value)
    if typing.get_origin(field.type) is list:
        item = typing.get_args(field.type)[0]
        return [_scalar(v, item, field, str(v)) for v in _as_list(value)]
    _refuse_sweep(value)
    if isinstance(field.type, tuple):
        return _either(value, field)
    return _scalar(data, field.type, field, data if isinstance(data, str) else value.text)


def free(value: Value) -> Any:
    """The value for an open mapping, where nothing is known about its type."""
    _refuse_sweep(value)
    return None if not value.quoted and value.data == "None" else Map.of(value.data)


def _refuse_sweep(value: Value) -> None:
    if value.sweep:
        advice = f"""quote it twice, "key='{value.text}'", or use brackets for a list (no sweeps here)"""
        raise GrammarError(f"{value.text!r} has a comma; {advice}")


def _as_list(value: Value) -> list[Any]:
    data = value.data
    if isinstance(data, dict):
        raise GrammarError("expected a list, got a mapping")
    if not isinstance(data, str):
        return list(data) if isinstance(data, (list, tuple)) else [data]
    text = data.strip()
    if text[:1] == "[" and text[-1:] == "]":
        return list(parse_value(text).data)
    if value.quoted or "," not in text:
        return [data] if text else []
    try:
        return [parse_value(part).data for part in split(text)]
    except GrammarError:
        return [data]


def _mapping(value: Value) -> Map:
    data = value.data
    if isinstance(data, str) and data.strip()[:1] == "{":
        data = parse_value(data.strip()).data
    if not isinstance(data, dict):
        raise GrammarError(f"expected a mapping like {{a: 1}}, got {value.text!r}")
    return Map.of(data)


def _either(value: Value, field: Field) -> Any:
    for kind in field.type:
        if kind is float and "_" in value.text:
            continue
        try:
            return _scalar(value.data, kind, field, value.text)
        except GrammarError:
            continue
    raise GrammarError(f"expected {type_name(field)}, got {value.text!r}")


def _scalar(data: Any, kind: Any, field: Field, text: str) -> Any:
    if isinstance(data, (list, tuple, dict)):
        shape = "a mapping" if isinstance(data, dict) else f"a list of {len(data)}"
        raise GrammarError(f"expected {type_name(field)}, got {shape}")
    if kind in _KINDS:
        number = _boolean(data) if kind is bool else _number(data, kind)
        if number is None:
            raise GrammarError(f"expected {_KINDS[kind]}, got {text!r}")
        return number
    if data is None:
        raise GrammarError(f"expected {type_name(field)}, got null")
    text_value = data if isinstance(data, str) else text
    return expand(text_value) if hasattr(kind, "__metadata__") else text_value


def _boolean(data: Any) -> bool | None:
    word = str(data).strip().lower()
    return word in _TRUE if word in _TRUE | _FALSE else None


def _number(data: Any, kind: type) -> int | float | None:
    """The number as an int or a float, or None if it is none."""
    if isinstance(data, str):
        if not _NUMBER.fullmatch(data.strip()):
            return None
        plain = data.strip().replace("_", "")
        data = int(plain) if re.fullmatch(r"[+-]?\d+", plain) else float(plain)
    if isinstance(data, bool) or not isinstance(data, (int, float)):
        return None
    if isinstance(data, int) and data.bit_length() > 1000:
        raise GrammarError("out of range: a number of hundreds of digits")
    if math.isnan(data):
        raise GrammarError("nan is no usable value")
    if kind is float:
        return float(data)
    return int(data) if isinstance(data, int) or data.is_integer() else None


def expand(path: str) -> str:
    """`~` and `$VAR` in a local path. Raises GrammarError for a variable that is not set, and for no path at all."""
    if "://" in path.removeprefix("file://") or "\n" in path or "{{" in path or "{%" in path:
        return path
    expanded = os.path.expandvars(os.path.expanduser(path))
    if "$" in path and (missing := re.search(r"\$\{?([A-Za-z_]\w*)", expanded)):
        raise GrammarError(f"the environment variable {missing[1]} in {path!r} is not set")
    if expanded.startswith("~") or "\0" in expanded:
        raise GrammarError(f"{path!r} names no file: there is no such user, or it has a zero byte")
    check_length(expanded)
    return expanded


def check_length(path: str) -> None:
    """Raises GrammarError for a path that Linux cannot hold."""
    encoded = path.encode(errors="replace")
    if len(encoded) >= _PATH_BYTES or max(map(len, encoded.split(b"/"))) > _NAME_BYTES:
        most = f"a name has at most {_NAME_BYTES} bytes, a path fewer than {_PATH_BYTES}"
        raise GrammarError(f"'{path[:60]}…' names no file: {most}")
