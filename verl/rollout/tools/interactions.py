"""Interactions: a simulated user who replies where the model calls no tool (`multi_turn.interaction_config_path`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from verl.rollout.event_loop import within
from verl.rollout.record import EnvironmentFailed
from verl.rollout.tools.tool import ToolError
from verl.rollout.tools.toolbox import load_yaml, made, told, warn_once


class BaseInteraction:
    """One kind of partner, shared by the dialogues of a process. config: the entry's in the interactions file."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a dialogue; kwargs: the row's `interaction_kwargs`."""
        return instance_id or uuid4().hex

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """(is the dialogue over, what the user says next, reward of the turn, metrics)."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """A score of the dialogue."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """End a dialogue."""


def load_interactions(path: str | None) -> dict[str, BaseInteraction]:
    """Name → interaction of a YAML `interaction: [{name, class_name, config}]`. ToolError for one that cannot be
    used."""
    interactions: dict[str, BaseInteraction] = {}
    entries = load_yaml(path, "interaction", ("name", "class_name", "config")) if path else ()
    for number, entry in enumerate(entries):
        where = f"{path} entry {number}"
        class_name = str(entry.get("class_name")).rpartition(".")[2]
        name = entry.get("name") or class_name.removesuffix("Interaction").lower()
        if name in interactions:
            raise ToolError(f"{path}: two interactions are called {name!r}")
        config = {"name": name, **(entry.get("config") or {})}
        interactions[name] = made(entry, where, BaseInteraction, config=config)
    return interactions


class Partner:
    """The interaction of one trajectory. timeout: seconds of one answer, None for no deadline."""

    def __init__(self, interaction: BaseInteraction, kwargs: Mapping[str, Any], timeout: float | None):
        self._interaction, self._kwargs, self._timeout = interaction, dict(kwargs), timeout
        self._id: str | None = None
        self.rewards: list[float] = []
        self.metrics: list[dict[str, Any]] = []

    async def answer(self, messages: list[dict[str, Any]]) -> str | None:
        """What the user says to the model's last turn; None where the dialogue is over. EnvironmentFailed for what goes
        wrong: the policy is not to blame."""
        try:
            over, text, reward, metrics = await within(self._timeout, self._ask(messages))
            if not over and not isinstance(text, str):
                raise TypeError(f"what generate_response gives second is no text: {text!r:.100}")
            self.rewards.append(float(reward or 0.0))
            if metrics:
                self.metrics.append({"interaction": self._kwargs.get("name"), **metrics})
        except Exception as error:
            raise EnvironmentFailed(f"interaction: {told(error)}") from error
        return None if over else text

    async def _ask(self, messages: list[dict[str, Any]]) -> tuple[bool, str, float, dict[str, Any]]:
        if self._id is None:
            self._id = await self._interaction.start_interaction(uuid4().hex, **self._kwargs)
        return await self._interaction.generate_response(self._id, messages, **self._kwargs)

    async def close(self) -> None:
        """End the dialogue. What goes wrong then is said, and costs no trajectory that is over."""
        if self._id is None:
            return
        try:
            await within(self._timeout, self._interaction.finalize_interaction(self._id, **self._kwargs))
        except Exception as error:
            problem = f"finalize_interaction: {told(error)}"
            warn_once(str(self._kwargs.get("name")), type(error).__name__, problem, of="interaction")
