"""Help on keys, for `--help`: types, defaults, allowed values, and what the docstrings of the groups say."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

from verl.config.matching import Spellings, lookup, nearest
from verl.config.problems import ConfigError, Problem
from verl.config.schema.base import Group
from verl.config.schema.entries import PROGRAMS, ROOTS
from verl.config.schema.fields import Field, fields_of, leaves, type_name

_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.M)


@functools.cache
def _attributes(cls: type[Group]) -> dict[str, str]:
    """Key → its meaning, from the `Attributes:` of the docstring of one class."""
    text = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
    return {name: " ".join(meaning.split()) for name, meaning in _ATTRIBUTE.findall(text)}


def help_of(cls: type[Group], name: str) -> str:
    """The help of a key: what the class, or the nearest base, says of it."""
    meanings = (_attributes(base).get(name, "") for base in cls.__mro__ if issubclass(base, Group))
    return next(filter(None, meanings), "")


def first_line(group: type[Group]) -> str:
    """What a group is about."""
    return (group.__doc__ or "").strip().splitlines()[0]


def default_text(field: Field) -> str:
    """The default as one would write it."""
    if "shown" in field.about:
        return str(field.about["shown"])
    if "same_as" in field.about:
        target = str(field.about["same_as"])
        return ("= rollout." if target.startswith("..") else "= ") + target.lstrip(".")
    return "required" if field.about.get("required") else written(field.default()) or '""'


def written(value: Any) -> str:
    """A value in the override grammar."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written(v) for v in value) + "]"
    return str(value)


def allowed(field: Field) -> str:
    """The values a key takes, beyond its type, in words; "" if its type says it all."""
    about, parts = field.about, []
    if "options" in about:
        many = "any of " if type_name(field).startswith("list") else ""
        parts.append(many + ", ".join(about["options"]))
        if about.get("registry"):
            parts.append(f"one's own through {about['registry']}")
    low, high, above = (about.get(name) for name in ("low", "high", "above"))
    if low is not None and high is not None:
        parts.append(f"{low} to {high}")
    else:
        limits = (("> ", above), ("≥ ", low), ("≤ ", high))
        parts += [", ".join(f"{sign}{limit}" for sign, limit in limits if limit is not None)]
    if "also" in about:
        parts[-1] += f", or {about['also']}"
    if about.get("inf"):
        parts.append("inf = off")
    return "; ".join(part for part in parts if part)


def block(path: str, field: Field) -> str:
    """One key in full: its type, default, allowed values and meaning, a line each."""
    rows = {
        "type": type_name(field).removesuffix("?") + (", or null" if field.nullable else ""),
        "default": default_text(field) + (" (ours)" if field.about.get("ours") else ""),
        "values": allowed(field),
        "meaning": help_of(field.owner, field.name),
    }
    return "\n".join([path, *(f"  {name:<8} {text}" for name, text in rows.items() if text)])


def help_text(entry: str, key: str, spellings: Spellings) -> str:
    """What --help prints: an overview, a group's keys, or a key in full. Raises ConfigError for an unknown key."""
    if not key:
        return _overview(entry, spellings)
    keys = leaves(ROOTS[entry])
    name = spellings.canonical(key.split("=")[0].lstrip("+~"), entry)
    if name in keys:
        renamed = f"{key} is now called {name}\n" if name != key else ""
        return renamed + block(name, keys[name])
    if inside := [path for path in keys if path.startswith(name + ".") or name == "all"]:
        fields = ((path, keys[path]) for path in inside)
        return "\n".join(f"{p} ({type_name(f)}, {default_text(f)}): {help_of(f.owner, f.name)}" for p, f in fields)
    mapped = [path for path, field in keys.items() if field.is_map and name.startswith(path + ".")]
    if blocks := [path for path in keys if path.endswith("." + name)] or mapped:
        return "\n".join(block(path, keys[path]) for path in blocks)
    if reason := lookup(spellings.no_effect, name):
        return f"{name}: accepted, no effect: {reason}"
    near = nearest(name, keys, 3) or "; nearest: none"
    raise ConfigError([Problem(f"--help {key}", f"no such key{near}")])


_OVERVIEW = """\
usage: python3 -m {program} [options] [key=value …]

options:
  --check              resolve, validate, look at data and model, print the plan of batches; 0 good,
                       2 the configuration is wrong, 3 this machine lacks something
  --cfg job            print the resolved configuration
  --help KEY           a key in full; a group (--help data) all its keys; --help all everything
  --config-name NAME   a configuration of --config-path DIR, or a built-in one: {built_in}

keys:  a.b=value   +a.b=value in an open mapping   ++a.b=value anywhere   ~a.b back to the default

groups:"""


def _overview(entry: str, spellings: Spellings) -> str:
    built_in = ", ".join(name for name, (program, _) in spellings.configurations.items() if program == entry)
    lines = [_OVERVIEW.format(program=PROGRAMS[entry], built_in=built_in)]
    for path, group in _groups(ROOTS[entry], ""):
        lines.append(f"  {path:<28} {len(leaves(group)):>3} keys  {first_line(group)}")
    return "\n".join(lines)


def _groups(cls: type[Group], path: str) -> list[tuple[str, type[Group]]]:
    """The groups of an entry point by path; the policy's are taken apart."""
    groups = []
    for name, field in fields_of(cls).items():
        if name == "actor_rollout_ref" and field.group is not None:
            groups += _groups(field.group, f"{name}.")
        elif field.group is not None:
            groups.append((path + name, field.group))
    return groups
