"""Environments: what a user writes (`Env`), what it answers with, how a dialogue opens, and `GymEnv`."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Messages = list[dict[str, Any]]
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?", re.I)


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
    own. One that has `final()`, which gives a StepResult, is asked at the end of its episode, however that came, what
    it earned as a whole."""

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
        parts = [{"type": "text", "text": more}]
        messages[-1]["content"] = content + more if isinstance(content, str) else [*content, *parts]
    else:
        messages.append({"role": "user", "content": str(text)})
    return messages


class GymEnv:
    """An environment of gymnasium's interface: observations are messages of the user, turns are actions.

    A space of numbers (Discrete, MultiDiscrete, MultiBinary, Box) takes the last numbers of a turn, any other one its
    text. The members of a group begin alike: where `reset` takes a seed, it follows from the row's uid.
    """

    def __init__(self, env: Any):
        self._env = env
        self._space: Any = getattr(env, "action_space", None)
        self._reads_numbers = getattr(self._space, "shape", None) is not None

    def reset(self, row: Mapping[str, Any]) -> Observation:
        """The row's prompt, and the first observation at its end."""
        takes_seed = "seed" in inspect.signature(self._env.reset).parameters
        observation, _ = self._env.reset(seed=seed_of(row)) if takes_seed else self._env.reset()
        text = "" if observation is None else str(observation)  # an array or 0 is seen, too
        return Observation(opening(row, text))

    def step(self, message: Mapping[str, Any]) -> StepResult:
        """Act as the turn says. One without a valid action is answered with what is expected."""
        try:
            action = self._numbers(message["content"]) if self._reads_numbers else message["content"]
        except ValueError as error:
            return StepResult([{"role": "user", "content": f"Error: {error}"}], invalid=True)
        observation, reward, terminated, truncated, info = self._env.step(action)
        metrics = {k: v for k, v in info.items() if isinstance(v, int | float | str | bool)}
        messages = [{"role": "user", "content": str(observation)}]
        done, invalid = bool(terminated or truncated), False if self._reads_numbers else None
        return StepResult(messages, float(reward), done, metrics, not terminated, invalid)

    def _numbers(self, text: str) -> Any:
        """The action at the end of a text, a number or an array as its space has it. ValueError says what is
        expected."""
        space = self._space
        size, whole = int(np.prod(space.shape)), not np.issubdtype(space.dtype, np.floating)
        with suppress(ValueError, OverflowError):
            read: Any = int if whole else float
            numbers = [read(number) for number in _NUMBER.findall(text)[-size:]]
            action = np.array(numbers, space.dtype).reshape(space.shape)[()]
            if space.contains(action):
                return action
        kind = "integer" if whole else "number"
        raise ValueError(f"no valid action; end with {size} {kind}{'s' * (size != 1)} in {space}")

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
