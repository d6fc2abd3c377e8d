"""The schema seen as data: the fields of a group, the dotted paths of a tree, what a path leads to."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any

from verl.config.schema.base import PATH, Group, Map, Root


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
        declared = self.owner.__dataclass_fields__[self.name]
        return declared.default if declared.default is not MISSING else declared.default_factory()  # type: ignore[misc]


_FIELDS: dict[type[Group], dict[str, Field]] = {}
_LEAVES: dict[type[Root], dict[str, Field]] = {}


def fields_of(cls: type[Group]) -> dict[str, Field]:
    """The keys of a group, in the schema's order."""
    if cls not in _FIELDS:
        _FIELDS[cls] = {f.name: _field(f, cls) for f in fields(cls) if not f.name.startswith("_")}
    return _FIELDS[cls]


def _field(declared: Any, cls: type[Group]) -> Field:
    kind, nullable = declared.type, False
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = [a for a in typing.get_args(kind) if a is not type(None)]
        nullable = len(members) < len(typing.get_args(kind))
        kind = members[0] if len(members) == 1 else tuple(members)
    about = declared.metadata
    nullable = nullable or "same_as" in about or bool(about.get("nullable"))
    return Field(declared.name, kind, nullable, about, cls)


@dataclass(frozen=True)
class Place:
    """Where a path leads: `owner[field.name]`, and `inside` it the rest of the path (open mappings only)."""

    owner: Group
    field: Field
    inside: tuple[str, ...] = ()


def locate(root: Group, path: str) -> Place | None:
    """The place of a dotted path in a configuration, or None if the schema has no such key."""
    parts = path.split(".")
    node = root
    for i, part in enumerate(parts):
        known = fields_of(type(node)).get(part)
        if known is None:
            return None
        rest = tuple(parts[i + 1 :])
        if not rest:
            return Place(node, known)
        if known.group is None:
            return Place(node, known, rest) if known.is_map else None
        node = getattr(node, part)
    return None


def walk(cls: type[Group], prefix: str = "") -> Iterator[tuple[str, Field]]:
    """(dotted path, field) of every key that is not a group."""
    for name, known in fields_of(cls).items():
        if known.group is not None:
            yield from walk(known.group, f"{prefix}{name}.")
        else:
            yield prefix + name, known


def leaves(cls: type[Root]) -> dict[str, Field]:
    """All keys of an entry point by dotted path."""
    if cls not in _LEAVES:
        _LEAVES[cls] = dict(walk(cls))
    return _LEAVES[cls]


def type_name(known: Field) -> str:
    """The type as the documentation writes it."""
    text = (
        "|".join(_plain_name(t) for t in known.type)
        if isinstance(known.type, tuple)
        else _plain_name(known.type)
    )
    return text + "?" if known.nullable else text


def _plain_name(kind: Any) -> str:
    if typing.get_origin(kind) is list:
        return f"list of {_plain_name(typing.get_args(kind)[0])}"
    if hasattr(kind, "__metadata__"):
        return "path"
    return "map" if kind is Map else kind.__name__
