"""Help on keys, and docs/config.md: types, defaults and the docstrings under the fields, from the schema's source.

`python3 -m verl.config.reference docs/config.md` writes that page's tables again, after its text about overrides.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from verl.config import names
from verl.config.fields import Field, fields_of, leaves, type_name
from verl.config.problems import ConfigError, Problem
from verl.config.rollout_engines import RELEASED
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
        return ("= rollout." if target.startswith("..") else "= ") + target.lstrip(".")
    return "required" if known.about.get("required") else written(known.default())


def written(value: Any) -> str:
    """A value in the override grammar."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written(v) for v in value) + "]"
    return f"{value:g}" if isinstance(value, float) and value != int(value) else str(value)


def allowed(known: Field) -> str:
    """The values a key takes, beyond its type, in words; "" if its type says it all."""
    about, said = known.about, []
    if "options" in about:
        many = "any of " if type_name(known).startswith("list") else ""
        said.append(many + ", ".join(about["options"]))
        if about.get("registry"):
            said.append(f"one's own through {about['registry']}")
    low, high, above = (about.get(name) for name in ("low", "high", "above"))
    if low is not None and high is not None:
        said.append(f"{low:g} to {high:g}")
    else:
        limits = (("> ", above), ("≥ ", low), ("≤ ", high))
        said += [", ".join(f"{sign}{limit:g}" for sign, limit in limits if limit is not None)]
    return "; ".join(part for part in said if part)


def block(path: str, known: Field) -> str:
    """One key in full: its type, default, allowed values and meaning, a line each."""
    rows = [("type", type_name(known).removesuffix("?") + (", or null" if known.nullable else ""))]
    rows.append(("default", (default_text(known) or '""') + (" (ours)" if known.about.get("ours") else "")))
    if values := allowed(known):
        rows.append(("values", values))
    rows.append(("meaning", help_of(known.owner, known.name)))
    return "\n".join([path, *(f"  {name:<8} {text}" for name, text in rows)])


def help_text(entry: str, key: str) -> str:
    """What --help prints: an overview, a group's keys, or a key in full. Raises ConfigError for an unknown key."""
    if not key:
        return _overview(entry)
    known = leaves(ROOTS[entry])
    name = names.canonical(key.split("=")[0].lstrip("+~"), entry)
    if name in known:
        renamed = f"{key} is now called {name}\n" if name != key else ""
        return renamed + block(name, known[name])
    if inside := [path for path in known if path.startswith(name + ".") or name == "all"]:
        return "\n".join(_line(path, known[path]) for path in inside)
    mapped = [path for path, field in known.items() if field.is_map and name.startswith(path + ".")]
    if blocks := [path for path in known if path.endswith("." + name)] or mapped:
        return "\n".join(block(path, known[path]) for path in blocks)
    if reason := names.no_effect(name):
        return f"{name}: accepted, no effect: {reason}"
    near = names.nearest(name, known, 3) or "; nearest: none"
    raise ConfigError([Problem(f"--help {key}", f"no such key{near}")])


def _line(path: str, known: Field) -> str:
    return f"{path} ({type_name(known)}, {default_text(known)}): {help_of(known.owner, known.name)}"


def _overview(entry: str) -> str:
    root = ROOTS[entry]
    lines = [
        f"usage: python3 -m {names.PROGRAMS[entry]} [options] [key=value …]",
        "",
        "options:",
        "  --check              resolve, validate, look at data and model, print the plan of batches; 0 good,",
        "                       2 the configuration is wrong, 3 this machine lacks something",
        "  --cfg job            print the resolved configuration",
        "  --help KEY           a key in full; a group (--help data) all its keys; --help all everything",
        "  --config-name NAME   a configuration of --config-path DIR, or a built-in one: "
        + ", ".join(n for n, (e, _) in names.BUILT_IN.items() if e == entry),
        "",
        "keys:  a.b=value   +a.b=value in an open mapping   ++a.b=value anywhere   ~a.b back to the default",
        "",
        "groups:",
    ]
    groups = {name: known for name, known in fields_of(root).items() if known.group is not None}
    policy = groups.pop("actor_rollout_ref", None)
    if policy is not None and policy.group is not None:
        inner = fields_of(policy.group).items()
        parts = {f"actor_rollout_ref.{name}": known for name, known in inner if known.group is not None}
        groups = {"data": groups.pop("data"), **parts, **groups}
    for path, known in groups.items():
        assert known.group is not None
        lines.append(f"  {path:<28} {len(leaves(known.group)):>3} keys  {_first_line(known.group)}")
    return "\n".join(lines)


def _first_line(group: type[Group]) -> str:
    return (group.__doc__ or "").strip().splitlines()[0]


# ---- docs/config.md ----


def render(page: str) -> str:
    """The page with its tables written again; what is in front of the first one stays."""
    parts = [page.partition("## Keys of ")[0].rstrip("\n") + "\n"]
    seen: dict[type[Group], str] = {}
    for entry, root in ROOTS.items():
        parts.append(f"## Keys of `{names.PROGRAMS[entry]}`\n")
        for name, known in fields_of(root).items():
            if known.group is not None:
                parts.extend(_sections(name, known.group, seen))
    return "\n".join([*parts, *_other_names()])


def _table(title: str, text: str, head: str, rows: Iterable[Sequence[str]]) -> str:
    columns = head.count("|") + 1
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([title, "", text, "", f"| {head} |", "|" + "---|" * columns, *lines, ""])


def _sections(path: str, group: type[Group], seen: dict[type[Group], str]) -> Iterator[str]:
    """A table for a group, then those of its own groups; a group seen before is only pointed at."""
    if group in seen:
        yield f"### `{path}.`\n\nThe keys of `{seen[group]}.`\n"
        return
    seen[group] = path
    base = next((b for b in group.__mro__[1:] if b in seen), None)
    inherited = set(fields_of(base)) - set(inspect.get_annotations(group)) if base else set()
    own = {name: known for name, known in fields_of(group).items() if name not in inherited}
    if rows := [_row(known) for known in own.values() if known.group is None]:
        same = f" The keys of `{seen[base]}.`, and:" if base else ""
        yield _table(f"### `{path}.`", _first_line(group) + same, "key | type | default | meaning", rows)
    for name, known in own.items():
        if known.group is not None:
            yield from _sections(f"{path}.{name}", known.group, seen)


def _row(known: Field) -> tuple[str, str, str, str]:
    ours = " *(ours)*" if known.about.get("ours") else ""
    text, values = help_of(known.owner, known.name), allowed(known)
    if values and not all(str(option) in text for option in known.about.get("options", (values,))):
        text += f" Values: {values}."
    kind, default = type_name(known).replace("|", " or "), default_text(known) or '""'
    return known.name, kind, f"`{default}`{ours}", text.replace("|", "\\|")


def _other_names() -> Iterator[str]:
    """Old names, keys without effect, and what is refused."""
    renames = {**names.RENAMES["ppo"], **names.RENAMES["sft"]}.items()
    old = [(_plain(glob), re.sub(r"\\\d", "…", new)) for glob, new in renames]
    old.append(("*_micro_batch_size (over all devices)", "*_micro_batch_size_per_gpu"))
    old.append((f"{names.STALENESS_MODE}, {names.STALENESS_LIMIT}", "trainer.max_staleness"))
    yield _table("## Old names", "Accepted, with one line that names the new one.", "old | new", old)
    unread = [(_plain(row.keys), row.reason) for row in names.UNREAD]
    rows = [*((_plain(glob), reason) for glob, reason in names.NO_EFFECT.items()), *unread]
    yield _table("## Accepted, no effect", "The reason is printed once.", "key | reason", rows)
    refused = [(_plain(glob.replace(":", ".")), *absent) for glob, absent in names.REFUSED.items()]
    for key, values in names.REFUSED_VALUES.items():
        refused += [(f"{key}={value}", *absent) for value, absent in values.items()]
    refused += [(key, *absent) for key, absent in names.FEATURES.items()]
    here = (
        f"Estimators here: {', '.join(names.built_in('ESTIMATORS'))}; policy losses: {', '.join(names.built_in('LOSSES'))} (and "
        f"registered ones); engines: {', '.join(RELEASED)}; strategies: {', '.join(names.STRATEGIES)}."
    )
    yield _table("## Not in this release", here, "key | what it is | closest", refused).rstrip("\n") + "\n"


def _plain(glob: str) -> str:
    """A glob as the page shows it: without braces around the whole."""
    whole = glob.startswith("{") and glob.find("}") == len(glob) - 1
    return glob[1:-1] if whole else glob


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(render(target.read_text(encoding="utf-8")), encoding="utf-8")
