"""What every group of keys is made of: typed dataclasses with dictionary access, and how a field is declared.

A field's annotation is its type, its default the key's default; its help stands under `Attributes:` in the docstring of
its class (`verl.config.reference` reads it when asked). No torch, no omegaconf: this is imported at start-up.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, dataclass_transform

PATH = "path"
SEEDS = 2**63 - 1
"""The largest seed."""
FilePath = Annotated[str, PATH]
"""A string in which `~` and `$VAR` are expanded when it names a local path."""


class Map(dict[str, Any]):
    """An open mapping: any key, attribute access for those that are there."""

    @classmethod
    def of(cls, value: Any) -> Any:
        """`value` with every dict inside it made a Map."""
        if isinstance(value, dict):
            return cls({str(k): cls.of(v) for k, v in value.items()})
        if isinstance(value, (list, tuple)):
            return [cls.of(v) for v in value]
        return value

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no key {name!r} here; present: {', '.join(self) or 'none'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
@dataclass(eq=False, repr=False, kw_only=True)
class Group(Mapping[str, Any]):
    """Base of all groups, a mapping of keys to values; a class of annotated fields below it is one.

    `open_keys` groups take keys that the schema does not name.
    """

    open_keys: ClassVar[bool] = False
    _extra: Map = field(default_factory=Map)

    def __init_subclass__(cls) -> None:
        dataclass(eq=False, repr=False, kw_only=True)(cls)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            extra = {} if name.startswith("_") else self.__dict__.get("_extra", {})
            if name in extra:
                return extra[name]
            raise AttributeError(f"{type(self).__name__} has no key {name!r}")

    def __getitem__(self, key: str) -> Any:
        return self.__dict__[key] if key in self.__dict__ and not key.startswith("_") else self._extra[key]

    def __iter__(self) -> Iterator[str]:
        """Names of the keys, in the schema's order, added ones last."""
        yield from (f.name for f in fields(self) if not f.name.startswith("_"))
        yield from self._extra

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self.__dataclass_fields__ and not key.startswith("_"):
            setattr(self, key, value)
        else:
            self._extra[key] = value

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts and lists, for YAML and JSON."""
        return {key: plain(value) for key, value in self.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()!r})"


class Root(Group):
    """A whole configuration, with what is known of its making: which keys were set, what is to be said."""

    entry: ClassVar[str] = ""
    _set: dict[str, int] = field(default_factory=dict)
    _lists: set[str] = field(default_factory=set)
    _notices: list[str] = field(default_factory=list)

    def was_set(self, path: str) -> bool:
        """True if the user gave the key (or something below it), in a file or as an override."""
        return path in self._set or any(key.startswith(path + ".") for key in self._set)

    def set_order(self, path: str) -> int:
        """When the key was last given: later is larger, -1 if never."""
        return self._set.get(path, -1)

    def as_written(self, path: str) -> Any:
        """The value of a key; of a list whose only item was not written as a list, that item."""
        value = self.select(path)
        single = isinstance(value, list) and len(value) == 1 and path not in self._lists
        return value[0] if single else value

    @property
    def notices(self) -> list[str]:
        """What building the configuration has to say (renamed keys, keys without effect), once each."""
        return self._notices

    def select(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path, or `default` if the path does not exist."""
        return select(self, path, default)


def plain(value: Any) -> Any:
    """Groups and maps as plain dicts, recursively."""
    if isinstance(value, Group):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def select(node: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path below a group or mapping, or `default`."""
    for part in path.split("."):
        if not isinstance(node, (Group, dict)) or part not in node:
            return default
        node = node[part]
    return node


def put(node: Any, path: str, value: Any) -> None:
    """Set the value at a dotted path whose groups are there."""
    group, _, name = path.rpartition(".")
    (select(node, group) if group else node)[name] = value


def setting(group: Any, path: str, default: Any = None) -> Any:
    """`setting(actor, "optim.lr")`: the value at a dotted path of typed groups, mappings or None.

    `default` where a name is missing or holds None.
    """
    for name in path.split("."):
        if group is None:
            return default
        group = group.get(name) if isinstance(group, dict) else getattr(group, name, None)
    return default if group is None else group


def key(default: Any = None, **about: Any) -> Any:
    """A field with facts about it.

    `low`, `high` (inclusive), `above` (exclusive), `also` (one more value), `inf` (infinity means off), `ours` (default
    differs).
    """
    return field(default=default, metadata=about)


def same_as(path: str, **about: Any) -> Any:
    """A field that takes another key's value when it is null; a leading dot means a key of the same group."""
    return field(default=None, metadata={"same_as": path, **about})


def choice(default: str | None, *options: str, registry: str = "", **about: Any) -> Any:
    """A field with a list of valid names. `registry` says how to register one's own, if one can."""
    return field(default=default, metadata={"options": options, "registry": registry, **about})


def items(*values: Any, **about: Any) -> Any:
    """A field whose default is a list."""
    return field(default_factory=lambda: list(values), metadata=about)


def open_map(about: Mapping[str, Any] | None = None, /, **values: Any) -> Any:
    """A field whose default is an open mapping. about: facts about it; with `same_as` an empty one follows that key."""
    return field(default_factory=lambda: Map.of(values), metadata=about)


def sub(cls: type[Group]) -> Any:
    """A field that is a group of its own."""
    return field(default_factory=cls)
