"""Writing a checkpoint so that no moment of a crash, a kill or a full disk can lose the one before it.

write global_step_N.tmp/ → fsync files and directories → manifest (sizes, SHA-256) last → rename to
global_step_N → latest_checkpointed_iteration.txt → delete what is beyond `keep`. A deletion renames first, so a
directory under its final name is always whole.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from verl.checkpoint.manifest import (
    LATEST,
    LOOP,
    CheckpointError,
    Manifest,
    files_under,
    hash_files,
    read_manifest,
    replace_text,
    step_directories,
    sync_directory,
    sync_tree,
    write_manifest,
    write_synced,
)

OnEvent = Callable[..., None]


def no_event(kind: str, **fields: Any) -> None:
    """An `on_event` that has no listener."""


def save(
    root: Path,
    step: int,
    parts: Mapping[str, Callable[[Path], Any]],
    *,
    loop_state: Mapping[str, Any],
    keep: int | None = None,
    on_event: OnEvent = no_event,
) -> Path | None:
    """Write `root/global_step_{step}` and return its path, or None when it could not be written.

    Every value of `parts` is called with an existing empty directory at its key (a relative path such as
    "actor" or "state/actor_optim") and fills it. `loop_state` must be JSON. `keep`: how many sealed checkpoints
    stay (None or < 1: all), the new one included. Any failure (disk full, a part that raises) becomes the event
    `checkpoint_failed`, the unfinished directory is removed, and older checkpoints are untouched. Success is the
    event `checkpoint_saved` with bytes, seconds and the hashing speed.
    """
    unsealed = CheckpointWriter(root, step, keep=keep, on_event=on_event)
    unsealed.fill(parts, loop_state)
    return unsealed.seal()


class CheckpointWriter:
    """A checkpoint on its way: `fill` writes its parts, `seal` makes it one. The two may run in different threads.

    Arguments and failures as in `save`; `problem` says what failed ("" as long as nothing did).
    """

    def __init__(self, root: Path, step: int, *, keep: int | None = None, on_event: OnEvent = no_event):
        self._root = Path(root)
        self._step = step
        self._keep = keep
        self._on_event = on_event
        self._beside = self._root / f"global_step_{step}.tmp"
        self._started = time.perf_counter()
        self.problem = ""

    def fill(self, parts: Mapping[str, Callable[[Path], Any]], loop_state: Mapping[str, Any]) -> None:
        """Write the parts and the loop's state into the unfinished directory."""
        try:
            _fill(self._root, self._beside, self._step, parts, loop_state)
        except Exception as error:
            self._fail(error)
            if getattr(error, "ends_the_run", False):
                raise

    def seal(self) -> Path | None:
        """Sync, hash, seal, rename; then the pointer file and the retention. None if anything failed."""
        if self.problem:
            return None
        try:
            manifest, hash_seconds = _seal(self._root, self._beside, self._step)
            final = _publish(self._root, self._beside, self._step)
        except Exception as error:
            self._fail(error)
            return None
        self._on_event(
            "checkpoint_saved",
            step=self._step,
            path=str(final),
            bytes=manifest.size,
            seconds=round(time.perf_counter() - self._started, 4),
            hash_gb_per_s=round(manifest.size / max(hash_seconds, 1e-9) / 1e9, 3),
        )
        _after_publishing(self._root, final, self._step, self._keep, self._on_event)
        return final

    def _fail(self, error: Exception) -> None:
        self.problem = f"{type(error).__name__}: {error}"
        ends = getattr(error, "ends_the_run", False)
        self._on_event(
            "checkpoint_failed",
            step=self._step,
            path=str(self._beside),
            error=self.problem,
            traceback="".join(traceback.format_exception(error)),
            message=f"the checkpoint of step {self._step} could not be saved ({self.problem}); "
            + ("those saved before stay" if ends else "the run goes on with the checkpoints saved before"),
        )
        _discard(self._beside, self._on_event)


def _fill(
    root: Path,
    beside: Path,
    step: int,
    parts: Mapping[str, Callable[[Path], Any]],
    loop_state: Mapping[str, Any],
) -> None:
    """Fill the unfinished directory."""
    root.mkdir(parents=True, exist_ok=True)
    if beside.exists():
        shutil.rmtree(beside)
    beside.mkdir()
    for name, write in parts.items():
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts or not relative.parts:
            raise CheckpointError(f"{name!r} is not a relative path inside the checkpoint")
        directory = beside / relative
        directory.mkdir(parents=True, exist_ok=True)
        write(directory)
    loop = beside / LOOP
    loop.parent.mkdir(parents=True, exist_ok=True)
    write_synced(loop, json.dumps({"step": step, **loop_state}, indent=1))


def _seal(root: Path, beside: Path, step: int) -> tuple[Manifest, float]:
    """Sync and seal the filled directory; returns the manifest and the seconds spent hashing."""
    _share_like_the_folder(beside)
    sync_tree(beside)
    hashing = time.perf_counter()
    files = hash_files(beside, files_under(beside))
    hash_seconds = time.perf_counter() - hashing
    manifest = Manifest(step, _next_serial(root), time.time(), files)
    write_manifest(beside, manifest)
    return manifest, hash_seconds


def _share_like_the_folder(beside: Path) -> None:
    """Give files the permissions that the umask gave their directory: some writers make theirs private (0600)."""
    mode = beside.stat().st_mode & 0o666
    for path in beside.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _publish(root: Path, beside: Path, step: int) -> Path:
    """Give the sealed directory its final name. An older one of the same step makes room by a rename."""
    final = root / f"global_step_{step}"
    # A crash between the two renames leaves the new one sealed as .tmp: the reader publishes it.
    retired = retire(final) if final.exists() else None
    try:
        os.rename(beside, final)
    except OSError:
        if retired is not None:
            os.rename(retired, final)
        raise
    sync_directory(root)
    return final


def _after_publishing(root: Path, final: Path, step: int, keep: int | None, on_event: OnEvent) -> None:
    """The pointer file and the retention. The checkpoint is safe already: a failure here is only an event."""
    try:
        replace_text(root / LATEST, str(step))
        for retired in root.glob(f"{final.name}.deleted*.tmp"):
            shutil.rmtree(retired)
        if keep is not None and keep >= 1:
            for old in surplus(root, keep):
                shutil.rmtree(retire(old))
                on_event("checkpoint_deleted", step=step, path=str(old))
    except Exception as error:
        on_event(
            "checkpoint_cleanup_failed",
            step=step,
            error=f"{type(error).__name__}: {error}",
            message=f"step {step} is saved, but tidying up {root} failed ({type(error).__name__}: {error})",
        )


def surplus(root: Path, keep: int) -> list[Path]:
    """Sealed checkpoints of ours beyond the `keep` newest, oldest first.

    Directories without a readable manifest of ours (another system's, damaged ones) are neither counted nor
    deleted.
    """
    sealed = sorted(_sealed(root))
    return [path for *_, path in sealed[: max(0, len(sealed) - keep)]]


def _sealed(root: Path) -> list[tuple[int, int, Path]]:
    """(serial, step, path) of every directory with a readable manifest."""
    found = []
    for path in step_directories(root):
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        found.append((manifest.serial, manifest.step, path))
    return found


def _next_serial(root: Path) -> int:
    return max((serial for serial, *_ in _sealed(root)), default=0) + 1


def retire(path: Path) -> Path:
    """Rename a checkpoint out of the way, to a name that every start cleans up."""
    number = 0
    while (retired := path.with_name(f"{path.name}.deleted{number}.tmp")).exists():
        number += 1
    os.rename(path, retired)
    return retired


def _discard(beside: Path, on_event: OnEvent) -> None:
    """Remove an unfinished directory; if even that fails it is only reported (the next start tries again)."""
    try:
        if beside.exists():
            shutil.rmtree(beside)
    except OSError as error:
        on_event("checkpoint_cleanup_failed", path=str(beside), error=f"{type(error).__name__}: {error}")
