"""Reading one setting from whatever carries the configuration: a typed group, a mapping, or nothing at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def setting(config: Any, name: str, default: Any = None) -> Any:
    """`config.name`, or `default` where config is None, lacks the name, or holds None under it."""
    if config is None:
        return default
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if value is None else value
