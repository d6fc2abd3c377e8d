"""Reading one setting from whatever carries the configuration: a typed group, a dict, or nothing at all."""

from __future__ import annotations

from typing import Any


def setting(config: Any, name: str, default: Any = None) -> Any:
    """`config.name`, or `default` where config is None, lacks the name, or holds None under it."""
    if config is None:
        return default
    value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    return default if value is None else value
