"""What a tracker backend is, and which one a name of `trainer.logger` stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

ALIASES = {"tracking": "wandb"}
LATER = ("swanlab", "mlflow", "clearml", "trackio", "vemlp_wandb")
OURS = ("console", "file", "tensorboard", "wandb")


class Unavailable(Exception):
    """A tracker that cannot be used here; the message says why and what to do."""


@dataclass(slots=True)
class Session:
    """What a backend is told about the run. `config` is plain containers with secrets masked."""

    project: str
    experiment: str
    run_dir: Path
    config: dict[str, Any] = field(default_factory=dict)
    proxy: str | None = None
    resume_step: int | None = None


class Backend(Protocol):
    """One tracker. Any exception from it ends its use, never the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Finite plain numbers of one step."""

    def table(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Validation answers: rows of (step, input, output, score). Backends without tables ignore it."""

    def close(self) -> None:
        """Write everything out."""


def open_backend(name: str, session: Session, say: Callable[[str], None]) -> Backend:
    """The backend of a name. Unavailable if it is not installed, not logged in, or comes in a later release."""
    name = ALIASES.get(name, name)
    if name == "file":
        from verl.tracking.file import FileBackend

        return FileBackend(session, say)
    if name == "tensorboard":
        from verl.tracking.tensorboard import TensorBoardBackend

        return TensorBoardBackend(session, say)
    if name == "wandb":
        from verl.tracking.wandb import WandbBackend

        return WandbBackend(session, say)
    if name in LATER:
        raise Unavailable("not in this release; metrics.jsonl in the run folder has everything")
    known = ", ".join((*OURS, "tracking", *LATER))
    raise Unavailable(f"there is no such tracker; known: {known}")
