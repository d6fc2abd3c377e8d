"""Writing a checkpoint so that no moment of a crash, a kill or a full disk can lose the one before it.

write global_step_N.tmp/ → fsync files and directories → manifest (sizes, SHA-256) last → rename to
global_step_N → latest_checkpointed_iteration.txt → delete what is beyond `keep`. A deletion renames first, so a
directory under its final name is always whole.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl.checkpoint import manifest
from verl.checkpoint.manifest import LATEST, LOOP, CheckpointError, Manifest

OnEvent = Callable[..., None]


def no_event(kind: str, **fields: Any) -> None:
    """An `on_event` that has no listener."""


class CheckpointWriter:
    """A checkpoint on its way: `fill` writes its parts, `seal` makes it one. The two may run in different threads.

    Any failure (disk full, a part that raises) becomes the event `checkpoint_failed`, the unfinished directory is
    removed, and older checkpoints are untouched. `keep`: how many sealed checkpoints stay (None or < 1: all), the new
    one included. `problem` says what failed ("" if nothing did).
    """

    def __init__(self, root: Path, step: int, *, keep: int | None = None, on_event: OnEvent = no_event):
        self._root = Path(root)
        self._step = step
        self._keep = keep
        self._on_event = on_event
        self._final = self._root / f"global_step_{step}"
        self._beside = self._final.with_suffix(".tmp")
        self._started = time.perf_counter()
        self.problem = ""

    def fill(self, parts: Mapping[str, Callable[[Path], Any]], loop_state: Mapping[str, Any]) -> None:
        """Write the parts and the loop's state into the unfinished directory.

        Every value of `parts` is called with an existing empty directory at its key (a relative path such as
        "actor" or "state/actor_optim") and fills it. `loop_state` must be JSON.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            manifest.remove(self._beside)
            for name, write in parts.items():
                directory = self._beside / name
                directory.mkdir(parents=True, exist_ok=True)
                write(directory)
            (self._beside / LOOP).parent.mkdir(parents=True, exist_ok=True)
            state = json.dumps({"step": self._step, **loop_state}, indent=1)
            manifest.write_synced(self._beside / LOOP, state)
        except Exception as error:
            self._fail(error)
            if getattr(error, "ends_the_run", False):
                raise

    def seal(self) -> Path | None:
        """Sync, hash, seal and rename; then write the pointer file and apply the retention. Returns the path of
        `root/global_step_{step}`, or None if anything failed. Success is the event `checkpoint_saved` with bytes,
        seconds and the hashing speed.
        """
        if self.problem:
            return None
        try:
            size, hash_seconds = self._seal()
            self._publish()
        except Exception as error:
            self._fail(error)
            return None
        self._on_event(
            "checkpoint_saved",
            step=self._step,
            path=str(self._final),
            bytes=size,
            seconds=round(time.perf_counter() - self._started, 4),
            hash_gb_per_s=round(size / max(hash_seconds, 1e-9) / 1e9, 3),
        )
        self._tidy()
        return self._final

    def _seal(self) -> tuple[int, float]:
        """Sync and seal the filled directory; returns its bytes and the seconds spent hashing."""
        # Like the umask made the directory: some writers make their files private (0600).
        mode = self._beside.stat().st_mode & 0o666
        for path in self._beside.rglob("*"):
            if path.is_file():
                path.chmod(mode)
        manifest.sync_tree(self._beside)
        hashing = time.perf_counter()
        files = manifest.hash_files(self._beside, manifest.files_under(self._beside))
        hash_seconds = time.perf_counter() - hashing
        before = sealed(self._root)
        serial = before[-1][0] + 1 if before else 1
        seal = Manifest(self._step, serial, time.time(), files)
        manifest.write_manifest(self._beside, seal)
        return seal.size, hash_seconds

    def _publish(self) -> None:
        """Give the sealed directory its final name. An older one of the same step makes room by a rename."""
        # A crash between the two renames leaves the new one sealed as .tmp: the reader publishes it.
        retired = retire(self._final) if self._final.exists() else None
        try:
            os.rename(self._beside, self._final)
        except OSError:
            if retired is not None:
                os.rename(retired, self._final)
            raise
        manifest.sync_directory(self._root)

    def _tidy(self) -> None:
        """The pointer file and the retention. The checkpoint is safe already: a failure here is only an event."""
        try:
            manifest.replace_text(self._root / LATEST, str(self._step))
            for retired in self._root.glob(f"{self._final.name}.deleted*.tmp"):
                manifest.remove(retired)
            # Directories without a readable manifest of ours (damaged, another system's) are not counted or deleted.
            for *_, old in sealed(self._root)[: -self._keep] if self._keep and self._keep >= 1 else ():
                manifest.remove(retire(old))
                self._on_event("checkpoint_deleted", step=self._step, path=str(old))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            message = f"step {self._step} is saved, but tidying up {self._root} failed ({reason})"
            self._on_event("checkpoint_cleanup_failed", step=self._step, error=reason, message=message)

    def _fail(self, error: Exception) -> None:
        """Tell what failed and remove the unfinished directory; the next start tries again where that fails too."""
        self.problem = f"{type(error).__name__}: {error}"
        ends = getattr(error, "ends_the_run", False)
        outcome = "those saved before stay" if ends else "the run goes on with the checkpoints saved before"
        self._on_event(
            "checkpoint_failed",
            step=self._step,
            path=str(self._beside),
            error=self.problem,
            traceback="".join(traceback.format_exception(error)),
            message=f"the checkpoint of step {self._step} could not be saved ({self.problem}); {outcome}",
        )
        try:
            manifest.remove(self._beside)
        except OSError as failure:
            reason = f"{type(failure).__name__}: {failure}"
            self._on_event("checkpoint_cleanup_failed", path=str(self._beside), error=reason)


def sealed(root: Path, pass_over: Callable[..., None] = lambda *_: None) -> list[tuple[int, int, Path]]:
    """(serial, step, path) of every directory with a readable manifest, the one sealed last at the end. For each of the
    others it calls pass_over(path, error)."""
    checkpoints = []
    for path in sorted(manifest.step_directories(root)):
        try:
            seal = manifest.read_manifest(path)
            checkpoints.append((seal.serial, seal.step, path))
        except CheckpointError as error:
            pass_over(path, error)
    return sorted(checkpoints)


def retire(path: Path) -> Path:
    """Rename a checkpoint out of the way, to a name that every start cleans up."""
    number = 0
    while (retired := path.with_name(f"{path.name}.deleted{number}.tmp")).exists():
        number += 1
    os.rename(path, retired)
    return retired
