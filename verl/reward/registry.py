"""Manager classes that plug-ins register by name."""

from __future__ import annotations

from collections.abc import Callable

_CLASSES: dict[str, type] = {}


def register(name: str) -> Callable[[type], type]:
    """Class decorator: make a manager known under a name. ValueError if another class has it."""

    def add(cls: type) -> type:
        if _CLASSES.setdefault(name, cls) is not cls:
            raise ValueError(f"reward manager {name!r}: already registered by {_CLASSES[name].__qualname__}")
        return cls

    return add


def registered(name: str) -> type | None:
    """The class registered under a name, None without."""
    return _CLASSES.get(name)


def get_reward_manager_cls(name: str) -> type:
    """The class registered under a name. ValueError naming the known ones."""
    if name not in _CLASSES:
        registered = ", ".join(sorted(_CLASSES)) or "none (the built-in managers are no classes)"
        raise ValueError(f"unknown reward manager: {name!r}. Registered classes: {registered}")
    return _CLASSES[name]
