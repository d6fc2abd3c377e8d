"""Every layer and override becomes assignments on the schema's defaults.

All problems are collected; nothing is raised before the last one is known.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

from verl.config.conversion import coerce, free
from verl.config.grammar import NULLS, GrammarError, Value, parse
from verl.config.matching import Spellings, lookup, nearest
from verl.config.problems import Problem
from verl.config.release import OFF
from verl.config.schema.base import Group, Map, Root, select
from verl.config.schema.entries import ROOTS
from verl.config.schema.fields import Place, fields_of, leaves, locate
from verl.config.yaml_files import Layer

_LIKE = 0.75
"""So similar is the name of a group to what is taken for a misspelling of it."""
_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_]\w*)(?=[.}\[])")
"""Of `${lr}` and `${mine.lr}` the first name."""
_OF_POLICY = ("model.external_lib", "rollout.agent.agent_loop_config_path", "rollout.agent.environment.path")
_USERS_CODE = (
    *_OF_POLICY,  # of main_generation
    *(f"actor_rollout_ref.{key}" for key in _OF_POLICY),
    "data.custom_cls.path",
    "custom_reward_function.path",
    "reward_manager.module.path",
)
"""Keys that name code of the user's."""


class Resolver:
    """Collects assignments on one configuration tree, with problems and notices.

    `interpolated` are values with `${…}` in them, `old` those of keys that stand for others by a computation, `written`
    all values as they were given, with the user's name of each: `verl.config.defaults` settles them.
    """

    def __init__(self, entry: str, spellings: Spellings):
        self.entry = entry
        self.spellings = spellings
        self.root: Root = ROOTS[entry]()
        self.problems: list[Problem] = []
        self.interpolated: dict[str, Value] = {}
        self.old: dict[str, Value] = {}
        self.written: dict[str, tuple[str, Any]] = {}
        self._unknown: list[tuple[str, Value | None, str]] = []
        self._to_give: dict[str, str] = {}
        self._without_effect: dict[str, dict[str, None]] = {}
        self._count = 0

    # ---- layers and overrides ----

    def add_layer(self, layer: Layer) -> None:
        """Take a file's content, or a group's choice."""
        if layer.choice:
            self.choose(layer.path, str(layer.content), layer.source)
            return
        for name, content in (layer.content if not layer.path else {layer.path: layer.content}).items():
            self.assign(str(name), Value.given(content), "", layer.source)

    def add_override(self, argument: str) -> None:
        """Take one command-line override."""
        try:
            override = parse(argument)
        except GrammarError as error:
            self.refuse("", str(error))
            return
        key, value = override.key, override.value
        self._forget(argument.partition("=")[0])
        if key.split("/")[0].split(".")[0] == "hydra":
            return
        place = locate(type(self.root), key)
        is_group = place is not None and place.field.group is not None
        is_choice = is_group and value is not None and isinstance(value.data, str) and value.data not in NULLS
        if override.package is not None or "/" in key or key == "model_engine" or is_choice:
            package = key.replace("/", ".") if override.package is None else override.package
            self.choose(package, str(value.data if value else ""), argument)
        elif override.op == "~":
            self.remove(key, value, argument)
        elif value is not None:
            self.assign(key, value, override.op, argument)

    def choose(self, package: str, choice: str, source: str) -> None:
        """`group@package=choice` and `model_engine=…`: the group's built-in variants."""
        choices, choice = self.spellings.choices.get(package, {}), choice.removesuffix(".yaml")
        targets = [package]
        if package == "model_engine":
            roles = ["actor_rollout_ref.actor", "critic"]  # the reference follows the actor
            targets = roles if self.entry == "ppo" else ["engine"]
        strategy = choices.get(choice)
        if choice not in choices or (strategy and locate(type(self.root), targets[0]) is None):
            offer = f"choices of {package}: {', '.join(choices)}" if choices else f"{package!r} has none"
            self.refuse(source, f"no such group choice; {offer}")
        elif strategy:
            for target in targets:
                self.assign(f"{target}.strategy", Value.given(strategy), "", source)

    # ---- assignments ----

    def assign(self, path: str, value: Value, op: str, source: str, spelled: str = "") -> None:
        """Set one path. Mappings are taken apart down to the schema's keys; `spelled` is the user's name for it."""
        name, spelled = self.spellings.canonical(path, self.entry), spelled or path
        place = locate(type(self.root), name)
        if name.endswith("micro_batch_size") and f"{name}_per_gpu" in leaves(type(self.root)):
            self.old[name] = value  # deprecated: a micro-batch size over all devices
        elif place is None:
            self._assign_unnamed(name, value, op, source)
        else:
            if name != path:
                self.notice(f"{path} is now called {name}")
            if place.field.group is None:
                self._assign_leaf(place, name, value, source, spelled)
            elif isinstance(value.data, dict):
                self._assign_parts(name, value, op, source, spelled)
            elif isinstance(value.data, str) and value.data in self.spellings.choices.get(name, ()):
                self.choose(name, value.data, source)
            elif isinstance(value.data, bool) and (reason := lookup(self.spellings.no_effect, name)):
                self._has_no_effect(name, reason)
            elif value.data is not None:
                keys = ", ".join(fields_of(place.field.group))
                self.refuse(source, f"{name} is a group of keys; set one of {keys}")
            else:
                self.notice(f"{name}=null changes nothing: it is a group of keys")

    def _assign_parts(self, name: str, value: Value, op: str, source: str, spelled: str) -> None:
        for child, content in value.data.items():
            part = Value.given(content, quoted=value.quoted)
            self.assign(f"{name}.{child}", part, op, source, f"{spelled}.{child}")

    def _assign_leaf(self, place: Place, name: str, value: Value, source: str, spelled: str) -> None:
        if place.inside and (reason := lookup(self.spellings.no_effect, name)):
            self._has_no_effect(name, reason)
            return
        self._forget(name)
        other, earlier = self.written.get(name, (spelled, value.data))
        if other and other != spelled and earlier != value.data:
            self.notice(f"{other}={earlier} and {spelled}={value.text} are one key; the later one counts")
        # Of what a built-in configuration wrote the user is not told that another spelling replaces it.
        self.written[name] = ("" if source in self.spellings.configurations else spelled, value.data)
        self._was_set(name)
        self.interpolated.pop(name, None)
        self._to_give.pop(name, None)
        if value.data == "???":
            self._to_give[name] = source
        elif "${" in str(value.data):
            self.interpolated[name] = value
        else:
            self.set_leaf(place, name, value, source)

    def set_leaf(self, place: Place, name: str, value: Value, source: str) -> None:
        """Convert and store; a value that does not fit is a problem."""
        (self.root._lists.add if isinstance(value.data, list) else self.root._lists.discard)(name)
        synonyms = None if place.inside else lookup(self.spellings.synonyms, name)
        meant = (synonyms or {}).get(str(value.data))
        if meant == "fsdp2":
            self.notice(f"{value.data} is FSDP2 here: its sizes and offloading count, its kernels do not")
        try:
            value = Value.given(meant) if meant else value
            self.store(name, free(value) if place.inside else self._synonyms(name, coerce(value, place.field)))
        except GrammarError as error:
            self.refuse(name, f"{error} (from {source})")

    def _synonyms(self, name: str, value: Any) -> Any:
        """The value; in a list, names of another system as they are here."""
        if not isinstance(value, list):
            return value
        if name.endswith(("target_modules", "exclude_modules")):
            return [module for v in value for module in self.spellings.modules.get(v, [v])]
        table = lookup(self.spellings.synonyms, name) or {}
        return [table.get(v, v) for v in value]

    def store(self, name: str, value: Any) -> None:
        """Put a value at a path; maps on the way to it are made."""
        node: Any = self.root
        *parents, last = name.split(".")
        for part in parents:
            inner = node.get(part)
            if not isinstance(inner, (Group, Map)):
                if isinstance(node, Group) and part in fields_of(type(node)):
                    self.refuse(name, f"{part} is a value and has no keys of its own")
                    return
                inner = node[part] = Map()
            node = inner
        node[last] = value

    def _forget(self, name: str) -> None:
        """Drop what was wrong with an earlier value of a key: the last one counts."""
        self.problems = [problem for problem in self.problems if problem.key.partition("=")[0] != name]

    def _was_set(self, name: str) -> None:
        self._count += 1
        self.root._set[name] = self._count

    def _assign_unnamed(self, name: str, value: Value, op: str, source: str) -> None:
        """A path the schema does not have: without effect, refused, inside an open group, or unknown."""
        open_here = self._takes_any_key(name)
        self._forget(name)
        if isinstance(value.data, dict) and not open_here and (value.data or "." in name):
            self._assign_parts(name, value, op, source, name)
        elif self._refused(name, value):
            self.written[name] = (name, value.data)
        elif name in self.spellings.switches:
            if str(value.data).lower() not in OFF:
                self._has_no_effect(name, self.spellings.switches[name])
        elif self.entry == "ppo" and name in self.spellings.computed:
            self.old[name] = value
        elif reason := lookup(self.spellings.no_effect, name):
            self._has_no_effect(name, reason)
            self.written[name] = (name, value.data)
        elif open_here:
            self._add(name, value)
        elif self.entry == "ppo" and name.split(".")[:2] == ["trainer", "v1"]:
            self._has_no_effect(name, "one loop serves every mode")
        elif op == "++":
            self._has_no_effect(name, "added by ++, nothing reads it")
            self._add(name, value)
        else:
            self._unknown.append((name, value, source))

    def _takes_any_key(self, name: str) -> bool:
        """True below an open mapping or a group that takes keys of one's own."""
        while "." in name:
            name = name.rpartition(".")[0]
            node = select(self.root, name)
            if node is not None:
                return isinstance(node, Map) or (isinstance(node, Group) and node.open_keys)
        return False

    def _add(self, name: str, value: Value) -> None:
        """Store a key that the schema does not name."""
        self.store(name, free(value) if not value.sweep else list(value.data))
        self._was_set(name)

    def _refused(self, name: str, value: Value) -> bool:
        """True if the key switches a feature outside the schema; a problem if it is switched on."""
        absent = lookup(self.spellings.refused, name)
        if absent is not None and str(value.data).lower() not in absent.off:
            where = f"{name}={value.data}"
            self.refuse(where, f"{absent.what} is not in this release; closest: {absent.instead}")
        return absent is not None

    # ---- removal ----

    def remove(self, path: str, value: Value | None, source: str) -> None:
        """`~a.b`: back to the default; inside an open mapping, gone. `~a.b=1` only where it is 1, else a problem."""
        name = self.spellings.canonical(path, self.entry)
        place = locate(type(self.root), name)
        self._forget(name)
        _, now = self.written.get(name, (name, select(self.root, name)))
        if value is not None and place is not None and place.field.group is None and now != value.data:
            self.refuse(source, f"{name} is {now}, not {value.text}; write ~{path}")
            return
        parent, _, last = name.rpartition(".")
        node = select(self.root, parent) if parent else self.root
        if place is None:
            extra = isinstance(node, Group) and (node._extra.pop(last, node) is not node or node.open_keys)
            if not extra and lookup(self.spellings.no_effect, name) is None:
                self._unknown.append((name, None, source))
            return
        for key in [k for k in self.root._set if k == name or k.startswith(name + ".")]:
            del self.root._set[key]
            self.interpolated.pop(key, None)
            self._to_give.pop(key, None)
        if not place.inside:
            node[last] = place.field.default()
        elif isinstance(node, Map):
            node.pop(last, None)

    # ---- what is said at the end ----

    def refuse(self, key: str, message: str) -> None:
        """Collect a problem."""
        self.problems.append(Problem(key, message))

    def notice(self, text: str) -> None:
        """Say something once."""
        if text not in self.root._notices:
            self.root._notices.append(text)

    def _has_no_effect(self, name: str, reason: str) -> None:
        self._without_effect.setdefault(reason, {})[name] = None

    def finish(self) -> None:
        """Settle the keys nobody knows, and say what has no effect."""
        models = [select(self.root, path) for path in ("actor_rollout_ref.model", "model")]
        plugins = any(model is not None and model.external_lib for model in models)
        own_data = bool(select(self.root, "data.custom_cls.path"))
        users_code = any(select(self.root, key) or key in self.interpolated for key in _USERS_CODE)
        texts = [value.data for value in self.interpolated.values()] + [v.data for _, v, _ in self._unknown if v]
        referenced = {first for text in texts for first in _REFERENCE.findall(str(text))}
        unknown: dict[str, dict[str, str]] = {}
        users: dict[str, None] = {}
        for name, value, source in self._unknown:
            first = name.split(".")[0]
            in_group = isinstance(self.root.get(first), Group)
            if value is not None and ((plugins and in_group) or (own_data and name.startswith("data."))):
                self._add(name, value)
            elif (
                value is not None
                and not in_group
                and (first in referenced or (users_code and not self._resembles_ours(name)))
            ):
                self._add(name, value)
                if users_code:
                    users[first] = None
                if "${" in str(value.data):
                    self.interpolated[name], self.written[name] = value, (name, value.data)
            else:
                unknown.setdefault(self._outermost(name), {})[name] = source if name in source else name
        if users:
            self.notice(f"keys of your own, for your code in its config: {', '.join(users)}")
        for name, source in self._to_give.items():
            self.refuse(name, f"??? stands for a value that has to be given; write {name}=… (from {source})")
        for group, unknown_keys in unknown.items():
            if len(unknown_keys) > 1:
                near = "" if "." in group else nearest(group, fields_of(type(self.root)), cutoff=_LIKE)
                self.refuse(group, f"no such group of keys{near}; given in it: {', '.join(unknown_keys)}")
            else:
                [(name, shown)] = unknown_keys.items()
                self.refuse(shown, self._nearest(name))
        for reason, keys in self._without_effect.items():
            if reason not in self.spellings.silent:
                self.notice(f"no effect: {', '.join(keys)}: {reason}")

    def _resembles_ours(self, name: str) -> bool:
        """True if an unknown key outside the groups is likely a misspelled key of the schema.

        Its first part resembles a group's name, a key of the schema ends with it, or it is a key of the schema in
        another place, where it has no place (`lr`) or a name of three words or more (`dataset.train_batch_size`).
        """
        first, dot, _ = name.partition(".")
        last = name.rpartition(".")[2]
        alone = not dot or last.count("_") > 1
        tail = f".{last if alone else name}"
        tails = any(path.endswith(tail) for path in leaves(type(self.root)))
        groups = {*fields_of(type(self.root)), *self.spellings.first_parts(self.entry)}
        return bool(tails or nearest(first, groups, cutoff=_LIKE))

    def _outermost(self, name: str) -> str:
        """The first group of an unknown path that does not exist, or the path."""
        parts = name.split(".")
        paths = (".".join(parts[:depth]) for depth in range(1, len(parts)))
        return next((path for path in paths if select(self.root, path) is None), name)

    def _nearest(self, name: str) -> str:
        keys = list(leaves(type(self.root)))
        parent, _, last = name.rpartition(".")
        same = difflib.get_close_matches(name, [k for k in keys if k.rpartition(".")[2] == last], 3, 0)
        siblings = [k for k in keys if k.rpartition(".")[0] == parent]
        near = difflib.get_close_matches(name, siblings, n=2, cutoff=0.6)
        close = difflib.get_close_matches(name, keys, n=3, cutoff=0.75)
        if nearest := list(dict.fromkeys([*same, *near, *close]))[:3]:
            return f"no key {name}; nearest: {', '.join(nearest)}"
        group = parent if any(k.startswith(parent + ".") for k in keys) else "all"
        return f"no key {name}, and none like it; --help {group} lists them (for your own code: ++{name}=…)"
