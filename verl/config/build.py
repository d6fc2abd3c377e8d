"""Putting a configuration together: every layer and override becomes assignments on the schema's defaults.

All problems are collected; nothing is raised before the last one is known.
"""

from __future__ import annotations

import difflib
from typing import Any

from verl.config import tables
from verl.config.coerce import CoerceError, coerce, free
from verl.config.fields import Place, leaves, locate
from verl.config.files import Layer
from verl.config.grammar import NULLS, GrammarError, Override, Value, parse
from verl.config.problems import Problem
from verl.config.schema import ROOTS
from verl.config.schema.base import Group, Map, Root, select


class Builder:
    """Collects assignments on one configuration tree, with problems and notices."""

    def __init__(self, entry: str):
        self.entry = entry
        self.root: Root = ROOTS[entry]()
        self.problems: list[Problem] = []
        self.deferred: dict[str, Value] = {}
        self.micro: dict[str, tuple[str, int | None]] = {}
        self.written: dict[str, Any] = {}
        self.v1: dict[str, Any] = {}
        self._spelled: dict[str, tuple[str, Any]] = {}
        self._unknown: list[tuple[str, Value | None, str]] = []
        self._reasons: dict[str, list[str]] = {}
        self._unread: list[str] = []
        self._count = 0

    # ---- layers and overrides ----

    def add_layer(self, layer: Layer) -> None:
        """Take a file's content, or a group's choice."""
        if layer.choice:
            self.choose(layer.path, str(layer.content), layer.source)
        elif not layer.path:
            for name, content in layer.content.items():
                self.assign(str(name), _from_file(content), "", layer.source)
        else:
            self.assign(layer.path, _from_file(layer.content), "", layer.source)

    def add_override(self, argument: str) -> None:
        """Take one command-line override."""
        try:
            override = parse(argument)
        except GrammarError as error:
            self.problems.append(Problem("", str(error)))
            return
        if override.key.split("/")[0].split(".")[0] == "hydra":
            return
        if self._is_choice(override):
            package = override.key.replace("/", ".") if override.package is None else override.package
            self.choose(package, str(override.value.data if override.value else ""), argument)
        elif override.op == "~":
            self.remove(override.key, argument)
        else:
            assert override.value is not None
            self.assign(override.key, override.value, override.op, argument)

    def _is_choice(self, override: Override) -> bool:
        if override.package is not None or "/" in override.key or override.key == "model_engine":
            return True
        place = locate(self.root, override.key)
        is_group = place is not None and place.field.group is not None and not place.inside
        value = override.value
        return bool(is_group and value and isinstance(value.data, str) and value.data not in NULLS)

    def choose(self, package: str, choice: str, source: str) -> None:
        """`group@package=choice` and `model_engine=…`: the group's built-in variants."""
        choice = choice.removesuffix(".yaml")
        if package == "model_engine":
            strategy = tables.MODEL_ENGINES.get(choice)
            targets = (
                ["actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"]
                if self.entry == "ppo"
                else ["engine"]
            )
            known = list(tables.MODEL_ENGINES)
        elif choice in tables.PLAIN_CHOICES.get(package, ()):
            return
        else:
            known = [*tables.GROUP_CHOICES.get(package, {}), *tables.PLAIN_CHOICES.get(package, ())]
            strategy, targets = tables.GROUP_CHOICES.get(package, {}).get(choice), [package]
        if strategy is None or locate(self.root, targets[0]) is None:
            offer = (
                f"choices of {package}: {', '.join(known)}"
                if known
                else f"{package!r} is no group with choices"
            )
            self.problems.append(Problem(source, f"no such group choice; {offer}"))
            return
        for target in targets:
            self.assign(f"{target}.strategy", Value(strategy, strategy), "", source)

    # ---- assignments ----

    def assign(self, path: str, value: Value, op: str, source: str, spelled: str = "") -> None:
        """Set one path. Mappings are taken apart down to the schema's keys; `spelled` is the user's name for it."""
        name = tables.canonical(path, self.entry)
        spelled = spelled or path
        if tables.GLOBAL_MICRO.fullmatch(name):
            self._take_micro(name, value, source)
            return
        if name.startswith("trainer.v1") and self.entry == "ppo":
            self._take_v1(name, value, source)
            return
        place = locate(self.root, name)
        if place is None:
            self._assign_unnamed(name, value, op, source)
        else:
            if name != path:
                self.notice(f"{path} is now called {name}")
            if place.field.group is None:
                self._assign_leaf(place, name, value, source, spelled)
            elif value.data is not None:
                self._assign_group(place, name, value, op, source, spelled)

    def _assign_group(
        self, place: Place, name: str, value: Value, op: str, source: str, spelled: str
    ) -> None:
        if isinstance(value.data, str) and self._is_named_choice(name, value.data):
            self.choose(name, value.data, source)
            return
        if not isinstance(value.data, dict):
            self.problems.append(
                Problem(
                    source,
                    f"{name} is a group of keys; set one of {', '.join(place.owner[place.field.name])}",
                )
            )
            return
        for child, content in value.data.items():
            self.assign(f"{name}.{child}", _part(content, value), op, source, f"{spelled}.{child}")

    def _is_named_choice(self, name: str, choice: str) -> bool:
        return choice in tables.GROUP_CHOICES.get(name, {}) or choice in tables.PLAIN_CHOICES.get(name, ())

    def _assign_leaf(self, place: Place, name: str, value: Value, source: str, spelled: str) -> None:
        if place.inside and (reason := tables.no_effect(name)):
            self._no_effect(name, reason)
            return
        other, earlier = self._spelled.get(name, (spelled, value.data))
        if other != spelled and earlier != value.data:
            self.notice(f"{other}={earlier} and {spelled}={value.text} are one key; the later one counts")
        self._spelled[name] = (spelled, value.data)
        self._count += 1
        self.root._set[name] = self._count
        self.deferred.pop(name, None)
        self.written[name] = value.data
        if _has_interpolation(value.data):
            self.deferred[name] = value
            return
        self.set_leaf(place, name, value, source)

    def set_leaf(self, place: Place, name: str, value: Value, source: str) -> None:
        """Convert and store; a value that does not fit is a problem."""
        try:
            if place.inside:
                node = getattr(place.owner, place.field.name)
                for part in place.inside[:-1]:
                    if not isinstance(node.get(part), Map):
                        node[part] = Map()
                    node = node[part]
                node[place.inside[-1]] = free(value)
            else:
                setattr(place.owner, place.field.name, self._synonym(name, coerce(value, place.field)))
        except CoerceError as error:
            self.problems.append(Problem(name, f"{error} (from {source})"))

    def _synonym(self, name: str, value: Any) -> Any:
        table = tables.VALUE_SYNONYMS.get(name, {})
        if isinstance(value, list):
            if name.endswith(("target_modules", "exclude_modules")):
                return [m for v in value for m in tables.MEGATRON_MODULES.get(v, [v])]
            return [table.get(v, v) for v in value]
        return table.get(value, value) if isinstance(value, str) else value

    def _assign_unnamed(self, name: str, value: Value, op: str, source: str) -> None:
        """A path the schema does not have: without effect, refused, inside an open group, or unknown."""
        if reason := tables.no_effect(name):
            self._no_effect(name, reason)
            self.written[name] = value.data
        elif self._refused(name, value, source):
            self.written[name] = value.data
        elif isinstance(value.data, dict) and not self._open_parent(name):
            for child, content in value.data.items():
                self.assign(f"{name}.{child}", _part(content, value), op, source)
        elif self._open_parent(name):
            self._add(name, value)
        elif op == "++":
            self._unread.append(name)
            self._add(name, value)
        else:
            self._unknown.append((name, value, source))

    def _open_parent(self, name: str) -> bool:
        parent = select(self.root, name.rpartition(".")[0]) if "." in name else self.root
        while parent is None and "." in name:
            name = name.rpartition(".")[0]
            parent = select(self.root, name.rpartition(".")[0]) if "." in name else self.root
        return isinstance(parent, Map) or (isinstance(parent, Group) and parent.open_keys)

    def _add(self, name: str, value: Value) -> None:
        """Store a key that the schema does not name; groups on the way to it are made."""
        node: Any = self.root
        *parents, last = name.split(".")
        for i, part in enumerate(parents):
            place = locate(self.root, ".".join(parents[: i + 1]))
            if place is not None and place.field.group is None and not place.field.is_map:
                message = f"{'.'.join(parents[: i + 1])} is a value and has no keys of its own"
                self.problems.append(Problem(name, message))
                return
            if part not in node or not isinstance(node[part], (Group, Map)):
                node[part] = Map()
            node = node[part]
        node[last] = free(value) if not value.sweep else list(value.data)
        self._count += 1
        self.root._set[name] = self._count

    def _refused(self, name: str, value: Value, source: str) -> bool:
        """True if the key belongs to a feature that is recognised and not here."""
        import re

        for row in tables.REFUSED_KEYS:
            if re.fullmatch(row.family, name):
                self._refuse_if_on(row, name, value)
                return True
        for row in tables.REFUSED:
            found = re.fullmatch(rf"(?:{row.family})(?:\.(?P<below>.+))?", name)
            if not found:
                continue
            if isinstance(value.data, dict):
                switch = value.data.get(row.switch)
                self._refuse_if_on(row, f"{name}.{row.switch}", _part(switch, value))
            elif found["below"] == row.switch:
                self._refuse_if_on(row, name, value)
            return True
        return False

    def _refuse_if_on(self, row: tables.Refused, name: str, value: Value) -> None:
        off = {str(v).lower() for v in row.off}
        if str(value.data).lower() not in off:
            message = f"{row.what} is not in this release; closest: {row.closest}"
            self.problems.append(Problem(f"{name}={value.text}", message))

    def _take_micro(self, name: str, value: Value, source: str) -> None:
        data = None if value.data in NULLS else value.data
        if isinstance(data, (int, float)) and not isinstance(data, bool) and float(data).is_integer():
            self.micro[name + "_per_gpu"] = (name, int(data))
        elif data is None:
            self.micro.pop(name + "_per_gpu", None)
        else:
            self.problems.append(
                Problem(name, f"expected a whole number, got {value.text!r} (from {source})")
            )

    def _take_v1(self, name: str, value: Value, source: str) -> None:
        """`trainer.v1.*` of the public system: mode and threshold say how stale an answer may be."""
        if isinstance(value.data, dict):
            for child, content in value.data.items():
                self._take_v1(f"{name}.{child}", _part(content, value), source)
        elif name in ("trainer.v1.trainer_mode", "trainer.v1.sampler.max_off_policy_threshold"):
            self.v1[name] = value.data
        elif name != "trainer.v1":
            self._no_effect(name, "one loop serves every mode")

    # ---- removal ----

    def remove(self, path: str, source: str) -> None:
        """`~a.b`: back to the default; inside an open mapping, gone."""
        name = tables.canonical(path, self.entry)
        place = locate(self.root, name)
        if place is None:
            if tables.no_effect(name) or self._forget_extra(name):
                return
            self._unknown.append((name, None, source))
            return
        for key in [k for k in self.root._set if k == name or k.startswith(name + ".")]:
            del self.root._set[key]
            self.deferred.pop(key, None)
        if not place.inside:
            setattr(place.owner, place.field.name, place.field.default())
            return
        node = getattr(place.owner, place.field.name)
        for part in place.inside[:-1]:
            node = node.get(part, Map())
        node.pop(place.inside[-1], None)

    def _forget_extra(self, name: str) -> bool:
        parent, _, last = name.rpartition(".")
        node = select(self.root, parent) if parent else self.root
        if isinstance(node, Group) and last in node._extra:
            del node._extra[last]
            return True
        return isinstance(node, Group) and node.open_keys

    # ---- what is said at the end ----

    def notice(self, text: str) -> None:
        """Say something once."""
        if text not in self.root._notices:
            self.root._notices.append(text)

    def _no_effect(self, name: str, reason: str) -> None:
        keys = self._reasons.setdefault(reason, [])
        if name not in keys:
            keys.append(name)

    def finish(self) -> None:
        """Settle the keys nobody knows, and say what has no effect."""
        self._settle_unknown()
        if self._unread:
            self.notice(f"added by ++, read by nobody: {', '.join(self._unread)}")
        for reason, keys in self._reasons.items():
            if reason != "not needed":
                self.notice(f"no effect: {', '.join(keys)}: {reason}")

    def _settle_unknown(self) -> None:
        plugins = select(self.root, "actor_rollout_ref.model.external_lib") or select(
            self.root, "model.external_lib"
        )
        own_data = bool(select(self.root, "data.custom_cls.path"))
        for name, value, source in self._unknown:
            in_group = isinstance(select(self.root, name.split(".")[0]), Group)
            if value is not None and ((plugins and in_group) or (own_data and name.startswith("data."))):
                self._add(name, value)
            else:
                self.problems.append(Problem(source if name in source else name, self._nearest(name)))

    def _nearest(self, name: str) -> str:
        known = list(leaves(type(self.root)))
        last = name.rpartition(".")[2]
        same = [k for k in known if k.endswith("." + name) or k.rpartition(".")[2] == last]
        same.sort(key=lambda k: -difflib.SequenceMatcher(None, k, name).ratio())
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.75)
        parent = name.rpartition(".")[0]
        siblings = [k for k in known if k.rpartition(".")[0] == parent]
        near = difflib.get_close_matches(name, siblings, n=2, cutoff=0.6)
        found = list(dict.fromkeys([*same[:3], *near, *close]))[:3]
        if found:
            return f"no key {name}; nearest: {', '.join(found)}"
        group = parent if siblings or any(k.startswith(parent + ".") for k in known) else "all"
        return f"no key {name}, and none like it; --help {group} lists them (for your own code: ++{name}=…)"


def _from_file(content: Any) -> Value:
    return Value(content, str(content), quoted=isinstance(content, str))


def _part(content: Any, whole: Value) -> Value:
    return Value(content, str(content), quoted=whole.quoted or isinstance(content, str))


def _has_interpolation(data: Any) -> bool:
    if isinstance(data, str):
        return "${" in data
    if isinstance(data, dict):
        return any(_has_interpolation(v) for v in data.values())
    return isinstance(data, (list, tuple)) and any(_has_interpolation(v) for v in data)
