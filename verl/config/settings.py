"""Reading one setting from whatever carries the configuration: typed groups, mappings, or nothing at all."""

from __future__ import annotations

from typing import Any


def setting(group: Any, path: str, default: Any = None) -> Any:
    """`setting(actor, "optim.lr")`: the value at a path of names; `default` where a name is missing or holds None."""
    for name in path.split("."):
        if group is None:
            return default
        group = group.get(name) if isinstance(group, dict) else getattr(group, name, None)
    return default if group is None else group
