"""Configurations in YAML files: `--config-path`, `--config-name`, the `defaults:` list, built-in names."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from verl.config.problems import ConfigError, Problem

Configurations = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Name → entry point, keys that it sets: `Spellings.configurations`."""
_MOST_NODES = 100_000


@dataclass(frozen=True, slots=True)
class Layer:
    """A piece of configuration at a dotted path ("" = the root): a mapping, or a group's choice."""

    path: str
    content: Any
    source: str
    choice: bool = False


BuiltIn = Callable[[str, list[Path]], Iterator[Layer]]


def read(name: str | None, folders: list[Path], configurations: Configurations, entry: str) -> list[Layer]:
    """The layers of a configuration (None: the entry point's own), later ones override. Raises ConfigError."""
    name = name or next(default for default, (program, _) in configurations.items() if program == entry)
    built_in = partial(_built_in, configurations, entry)
    return list(_layers(name.removesuffix(".yaml").removesuffix(".yml"), folders, built_in, ()))


def _layers(name: str, folders: list[Path], built_in: BuiltIn, parents: tuple[str, ...]) -> Iterator[Layer]:
    if name in parents:
        raise _error(f"{' → '.join([*parents, name])}: a configuration includes itself; remove one of them")
    file = _find(name, folders)
    if file is None:
        yield from built_in(name, folders)
        return
    tree = load_yaml(file)
    defaults = tree.pop("defaults", None)
    tree.pop("hydra", None)
    if not isinstance(defaults, list | None):
        raise _error(f"{file}: `defaults` is a list, for example [ppo_trainer, _self_]")
    items = defaults or []
    for item in items if "_self_" in items else [*items, "_self_"]:
        if item == "_self_":
            yield Layer("", tree, str(file))
        else:
            yield from _default(item, file, folders, built_in, (*parents, name))


def _default(
    item: Any, file: Path, folders: list[Path], built_in: BuiltIn, parents: tuple[str, ...]
) -> Iterator[Layer]:
    """One line of a defaults list: a name, or {group@package: choice}."""
    if isinstance(item, str):
        yield from _layers(item.removesuffix(".yaml"), [file.parent, *folders], built_in, parents)
        return
    if not isinstance(item, dict) or len(item) != 1:
        raise _error(f"{file}: {item!r} in `defaults` is neither a name nor `group@package: choice`")
    (group, choice), *_ = item.items()
    group = re.sub(r"^(override|optional)\s+", "", str(group)).lstrip("/")
    if choice is None or group.startswith("hydra/"):
        return
    folder, _, package = group.partition("@")
    package = package or folder.replace("/", ".")
    package = "" if package == "_global_" else package
    fragment = _find(f"{folder}/{choice}", [file.parent, *folders])
    if fragment is None:
        yield Layer(package, choice, str(file), choice=True)
        return
    tree = load_yaml(fragment)
    tree.pop("defaults", None)
    yield Layer(package, tree, str(fragment))


def _built_in(configurations: Configurations, entry: str, name: str, folders: list[Path]) -> Iterator[Layer]:
    program, keys = configurations.get(name, ("", {}))
    if not program:
        looked = ", ".join(str(f) for f in folders) or "no --config-path given"
        names = ", ".join(n for n, (e, _) in configurations.items() if e == entry)
        raise _error(f"--config-name={name}: no file {name}.yaml ({looked}) and no built-in one ({names})")
    if program != entry:
        raise _error(f"--config-name={name} belongs to another program ({program}); this one is {entry}")
    yield Layer("", keys, name)


def _find(name: str, folders: list[Path]) -> Path | None:
    candidates = (folder / f"{name}{end}" for folder in folders for end in (".yaml", ".yml"))
    return next((file for file in candidates if os.path.isfile(file)), None)


def load_yaml(file: Path) -> dict[str, Any]:
    """A YAML file's mapping; 1e-6 is a number and a repeated key an error. Raises ConfigError."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        if _expanded(yaml.compose(file.read_text(encoding="utf-8")), {}) > _MOST_NODES:
            raise _error(f"{file}: aliases expand it to more than {_MOST_NODES} values; write fewer of them")
        tree = OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise _error(f"{file}: cannot be read as YAML: {error}") from error
    if not isinstance(tree, dict):
        raise _error(f"{file}: expected a mapping of keys, got {type(tree).__name__}")
    return {str(name): content for name, content in tree.items()}


def _expanded(node: Any, sizes: dict[int, float]) -> float:
    """Number of values below a YAML node with every alias expanded; infinity for a node that contains itself.

    `sizes` holds the numbers of the nodes counted so far, by id.
    """
    if id(node) not in sizes:
        sizes[id(node)] = math.inf
        inside = node.value if isinstance(getattr(node, "value", None), list) else ()
        parts = (part for item in inside for part in (item if isinstance(item, tuple) else (item,)))
        sizes[id(node)] = 1 + sum(_expanded(part, sizes) for part in parts)
    return sizes[id(node)]


def dump_yaml(tree: dict[str, Any]) -> str:
    """The YAML text that `load_yaml` reads back to the same tree, in its order."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    # 1e-6 is a number (YAML 1.2), which PyYAML takes for a string: a string of that form is quoted.
    number = re.compile(r"[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$")
    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    text = yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return str(text).rstrip("\n")


def _error(message: str) -> ConfigError:
    return ConfigError([Problem("", message)])
