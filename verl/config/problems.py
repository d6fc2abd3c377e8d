"""What is wrong with a configuration: one Problem each, all of them in one ConfigError or in a check's Report."""

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
    """

    key: str
    message: str
    kind: Kind = "configuration"

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class ConfigError(UserError, ValueError):
    """The configuration cannot be used. `problems` holds every reason, the text shows them all."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = list(problems)
        super().__init__(_listed(self.problems, "{} in the configuration:"))


@dataclass
class Report:
    """All that a check found. `downloads` are models and files that a run would fetch first; `check_only` are
    notices that the run gives itself, `found_later` problems that it finds and tells more of; `plan` tells the batches."""

    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    check_only: list[str] = field(default_factory=list)
    downloads: list[Problem] = field(default_factory=list)
    found_later: list[Problem] = field(default_factory=list)
    plan: list[str] = field(default_factory=list)

    def of(self, kind: Kind) -> list[Problem]:
        """The problems of a class."""
        return [p for p in self.problems if p.kind == kind]

    @property
    def exit_code(self) -> int:
        """0; 2 if the configuration is wrong; 3 if only this machine lacks something."""
        if self.of("configuration"):
            return EXIT_CONFIGURATION
        return EXIT_MACHINE if self.problems else EXIT_OK

    def allow_run(self) -> None:
        """A run may fetch what is not on disk: those problems become notices. What it finds later is left to it."""
        for problem in self.downloads:
            self.notices.append(f"{problem.key}: not on this disk, fetched at the start")
        for problem in [*self.downloads, *self.found_later]:
            self.problems.remove(problem)
        self.downloads.clear()
        self.found_later.clear()

    def problem_text(self) -> str:
        """All problems, by class, or ""."""
        heads: dict[Kind, str] = {
            "configuration": "the configuration ({}):",
            "machine": "this machine lacks ({}):",
        }
        return "\n".join(_listed(self.of(kind), head) for kind, head in heads.items() if self.of(kind))


def _listed(problems: list[Problem], head: str) -> str:
    count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
    return "\n".join([head.format(count), *(f"  - {problem}" for problem in problems)])
