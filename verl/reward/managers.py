"""Names that plug-ins import: the registry of reward manager classes and their base.

A manager decides what is called for an answer. The built-in ones are settings of `RewardRunner`, not classes;
classes that plug-ins register are kept here and refused by name when a run asks for them (not in this release).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from verl.reward.settings import PER_ANSWER

_CLASSES: dict[str, type] = {}


def register(name: str) -> Callable[[type], type]:
    """Class decorator: make a manager known under a name. ValueError if another class has it."""

    def add(cls: type) -> type:
        if _CLASSES.get(name, cls) is not cls:
            raise ValueError(
                f"reward manager {name!r} is already registered by {_CLASSES[name].__qualname__}"
            )
        _CLASSES[name] = cls
        return cls

    return add


def get_reward_manager_cls(name: str) -> type:
    """The class registered under a name. ValueError naming the known ones."""
    if name not in _CLASSES:
        registered = ", ".join(sorted(_CLASSES)) or "none"
        raise ValueError(
            f"unknown reward manager: {name!r}. Registered classes: {registered}. Built in, without a class: "
            f"{', '.join((*PER_ANSWER, 'batch'))} (verl.reward.RewardRunner)"
        )
    return _CLASSES[name]


class RewardManagerBase(ABC):
    """Base of managers that score one answer at a time."""

    def __init__(
        self, config: Any, tokenizer: Any, compute_score: Callable[..., Any] | None = None, **kwargs: Any
    ):
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        self.options = kwargs

    @abstractmethod
    async def run_single(self, data: Any) -> dict[str, Any]:
        """`{"reward_score": float, "reward_extra_info": dict}` for a DataProto of one row."""
