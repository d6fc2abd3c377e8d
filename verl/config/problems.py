"""What is wrong with a configuration: one Problem each, all of them in one ConfigError or in a Report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from verl.errors import UserError

Kind = Literal["configuration", "machine"]
EXIT_OK, EXIT_CONFIGURATION, EXIT_MACHINE = 0, 2, 3


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to change. `kind` is "configuration", or "machine" for what this machine lacks.

    `key` names the key (or keys) it is about and may be empty; `message` says what is wrong and what to do.
    `left_to_run`: a run deals with it: it fetches what this machine lacks, or reports the problem later in more detail.
    """

    key: str
    message: str
    kind: Kind = "configuration"
    left_to_run: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class ConfigError(UserError, ValueError):
    """The configuration cannot be used. `problems` holds every reason, the text shows them all."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = list(problems)
        super().__init__(problem_text(self.problems))


def problem_text(problems: list[Problem]) -> str:
    """All problems, by class, or ""."""
    lines = []
    for kind, head in (("configuration", "the configuration"), ("machine", "this machine lacks")):
        if of_kind := [f"  - {problem}" for problem in problems if problem.kind == kind]:
            lines += [f"{head} ({counted(len(of_kind), 'problem')}):", *of_kind]
    return "\n".join(lines)


def counted(number: int, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
