"""The schema seen as data: the fields of a group, the dotted paths of a tree, what a path leads to."""

from __future__ import annotations

import functools
import json
import math
import types
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.schema.base import PATH, Group, Map, Root, put, select


@dataclass(frozen=True)
class Field:
    """One key: its type with null taken out, and the facts declared about it."""

    name: str
    type: Any
    nullable: bool
    about: Any
    owner: type[Group]

    @property
    def group(self) -> type[Group] | None:
        """The group class, if the key is a group."""
        return self.type if isinstance(self.type, type) and issubclass(self.type, Group) else None

    @property
    def is_map(self) -> bool:
        """True for an open mapping."""
        return self.type is Map

    @property
    def is_path(self) -> bool:
        """True if the value, or each item of a list, is a path."""
        item = typing.get_args(self.type)[0] if typing.get_origin(self.type) is list else self.type
        return PATH in getattr(item, "__metadata__", ())

    def default(self) -> Any:
        """A fresh default."""
        return getattr(self.owner(), self.name)


class Limits(NamedTuple):
    """The range of a number: inclusive `low` and `high`, exclusive `above`, the value `also`, infinity if `inf`."""

    low: float
    high: float
    above: float
    also: float | None
    inf: bool

    def hold(self, number: float) -> bool:
        """True if the number is in the range."""
        if number == self.also or (self.inf and number == math.inf):
            return True
        return self.low <= number <= self.high and number > self.above


def limits_of(field: Field, kind: type) -> Limits:
    """The range declared for a key, within that of any int (−1, which often means off, to 10^12) or float (±10^9)."""
    low, high = (-1, 10**12) if kind is int else (-(10**9), 10**9)
    about = field.about
    above = about.get("above", -math.inf)
    low = about.get("low", min(low, about["high"]) if "high" in about else low)
    return Limits(low, about.get("high", high), above, about.get("also"), bool(about.get("inf")))


@functools.cache
def fields_of(cls: type[Group]) -> dict[str, Field]:
    """The keys of a group, in the schema's order."""
    return {f.name: _field(f, cls) for f in fields(cls) if not f.name.startswith("_")}


def _field(declared: Any, cls: type[Group]) -> Field:
    kind, nullable = declared.type, False
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = [a for a in typing.get_args(kind) if a is not type(None)]
        nullable = len(members) < len(typing.get_args(kind))
        kind = members[0] if len(members) == 1 else tuple(members)
    about = declared.metadata
    nullable = nullable or "same_as" in about or bool(about.get("nullable"))
    return Field(declared.name, kind, nullable, about, cls)


class Place(NamedTuple):
    """What a path leads to: a key, or something `inside` it (open mappings only)."""

    field: Field
    inside: bool


def locate(cls: type[Group], path: str) -> Place | None:
    """What a dotted path leads to, or None if the schema has no such key."""
    name, _, remainder = path.partition(".")
    field = fields_of(cls).get(name)
    if field is None or (remainder and field.group is None and not field.is_map):
        return None
    if remainder and field.group is not None:
        return locate(field.group, remainder)
    return Place(field, bool(remainder))


@functools.cache
def leaves(cls: type[Group]) -> dict[str, Field]:
    """All keys of an entry point, or of a group, that are not groups, by dotted path."""
    keys: dict[str, Field] = {}
    for name, field in fields_of(cls).items():
        inner = {"": field} if field.group is None else leaves(field.group)
        keys |= {f"{name}.{path}".rstrip("."): leaf for path, leaf in inner.items()}
    return keys


def type_name(field: Field) -> str:
    """The type as the documentation writes it."""
    kinds = field.type if isinstance(field.type, tuple) else (field.type,)
    return "|".join(_plain_name(kind) for kind in kinds) + ("?" if field.nullable else "")


def _plain_name(kind: Any) -> str:
    if typing.get_origin(kind) is list:
        return f"list of {_plain_name(typing.get_args(kind)[0])}"
    if hasattr(kind, "__metadata__"):
        return "path"
    return "map" if kind is Map else kind.__name__


def for_elsewhere(config: Root) -> dict[str, Any]:
    """The configuration for processes that may start in another folder: plain nested data, as JSON has it.

    A relative path that exists here becomes absolute. Another value stays as it is (the name of a model on a hub, the
    text of a chat template), except `global_profiler.save_path`, a folder that such a process creates.
    """
    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    for path, field in leaves(type(config)).items():
        if field.is_path:
            value, created = select(plain, path), path == "global_profiler.save_path"
            many = isinstance(value, list)
            put(plain, path, [_absolute(p, created) for p in value] if many else _absolute(value, created))
    for teacher in select(plain, "distillation.teacher_models", {}).values():
        teacher["model_path"] = _absolute(teacher.get("model_path"), created=False)
    return plain


def _absolute(value: str | None, created: bool) -> str | None:
    if not value:
        return value
    try:
        path = Path(value).expanduser()
        return str(path.absolute()) if created or path.exists() else value
    except (OSError, ValueError):  # text that cannot be a file's name
        return value
