"""Tracker `wandb`: online when logged in, offline when asked, otherwise a notice; it never asks and never blocks."""

from __future__ import annotations

import netrc
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from verl.tracking.backend import Session, Unavailable

START_SECONDS = 60.0
CLOSE_SECONDS = 120.0
_ID_FILE = "wandb_run_id.txt"
_COLUMNS = ("step", "input", "output", "score")


class WandbBackend:
    """One W&B run; its id is kept in the run folder, so that a resumed run goes on in it."""

    def __init__(self, session: Session, say: Callable[[str], None]):
        try:
            import wandb
        except ImportError as error:
            raise Unavailable(f"the wandb package is not installed ({error}); pip install wandb") from error
        self._wandb = wandb
        mode = os.environ.get("WANDB_MODE", "online").lower()
        if mode in ("online", "shared", "run", "") and not logged_in(wandb):
            raise Unavailable(
                "not logged in; run `wandb login` or set WANDB_API_KEY, or set WANDB_MODE=offline to log to "
                "disk and `wandb sync` later"
            )
        arguments: dict[str, Any] = {
            "project": session.project,
            "name": session.experiment,
            "config": session.config,
            "dir": str(session.run_dir),
            "id": _run_id(session),
            "resume": "allow" if session.resume_step is not None else None,
            "entity": os.environ.get("WANDB_ENTITY"),
            "settings": wandb.Settings(
                init_timeout=START_SECONDS, login_timeout=5, console="off", https_proxy=session.proxy
            ),
        }
        self._run: Any = _within(START_SECONDS + 10, "starting", lambda: wandb.init(**arguments))
        self._rows: list[Sequence[Any]] = []
        if mode == "offline":
            say(f"wandb: offline; `wandb sync {Path(self._run.dir).parent}` uploads the run later")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Grow the table val/generations."""
        self._rows += [list(row) for row in rows]
        table = self._wandb.Table(columns=list(_COLUMNS), data=[list(row) for row in self._rows])
        self._run.log({"val/generations": table}, step=step)

    def close(self) -> None:
        """Finish the run; gives up after a while when the server cannot be reached."""
        _within(CLOSE_SECONDS, "uploading the rest", self._run.finish)


def logged_in(wandb: Any) -> bool:
    """True if an API key is at hand: environment, settings, or the netrc file of the server's host."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = wandb.Settings()
    if getattr(settings, "api_key", None):
        return True
    host = urlparse(str(os.environ.get("WANDB_BASE_URL") or settings.base_url)).hostname
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return host is not None and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _run_id(session: Session) -> str:
    """The id of this folder's W&B run: kept over a resume, new for a fresh start."""
    path = session.run_dir / _ID_FILE
    if session.resume_step is not None and path.is_file():
        return path.read_text("utf-8").strip()
    new = os.urandom(4).hex()
    path.write_text(new, "utf-8")
    return new


def _within(seconds: float, what: str, call: Callable[[], Any]) -> Any:
    """Result of a call made in a thread, or Unavailable when it takes too long; its own error is raised here."""
    box: list[Any] = []

    def target() -> None:
        try:
            box.append(("value", call()))
        except BaseException as error:
            box.append(("error", error))

    thread = threading.Thread(target=target, daemon=True, name="wandb")
    thread.start()
    thread.join(seconds)
    if not box:
        raise Unavailable(f"{what} took more than {seconds:.0f} s")
    kind, value = box[0]
    if kind == "error":
        raise (
            value if isinstance(value, Exception) else Unavailable(f"{what}: {type(value).__name__}: {value}")
        )
    return value
