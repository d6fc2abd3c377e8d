"""Names matched with names: globs of keys, similar names, the spellings of another system.

A glob: `*.` in front is any prefix or none, `*` the rest of a word, `{a, b}` one of several; it covers the keys below
it too.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from verl.config.release import Absent
from verl.config.schema.base import Root

Row = TypeVar("Row")


@functools.cache
def compiled(glob: str) -> re.Pattern[str]:
    """The expression of a glob, for `match`; its groups are its variable parts, in order."""
    text = glob.replace(".", r"\.").replace(r"*\.", r"(.*\.)?").replace("{", "(").replace("}", ")")
    return re.compile(re.sub(r"(?<!\.)\*", r"\\w*", text.replace(", ", "|")) + r"(?=\.|$)")


def lookup(table: Mapping[str, Row], path: str) -> Row | None:
    """What the first glob of a table that covers a path stands for, or None."""
    return next((row for glob, row in table.items() if compiled(glob).match(path)), None)


def nearest(name: str, options: Iterable[str], count: int = 1, cutoff: float = 0.5) -> str:
    """Text that names the options most similar to `name`, whatever its case; "" if none is like it. One with the same
    letters comes first: two of them changed places."""
    lowered = {option.lower(): option for option in reversed(list(options))}
    lower_name = str(name).lower()
    swapped = [option for option in lowered if sorted(option) == sorted(lower_name)]
    similar = difflib.get_close_matches(lower_name, list(lowered), count, cutoff)
    matches = list(dict.fromkeys([*swapped, *similar]))[:count]
    return f"; nearest: {', '.join(lowered[match] for match in matches)}" if matches else ""


class Spellings(NamedTuple):
    """Names and values of another system beside the schema's, as data for `verl.config.command_line.build`.

    Keys may be globs. renames: entry point → old key → the schema's, in which \\1 and \\2 stand for the variable parts
    of the glob. synonyms: key → value → ours; modules: a module's name → ours. no_effect: keys that are accepted and
    change nothing, with the reason that is printed unless it is one of `silent`; switches: the same for switches that
    are on.
    refused: keys outside the schema that switch a missing feature on. choices: group → `group@package=choice` → its
    `strategy`, or None where there is one implementation. configurations: names for `--config-name` → entry point and
    the keys they set; the first one of an entry point is its default. computed: keys that stand for others by a
    computation; settle(root, values of these keys, refuse, notice) does it.
    """

    renames: Mapping[str, Mapping[str, str]] = {}
    synonyms: Mapping[str, Mapping[str, str]] = {}
    modules: Mapping[str, list[str]] = {}
    no_effect: Mapping[str, str] = {}
    silent: tuple[str, ...] = ()
    switches: Mapping[str, str] = {}
    refused: Mapping[str, Absent] = {}
    choices: Mapping[str, Mapping[str, str | None]] = {}
    configurations: Mapping[str, tuple[str, Mapping[str, Any]]] = {
        "ppo_trainer": ("ppo", {}),
        "sft_trainer": ("sft", {}),
        "evaluation": ("eval", {}),
        "generation": ("generation", {}),
    }
    computed: tuple[str, ...] = ()
    settle: Callable[[Root, Mapping[str, Any], Callable[[str, str], None], Callable[[str], None]], None] = (
        lambda root, values, refuse, notice: None
    )

    def canonical(self, path: str, entry: str) -> str:
        """The schema's spelling of a path (the path itself if it is no old name); renames may chain."""
        for old, new in self.renames.get(entry, {}).items():
            if match := compiled(old).match(path):
                return self.canonical(match.expand(new) + path[match.end() :], entry)
        return path

    def first_parts(self, entry: str) -> set[str]:
        """First parts of the paths that an entry point knows beside its schema."""
        globs = " ".join([*self.renames.get(entry, ()), *self.switches, *self.refused, *self.no_effect])
        return set(re.findall(r"(?:^|[{ ])(\w+)\.", globs))
