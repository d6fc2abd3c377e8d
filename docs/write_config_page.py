"""Write the tables of docs/config.md again, after its text about overrides: `python docs/write_config_page.py`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import fill

from verl.compat.spellings import PUBLIC
from verl.config import release
from verl.config.reference import allowed, default_text, first_line, help_of
from verl.config.schema.base import Group
from verl.config.schema.entries import PROGRAMS, ROOTS
from verl.config.schema.fields import Field, fields_of, type_name
from verl.engine.registry import ROLLOUT_ENGINES, TRAINING_ENGINES

PAGE = Path(__file__).with_name("config.md")


def render(page: str) -> str:
    """The page with its tables written again; what is in front of the first one stays."""
    parts = [page.partition("## Keys of ")[0].rstrip("\n") + "\n"]
    seen: dict[type[Group], str] = {}
    for entry, root in ROOTS.items():
        parts.append(f"## Keys of `{PROGRAMS[entry]}`\n")
        for name, known in fields_of(root).items():
            if known.group is not None:
                parts.extend(sections(name, known.group, seen))
    return "\n".join([*parts, *other_names()])


def table(title: str, text: str, head: str, rows: Iterable[Sequence[str]]) -> str:
    """A heading, a paragraph and a table; `head` holds the columns' names with " | " between them."""
    columns = head.count("|") + 1
    lines = [f"| {' | '.join(row)} |" for row in rows]
    text = fill(text, 120, break_long_words=False, break_on_hyphens=False)
    return "\n".join([title, "", text, "", f"| {head} |", "|" + "---|" * columns, *lines, ""])


def sections(path: str, group: type[Group], seen: dict[type[Group], str]) -> Iterator[str]:
    """A table for a group, then those of its own groups; a group seen before is only pointed at."""
    if group in seen:
        yield f"### `{path}.`\n\nThe keys of `{seen[group]}.`\n"
        return
    seen[group] = path
    base = next((b for b in group.__mro__[1:] if b in seen), None)
    inherited = set(fields_of(base)) - set(inspect.get_annotations(group)) if base else set()
    own = {name: known for name, known in fields_of(group).items() if name not in inherited}
    if rows := [row(known) for known in own.values() if known.group is None]:
        same = f" The keys of `{seen[base]}.`, and:" if base else ""
        yield table(f"### `{path}.`", first_line(group) + same, "key | type | default | meaning", rows)
    for name, known in own.items():
        if known.group is not None:
            yield from sections(f"{path}.{name}", known.group, seen)


def row(known: Field) -> tuple[str, str, str, str]:
    """A key's line."""
    ours = " *(ours)*" if known.about.get("ours") else ""
    text, values = help_of(known.owner, known.name), allowed(known)
    if values and not all(str(option) in text for option in known.about.get("options", (values,))):
        text += f" Values: {values}."
    kind = type_name(known).replace("|", " or ")
    return known.name, kind, f"`{default_text(known)}`{ours}", text.replace("|", "\\|")


def other_names() -> Iterator[str]:
    """Old names, keys without effect, and what is refused."""
    renames = {**PUBLIC.renames["ppo"], **PUBLIC.renames["sft"]}.items()
    old = [(plain(glob), re.sub(r"\\\d", "…", new)) for glob, new in renames]
    old.append(("*_micro_batch_size (over all devices)", "*_micro_batch_size_per_gpu"))
    computed = "trainer.{weight_sync_every, max_staleness, max_steps_per_version}, …: see docs/compat.md"
    old.append((", ".join(PUBLIC.computed), computed))
    yield table("## Old names", "Accepted, with one line that names the new one.", "old | new", old)
    of_engines = [table for engine in ROLLOUT_ENGINES.values() for table in engine.unread.items()]
    unread = [("rollout." + ", ".join(keys.split()), why) for keys, why in of_engines]
    unread += [(plain(glob), why) for table in release.UNREAD.values() for glob, why in table.items()]
    no_effect = {**PUBLIC.switches, **PUBLIC.no_effect}.items()
    rows = [*((plain(glob), reason) for glob, reason in no_effect), *unread]
    yield table("## Accepted, no effect", "The reason is printed once.", "key | reason", rows)
    refused = [(plain(glob), *absent[:2]) for glob, absent in PUBLIC.refused.items()]
    for key, values in release.REFUSED_VALUES.items():
        refused += [(f"{key}={value}", *absent[:2]) for value, absent in values.items()]
    refused += [(key, *absent[:2]) for key, absent in release.FEATURES.items()]
    here = (
        f"Estimators here: {', '.join(release.built_in('ESTIMATORS'))}; policy losses: "
        f"{', '.join(release.built_in('LOSSES'))} (and "
        f"registered ones); engines: {', '.join(ROLLOUT_ENGINES)}; strategies: {', '.join(TRAINING_ENGINES)}."
    )
    yield table("## Not in this release", here, "key | what it is | closest", refused).rstrip("\n") + "\n"


def plain(glob: str) -> str:
    """A glob as the page shows it: without braces around the whole."""
    whole = glob.startswith("{") and glob.find("}") == len(glob) - 1
    return glob[1:-1] if whole else glob


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
