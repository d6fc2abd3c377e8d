"""From what was written to the type the schema names: numbers, booleans, lists of one, null, paths."""

from __future__ import annotations

import math
import os
import re
import typing
from typing import Any

from verl.config.fields import Field, type_name
from verl.config.grammar import NULLS, GrammarError, Value, parse_value, split, unbalanced
from verl.config.schema.base import Map

_TRUE = {"true", "yes", "on", "1", "y"}
_FALSE = {"false", "no", "off", "0", "n"}
_NUMBER = re.compile(r"[+-]?(\d+(_\d+)*)?(\.\d*)?([eE][+-]?\d+)?|[+-]?(inf|nan)", re.I)


class CoerceError(ValueError):
    """The value does not fit the key; the message says what would."""


def coerce(value: Value, known: Field) -> Any:
    """The value in the key's type. Raises CoerceError."""
    data = value.data
    if data is None or (isinstance(data, str) and data in NULLS and known.nullable):
        if known.nullable:
            return None
        if known.is_map:
            return Map()
        raise CoerceError(f"may not be null; expected {type_name(known)}")
    if known.is_map:
        return _mapping(value)
    if typing.get_origin(known.type) is list:
        item = typing.get_args(known.type)[0]
        return [_scalar(v, item, known, str(v)) for v in _as_list(value)]
    if value.sweep:
        raise CoerceError(
            f"{value.text!r} has a comma; quote it, or use brackets for a list (no sweeps here)"
        )
    if isinstance(known.type, tuple):
        return _either(value, known)
    return _scalar(data, known.type, known, data if isinstance(data, str) else value.text)


def free(value: Value) -> Any:
    """The value for an open mapping, where nothing is known about its type."""
    if value.sweep:
        raise CoerceError(
            f"{value.text!r} has a comma; quote it, or use brackets for a list (no sweeps here)"
        )
    return None if not value.quoted and value.data == "None" else Map.of(value.data)


def _as_list(value: Value) -> list[Any]:
    data = value.data
    if isinstance(data, (list, tuple)):
        return list(data)
    if isinstance(data, str):
        text = data.strip()
        if not text:
            return []
        if text[0] == "[" and text[-1] == "]":
            try:
                return list(parse_value(text).data)
            except GrammarError as error:
                raise CoerceError(str(error)) from None
        if not value.quoted and "," in text and not unbalanced(text):
            return [parse_value(part).data for part in split(text)]
        return [data]
    if isinstance(data, dict):
        raise CoerceError("expected a list, got a mapping")
    return [data]


def _mapping(value: Value) -> Map:
    data = value.data
    if isinstance(data, str) and data.strip()[:1] == "{":
        try:
            data = parse_value(data.strip()).data
        except GrammarError as error:
            raise CoerceError(str(error)) from None
    if not isinstance(data, dict):
        raise CoerceError(f"expected a mapping like {{a: 1}}, got {value.text!r}")
    return Map.of(data)


def _either(value: Value, known: Field) -> Any:
    for kind in known.type:
        if kind is float and "_" in value.text:
            continue
        try:
            return _scalar(value.data, kind, known, value.text)
        except CoerceError:
            continue
    raise CoerceError(f"expected {type_name(known)}, got {value.text!r}")


def _scalar(data: Any, kind: Any, known: Field, text: str) -> Any:
    if isinstance(data, (list, tuple, dict)):
        shape = "a mapping" if isinstance(data, dict) else f"a list of {len(data)}"
        raise CoerceError(f"expected {type_name(known)}, got {shape}")
    if kind is bool:
        return _boolean(data, text)
    if kind in (int, float):
        return _number(data, kind, text)
    if data is None:
        raise CoerceError(f"expected {type_name(known)}, got null")
    written = data if isinstance(data, str) else text
    return expand(written) if hasattr(kind, "__metadata__") else written


def _boolean(data: Any, text: str) -> bool:
    if isinstance(data, bool):
        return data
    word = str(data).strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise CoerceError(f"expected True or False, got {text!r}")


def _number(data: Any, kind: type, text: str) -> int | float:
    if isinstance(data, str):
        found = _NUMBER.fullmatch(data.strip())
        if not data.strip() or not found or not any(c.isdigit() or c in "nN" for c in data):
            raise CoerceError(f"expected {'a whole number' if kind is int else 'a number'}, got {text!r}")
        plain = data.strip().replace("_", "")
        data = int(plain) if re.fullmatch(r"[+-]?\d+", plain) else float(plain)
    if isinstance(data, bool) or not isinstance(data, (int, float)):
        raise CoerceError(f"expected {'a whole number' if kind is int else 'a number'}, got {text!r}")
    if math.isnan(data):
        raise CoerceError("nan is no usable value")
    if kind is float:
        return float(data)
    if isinstance(data, float) and not data.is_integer():
        raise CoerceError(f"expected a whole number, got {text!r}")
    return int(data)


def expand(path: str) -> str:
    """`~` and `$VAR` in a local path. Raises CoerceError for a variable that is not set."""
    if "://" in path or "\n" in path or "{{" in path or "{%" in path:
        return path
    if path.startswith("~"):
        path = os.path.expanduser(path)
    if "$" not in path:
        return path
    expanded = os.path.expandvars(path)
    if missing := re.search(r"\$\{?([A-Za-z_]\w*)", expanded):
        raise CoerceError(f"the environment variable {missing[1]} in {path!r} is not set")
    return expanded
