"""Where a peft adapter is, and what its configuration says. No torch, no peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl.errors import UserError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_FOLDER = "lora_adapter"
"""The adapter's folder inside `actor/` of a checkpoint."""


def adapter_directory(path: str | Path) -> Path:
    """The directory of an adapter: a peft directory, or one inside a `global_step_N` or its `actor/`.

    UserError if there is none.
    """
    given = Path(path).expanduser()
    for place in (given, given / ADAPTER_FOLDER, given / "actor" / ADAPTER_FOLDER):
        if (place / ADAPTER_CONFIG).is_file():
            return place
    if not given.is_dir():
        raise UserError(f"model.lora_adapter_path={path}: no such directory")
    present = ", ".join(sorted(p.name for p in given.iterdir())[:8]) or "nothing"
    raise UserError(
        f"model.lora_adapter_path={path}: no {ADAPTER_CONFIG} there (it holds {present}); name a peft adapter's directory"
    )


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """adapter_config.json of a directory. UserError if it cannot be read."""
    file = Path(directory) / ADAPTER_CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{file}: holds no JSON object")
    return found
