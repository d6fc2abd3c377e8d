"""The configuration for processes that may start in another folder than this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl.config.fields import walk
from verl.config.schema.base import Root

_MADE = ("global_profiler.save_path",)


def for_elsewhere(config: Root) -> dict[str, Any]:
    """Plain nested data, as JSON has it; a relative path of something that exists here is absolute in it.

    What does not exist stays as it is (the name of a model on a hub, the text of a chat template), but for folders that
    such a process makes.
    """
    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    for path, known in walk(type(config)):
        if known.is_path:
            *groups, name = path.split(".")
            node = plain
            for part in groups:
                node = node[part]
            found, made = node[name], path in _MADE
            many = isinstance(found, list)
            node[name] = [_absolute(p, made) for p in found] if many else _absolute(found, made)
    return plain


def _absolute(value: Any, made: bool) -> Any:
    if not value:
        return value
    try:
        path = Path(value).expanduser()
        return str(path.absolute()) if made or path.exists() else value
    except (OSError, ValueError):  # text that cannot be a file's name
        return value
