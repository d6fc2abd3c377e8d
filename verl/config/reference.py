"""Help on keys: types, defaults and the docstrings under the fields, read from the schema's source when asked for."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import sys
from typing import Any

from verl.config import tables
from verl.config.fields import Field, fields_of, leaves, type_name
from verl.config.problems import ConfigError, Problem
from verl.config.schema import ROOTS
from verl.config.schema.base import Group


@functools.cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """(class, field) → the string under the field, for one schema module."""
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, after in zip(node.body, node.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[node.name, field.target.id] = " ".join(str(after.value.value).split())
    return found


def help_of(cls: type[Group], name: str) -> str:
    """The help of a key: the string under the field in the class or the nearest base that has one."""
    for base in cls.__mro__:
        text = _docstrings(base.__module__).get((base.__name__, name)) if issubclass(base, Group) else None
        if text:
            return text
    return ""


def default_text(known: Field) -> str:
    """The default as one would write it."""
    if "shown" in known.about:
        return str(known.about["shown"])
    if "same_as" in known.about:
        target = str(known.about["same_as"])
        return f"= {target.lstrip('.')}" if not target.startswith("..") else f"= rollout.{target.lstrip('.')}"
    if known.about.get("required"):
        return "required"
    return written(known.default())


def written(value: Any) -> str:
    """A value in the override grammar."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written(v) for v in value) + "]"
    return f"{value:g}" if isinstance(value, float) and value != int(value) else str(value)


def line(path: str, known: Field) -> str:
    """One key in one line."""
    return f"{path} ({type_name(known)}, {default_text(known)}): {help_of(known.owner, known.name)}"


def allowed(known: Field) -> str:
    """The values a key takes, beyond its type, in words; "" if its type says it all."""
    about, said = known.about, []
    if "options" in about:
        many = "any of " if type_name(known).startswith("list") else ""
        said.append(many + ", ".join(str(option) for option in about["options"]))
        if about.get("registry"):
            said.append(f"one's own through {about['registry']}")
    low, high, above = (about.get(name) for name in ("low", "high", "above"))
    if above is not None:
        said.append(f"> {above:g}" + (f", ≤ {high:g}" if high is not None else ""))
    elif low is not None:
        said.append(f"{low:g} to {high:g}" if high is not None else f"≥ {low:g}")
    elif high is not None:
        said.append(f"≤ {high:g}")
    return "; ".join(said)


def block(path: str, known: Field) -> str:
    """One key in full: its type, default, allowed values and meaning, a line each."""
    rows = [("type", type_name(known).removesuffix("?") + (", or null" if known.nullable else ""))]
    rows.append(("default", (default_text(known) or '""') + (" (ours)" if known.about.get("ours") else "")))
    if values := allowed(known):
        rows.append(("values", values))
    rows.append(("meaning", help_of(known.owner, known.name)))
    return "\n".join([path, *(f"  {name:<8} {text}" for name, text in rows)])


def help_text(entry: str, key: str, program: str) -> str:
    """What --help prints: an overview, a group's keys, or a key in full. Raises ConfigError for an unknown key."""
    if not key:
        return _overview(entry, program)
    known = leaves(ROOTS[entry])
    name = tables.canonical(key.split("=")[0].lstrip("+~"), entry)
    if name in known:
        renamed = f"{key} is now called {name}\n" if name != key else ""
        return renamed + block(name, known[name])
    inside = [
        line(path, field) for path, field in known.items() if path.startswith(name + ".") or name == "all"
    ]
    if inside:
        return "\n".join(inside)
    ending = [block(path, field) for path, field in known.items() if path.endswith("." + name)]
    if ending:
        return "\n".join(ending)
    if reason := tables.no_effect(name):
        return f"{name}: accepted, no effect: {reason}"
    mapped = next((p for p, f in known.items() if f.is_map and name.startswith(p + ".")), None)
    if mapped:
        return block(mapped, known[mapped])
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    raise ConfigError([Problem(f"--help {key}", f"no such key; nearest: {', '.join(near) or 'none'}")])


def _overview(entry: str, program: str) -> str:
    root = ROOTS[entry]
    lines = [
        f"usage: python3 -m {program} [options] [key=value …]",
        "",
        "options:",
        "  --check              resolve, validate, look at data and model, print the plan of batches; 0 good,",
        "                       2 the configuration is wrong, 3 this machine lacks something",
        "  --cfg job            print the resolved configuration",
        "  --help KEY           a key in full; a group (--help data) all its keys; --help all everything",
        "  --config-name NAME   a configuration of --config-path DIR, or a built-in one: "
        + ", ".join(n for n, (e, _) in tables.BUILT_IN.items() if e == entry),
        "",
        "keys:  a.b=value   +a.b=value in an open mapping   ++a.b=value anywhere   ~a.b back to the default",
        "",
        "groups:",
    ]
    for name, known in fields_of(root).items():
        for path, group in _two_levels(name, known):
            count = sum(1 for leaf in leaves(root) if leaf.startswith(path + "."))
            purpose = (group.__doc__ or "").strip().splitlines()[0]
            lines.append(f"  {path:<28} {count:>3} keys  {purpose}")
    return "\n".join(lines)


def _two_levels(name: str, known: Field) -> list[tuple[str, type[Group]]]:
    if known.group is None:
        return []
    if name != "actor_rollout_ref":
        return [(name, known.group)]
    return [(f"{name}.{n}", f.group) for n, f in fields_of(known.group).items() if f.group is not None]
