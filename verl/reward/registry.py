"""Manager classes that plug-ins register by name."""

from __future__ import annotations

from collections.abc import Callable

REWARD_MANAGER_REGISTRY: dict[str, type] = {}


def register(name: str) -> Callable[[type], type]:
    """Class decorator: make a manager known under a name. ValueError if another class has it."""

    def add(cls: type) -> type:
        registered = REWARD_MANAGER_REGISTRY.setdefault(name, cls)
        if registered is not cls:
            raise ValueError(f"reward manager {name!r}: already registered by {registered.__qualname__}")
        return cls

    return add


def get_reward_manager_cls(name: str) -> type:
    """The class registered under a name. ValueError naming the known ones."""
    if name not in REWARD_MANAGER_REGISTRY:
        names = ", ".join(sorted(REWARD_MANAGER_REGISTRY)) or "none (the built-in managers are no classes)"
        raise ValueError(f"Unknown reward manager: {name}. Registered classes: {names}")
    return REWARD_MANAGER_REGISTRY[name]
