"""Where a run's checkpoints go and come from: the run folder, the thread that seals, the copies elsewhere.

What a checkpoint holds is its trainer's business; this is what every trainer does with one. With
`checkpoint.async_save` the files are written at once and synced, hashed, sealed and copied by a thread, beside the
training: until it is sealed the one before stays the newest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint import CheckpointError, open_checkpoint, read, write
from verl.checkpoint.manifest import remove
from verl.checkpoint.remote import Copy, RemoteCopies

if TYPE_CHECKING:
    from verl.checkpoint import Checkpoint
    from verl.tracking.tracker import Tracking

WHOLE = frozenset({"model", "optimizer", "extra"})
"""What a checkpoint must hold, and a resume must read, for the run to go on as if nothing had happened."""


class Storage:
    """The checkpoints of one run. `settings` is the trainer group, `contents` the checkpoint group.

    `narrowed`: the user named `load_contents`; otherwise a resume reads everything.
    """

    def __init__(
        self, root: Path, settings: Any, contents: Any, tracking: Tracking, *, narrowed: bool = False
    ):
        self.root = root
        self._settings = settings
        self._contents = contents
        self._tracking = tracking
        self._narrowed = narrowed
        self._remote = RemoteCopies(settings.default_hdfs_dir) if settings.default_hdfs_dir else None
        self._thread: threading.Thread | None = None
        self._unsaved: tuple[int, str] | None = None

    # ---------------------------------------------------------------------------------------------- saving

    @property
    def saved_parts(self) -> frozenset[str]:
        """`model`, `optimizer`, `extra`: what is to be written (`hf_model` is `model`)."""
        named = set(self._contents.save_contents)
        return frozenset(("model" if part == "hf_model" else part) for part in named)

    def save(
        self, step: int, parts: Mapping[str, Callable[[Path], Any]], loop_state: Mapping[str, Any]
    ) -> None:
        """Write `global_step_{step}`. A failure is an event and a notice, and the run goes on.

        Waits for the save before it.
        """
        self.wait()
        keep = self._settings.max_ckpt_to_keep or self._settings.max_actor_ckpt_to_keep
        writer = write.CheckpointWriter(self.root, step, keep=keep, on_event=self._tracking.event)
        writer.fill(parts, loop_state)
        if not self._contents.async_save:
            self._seal(writer, step)
            return
        # Not a daemon: an interpreter that ends in between finishes the checkpoint first.
        self._thread = threading.Thread(target=self._seal, args=(writer, step), name="verl-checkpoint")
        self._thread.start()

    def refuse(self, step: int, why: str) -> None:
        """Do not save this step: what is there would be worse than the checkpoint before."""
        self.wait()
        self._unsaved = step, why
        message = f"the checkpoint of step {step} is not saved: {why}; the one before stays the newest"
        self._tracking.event("checkpoint_refused", step=step, message=message)

    def wait(self) -> None:
        """Until the save in progress is sealed and copied."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """At the end of a run, whatever the end: wait, and say in `Tracking.unsaved` if the last checkpoint is missing."""
        self.wait()
        if self._unsaved is None:
            self._tracking.unsaved = ""
        else:
            step, why = self._unsaved
            newest = read.layouts.newest_by_name(self.root)
            left = f"the newest checkpoint is {newest.name}" if newest else "there is no checkpoint"
            self._tracking.unsaved = (
                f"the checkpoint of step {step} was NOT written ({why}): the newest weights of this run are lost, {left}. "
                "Mend the cause and run the same command again"
            )

    def _seal(self, writer: write.CheckpointWriter, step: int) -> None:
        path = writer.seal()
        self._unsaved = (step, writer.problem) if path is None else None
        if path is None:
            return
        if not self.saved_parts >= WHOLE:
            self._tracking.notice(
                f"{path.name} holds {', '.join(sorted(self.saved_parts))} only (checkpoint.save_contents): it can be "
                "used but not resumed"
            )
        if self._remote is not None:
            self._copy(path)

    def _copy(self, path: Path) -> None:
        assert self._remote is not None
        try:
            size = self._remote.put(path)
            self._tracking.event("checkpoint_copied", path=str(path), to=self._remote.url, bytes=size)
        except CheckpointError as error:
            self._tracking.event(
                "checkpoint_copy_failed", path=str(path), message=f"{error}; {path} itself is complete"
            )

    # --------------------------------------------------------------------------------------------- resuming

    def find(self) -> Checkpoint | None:
        """The checkpoint that `trainer.resume_mode` names, fetched if its only or newest copy is elsewhere."""
        settings, event = self._settings, self._tracking.event
        here = read.resolve_resume(settings.resume_mode, settings.resume_from_path, self.root, on_event=event)
        if self._remote is None or settings.resume_mode != "auto":
            return here
        try:
            copy = self._remote.newest()
        except CheckpointError as error:
            if here is None:
                raise CheckpointError(
                    f"{error}. The run folder has no checkpoint either; trainer.resume_mode=disable starts anew"
                ) from error
            self._tracking.notice(f"{error}; going on from {here.path}")
            return here
        if copy is None or (here is not None and here.manifest.serial >= copy.serial):
            return here
        self._tracking.notice(f"fetching {copy.name} from {self._remote.url}")
        return open_checkpoint(self._remote.fetch(copy, self.root), hashes=False)

    def wants(self, part: str) -> bool:
        """True if a resume reads the part: all of them, unless `checkpoint.load_contents` names some."""
        named = set(self._contents.load_contents)
        return not self._narrowed or part in named or (part == "model" and "hf_model" in named)

    def loaded(self, found: Checkpoint) -> None:
        """After a resume: say what was left out; with `del_local_ckpt_after_load` drop what is elsewhere too."""
        left = sorted(part for part in WHOLE if not self.wants(part))
        if left:
            self._tracking.notice(
                f"resumed without {', '.join(left)} (checkpoint.load_contents): the run does not go on exactly as it "
                "would have"
            )
        if not self._settings.del_local_ckpt_after_load:
            return
        copy = Copy(found.manifest.serial, found.step)
        if self._remote is not None and found.path.parent == self.root and self._remote.newest() == copy:
            remove(write.retire(found.path))
            self._tracking.event(
                "checkpoint_deleted", path=str(found.path), why="trainer.del_local_ckpt_after_load"
            )
            return
        self._tracking.notice(
            f"trainer.del_local_ckpt_after_load: {found.path} is kept, for it is in no other place "
            "(trainer.default_hdfs_dir would hold copies)"
        )
