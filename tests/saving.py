"""A checkpoint written and sealed in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl.checkpoint.write import CheckpointWriter


def save(
    root: Path,
    step: int,
    parts: Mapping[str, Callable[[Path], Any]],
    *,
    loop_state: Mapping[str, Any],
    **settings: Any,
) -> Path | None:
    """Write `root/global_step_{step}`; its path, or None when it could not be written. Arguments as
    `CheckpointWriter`."""
    writer = CheckpointWriter(root, step, **settings)
    writer.fill(parts, loop_state)
    return writer.seal()
