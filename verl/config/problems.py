"""What is wrong with a configuration: one Problem each, all of them in one ConfigError."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from verl.errors import UserError

Kind = Literal["configuration", "machine"]


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
        count = len(self.problems)
        head = "1 problem in the configuration" if count == 1 else f"{count} problems in the configuration"
        super().__init__("\n".join([f"{head}:", *(f"  - {p}" for p in self.problems)]))
