"""What environments are made of: what a user writes (`Env`), what it answers with, and how a dialogue opens."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Messages = list[dict[str, Any]]


@dataclass(slots=True)
class Observation:
    """What a dialogue begins with: messages (None: the row's own prompt), and the schemas of what the policy may
    call."""

    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        _check(self.messages or [])


@dataclass(slots=True)
class StepResult:
    """What follows a turn: messages to the policy, the reward that the turn earned, whether it was the last. truncated:
    a limit of the environment's own ended it (status max_turns). invalid: the turn held no action that the environment
    takes (counted as an invalid call, three in a row end the trajectory); None: not told."""

    messages: Messages = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False
    invalid: bool | None = None

    def __post_init__(self) -> None:
        _check(self.messages)
        self.reward = float(self.reward or 0.0)


def _check(messages: Any) -> None:
    fit = isinstance(messages, list) and all(isinstance(m, Mapping) and "role" in m for m in messages)
    if not fit:
        raise TypeError(f"messages are a list of {{role, content}}, not {messages!r:.200}")


class Env(Protocol):
    """What a user writes; one instance serves one trajectory. Methods may be async; others run in a thread of their
    own."""

    def reset(self, row: Mapping[str, Any]) -> Observation | Awaitable[Observation]:
        """Begin. row: the row's columns, and `raw_prompt`, `extra_info`, `uid`, `sample_index`."""

    def step(self, message: Mapping[str, Any]) -> StepResult | Awaitable[StepResult]:
        """Answer a turn of the policy: role, content, and `tool_calls` where tools were given."""

    def close(self) -> Awaitable[None] | None:
        """Give up what it holds."""


def seed_of(row: Mapping[str, Any]) -> int:
    """A seed that the members of a group share."""
    return int.from_bytes(hashlib.blake2b(str(row["uid"]).encode(), digest_size=4).digest(), "little")


def opening(row: Mapping[str, Any], text: Any) -> Messages:
    """The row's prompt with the first observation at its end."""
    messages = [dict(message) for message in row["raw_prompt"]]
    if messages and messages[-1]["role"] == "user":
        content, more = messages[-1]["content"], f"\n\n{text}" if text else ""
        messages[-1]["content"] = (
            content + more if isinstance(content, str) else [*content, {"type": "text", "text": more}]
        )
    else:
        messages.append({"role": "user", "content": str(text)})
    return messages
