"""A run's checkpoints: their content beside the weights, their places, and how a run resumes exactly where it was.

`Storage` is what every trainer does with a checkpoint: the run folder, the thread that seals, the copies elsewhere.
With `checkpoint.async_save` the files are written at once, and a thread syncs, hashes, seals and copies them beside the
training: until it is sealed the one before stays the newest. `Checkpoints` is the content of a reinforcement-learning
run's.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.algorithms.agreement import BOUNDS, precision_of
from verl.checkpoint import CheckpointError, open_checkpoint, read, rng, write
from verl.checkpoint.manifest import remove
from verl.checkpoint.remote import Copy, RemoteCopies
from verl.data.files import contents
from verl.errors import UserError
from verl.platform import detect
from verl.tracking.names import plain_metrics
from verl.tracking.run_folder import mask_secrets
from verl.trajectory import Batch, Prompt, Segment, Trajectory

if TYPE_CHECKING:
    from verl.algorithms.kl import KLController
    from verl.checkpoint import Checkpoint
    from verl.config import Config, SFTConfig
    from verl.config.schema.data import DataConfig, SFTDataConfig
    from verl.data.stream import PromptStream
    from verl.tracking.step_metrics import Counters
    from verl.tracking.tracker import Tracking
    from verl.trainer.colocation import Colocation
    from verl.workers.roles import Role, WorkerSet

WHOLE = frozenset({"model", "optimizer", "extra"})
"""What a checkpoint must hold, and a resume must read, for the run to go on as if nothing had happened."""
Job = tuple[str, str, Callable[[Path], Any]]
"""A part of `WHOLE`, a directory of the checkpoint, and what writes it there."""
_OF_THE_RESUME = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.default_local_dir")
_STRATEGIES = ("actor_rollout_ref.actor.strategy", "engine.strategy")
_SHOWN = 12  # settings that a notice names


class Storage:
    """The checkpoints of one run. `key` is that of the group of checkpoint settings. Where the user does not name its
    `load_contents`, a resume reads everything."""

    def __init__(self, config: Config | SFTConfig, key: str, tracking: Tracking):
        self._settings = settings = config.trainer
        self._contents = contents = config.select(key)
        self._tracking, self._key = tracking, key
        self._narrowed = config.was_set(f"{key}.load_contents")
        kernels = {"compiled kernels": detect(settings.device).compiled_kernels()}  # they round otherwise than torch
        self._given = mask_secrets(config.to_dict()) | kernels
        self.root = tracking.run_dir
        self._remote = RemoteCopies(settings.default_hdfs_dir) if settings.default_hdfs_dir else None
        self._thread: threading.Thread | None = None
        self._unsaved: tuple[int, str] | None = None

        self.saved_parts = _parts(contents.save_contents)
        """What is to be written of `WHOLE`."""

    def chosen(self, jobs: Iterable[Job]) -> dict[str, Callable[[Path], Any]]:
        """What writes each directory, of the parts that are to be saved."""
        return {directory: write_part for part, directory, write_part in jobs if part in self.saved_parts}

    # ---------------------------------------------------------------------------------------------- saving

    def save(self, step: int, parts: Mapping[str, Callable[[Path], Any]], loop_state: Mapping[str, Any]) -> None:
        """Write `global_step_{step}`. A failure is an event and a notice, and the run goes on.

        Waits for the save before it.
        """
        self.wait()
        limits = self._settings
        keep = limits.max_ckpt_to_keep or limits.max_actor_ckpt_to_keep or limits.max_critic_ckpt_to_keep
        writer = write.CheckpointWriter(self.root, step, keep=keep, on_event=self._tracking.event)
        writer.fill(parts, {**loop_state, "settings": self._given})
        if not self._contents.async_save:
            self._seal(writer, step)
            return
        # Files are written above: safetensors holds the GIL, so writing in a thread would stall the loop.
        # Not a daemon: an interpreter that ends in between finishes the checkpoint first.
        self._thread = threading.Thread(target=self._seal, args=(writer, step), name="verl-checkpoint")
        self._thread.start()

    def refuses(
        self,
        step: int,
        rows: Iterable[Trajectory],
        log_probs: Callable[[Trajectory], np.ndarray],
        rate_key: str,
    ) -> bool:
        """Do not save this step if the weights as they are now would be worse than the checkpoint before.

        `log_probs` gives those of a row's response tokens under these weights. One forward pass over the step's
        longest row: weights that training has blown up are often finite themselves, but what they compute is not.
        """
        nonempty = (row for row in rows if row.length)
        longest = max(nonempty, key=lambda row: len(row.prompt.ids) + row.length, default=None)
        if "model" not in self.saved_parts or longest is None or np.isfinite(log_probs(longest)).all():
            return False
        self.wait()
        cure = f"lower {rate_key}, or go on from an earlier checkpoint"
        why = f"its weights give log-probs that are not finite, training has blown them up ({cure})"
        self._unsaved = step, why
        message = f"the checkpoint of step {step} is not saved: {why}; the one before stays the newest"
        self._tracking.event("checkpoint_refused", step=step, message=message)
        return True

    def wait(self) -> None:
        """Until the save in progress is sealed and copied."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """At any end of a run: wait, and set `Tracking.unsaved` if the last checkpoint is missing."""
        self.wait()
        if self._unsaved is None:
            self._tracking.unsaved = ""
        else:
            step, why = self._unsaved
            newest = read.newest_sealed(self.root)
            remaining = f"the newest checkpoint is {newest.name}" if newest else "there is no checkpoint"
            self._tracking.unsaved = (
                f"the checkpoint of step {step} was NOT written ({why}): "
                f"the newest weights of this run are lost, {remaining}. "
                "Mend the cause and run the same command again"
            )

    def _seal(self, writer: write.CheckpointWriter, step: int) -> None:
        self._tracking.rely_on("the newest checkpoint", self.root)  # the one before may be deleted now
        path = writer.seal()
        self._unsaved = (step, writer.problem) if path is None else None
        if path is None:
            return
        self._tracking.rely_on("the newest checkpoint", path)
        if not self.saved_parts >= WHOLE:
            self._tracking.notice(
                f"{path.name} holds {', '.join(sorted(self.saved_parts))} only (checkpoint.save_contents): it can be "
                "used but not resumed"
            )
        if self._remote is None:
            return
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
        return not self._narrowed or part in _parts(self._contents.load_contents)

    def resume(
        self,
        checkpoint: Checkpoint | None,
        data_identity: Mapping[str, Any],
        restore: Callable[[Checkpoint], None],
        *,
        model_key: str,
        lead: bool = True,
    ) -> int:
        """Go on from a checkpoint; returns its step, 0 without one. `lead`: this rank deletes what is not needed more.

        UserError if another order of data would follow, or another engine. The files are what was saved, so a failure
        of `restore` would recur with the same command: CheckpointError, which says how to go on from another.
        """
        if checkpoint is None:
            return 0
        saved, path = checkpoint.loop_state.get("data_identity", {}), checkpoint.path
        different = [key for key in data_identity if key in saved and saved[key] != data_identity[key]]
        if different:
            changed = "; ".join(f"{key}: {saved[key]!r} then, {data_identity[key]!r} now" for key in different)
            raise UserError(
                f"cannot resume from {path}: the order of the data would change ({changed}). Restore the settings, "
                f"or start a new run from the weights: {model_key}={path / 'actor'} trainer.resume_mode=disable"
            )
        self._refuse_other_engine(checkpoint)
        try:
            restore(checkpoint)
        except Exception as error:
            if getattr(error, "ends_the_run", False) or _out_of_memory(error):  # the first: a worker died
                raise
            problem = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._tracking.event("checkpoint_not_loaded", path=str(path), traceback=traceback.format_exc())
            raise CheckpointError(
                f"{path} cannot be loaded ({problem}). To go on from the checkpoint before it, "
                "move it out of the run folder; trainer.resume_mode=disable starts anew"
            ) from error
        self._say_resumed(checkpoint)
        if self._settings.del_local_ckpt_after_load and lead:
            self._delete_loaded(checkpoint)
        return checkpoint.step

    def _refuse_other_engine(self, checkpoint: Checkpoint) -> None:
        """An engine reads its own optimizer state alone; weights are the same files everywhere."""
        for key, then, now in changes(checkpoint.loop_state.get("settings", {}), self._given):
            if key in _STRATEGIES and not {then, now} <= {"fsdp", "fsdp2"} and self.wants("optimizer"):
                raise UserError(
                    f"cannot resume from {checkpoint.path}: {key}={then} wrote its optimizer state, which {now} does "
                    f"not read. Restore that, or go on without this state: {self._key}.load_contents=[model,extra]"
                )

    def _say_resumed(self, checkpoint: Checkpoint) -> None:
        """From where the run goes on, which settings changed, and what was left out."""
        self._tracking.resumed(checkpoint.step, checkpoint.loop_state.get("record"))
        message = f"resuming from {checkpoint.path}, step {checkpoint.step}"
        self._tracking.event("resumed", step=checkpoint.step, path=str(checkpoint.path), message=message)
        if changed := list(changes(checkpoint.loop_state.get("settings", {}), self._given)):
            shown = [f"{key}: {then} then, {now} now" for key, then, now in changed[:_SHOWN]]
            shown += [f"{len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
            self._tracking.notice(f"settings that changed since {checkpoint.path.name}: {'; '.join(shown)}")
        if missing := sorted(part for part in WHOLE if not self.wants(part)):
            self._tracking.notice(
                f"resumed without {', '.join(missing)} (checkpoint.load_contents): "
                "the run does not go on exactly as it would have"
            )

    def _delete_loaded(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint of the run folder that is elsewhere too."""
        option, path = "trainer.del_local_ckpt_after_load", checkpoint.path
        copy = Copy(checkpoint.manifest.serial, checkpoint.step)
        if self._remote is not None and path.parent == self.root and self._remote.newest() == copy:
            remove(write.retire(path))
            self._tracking.event("checkpoint_deleted", path=str(path), why=option)
        else:
            self._tracking.notice(
                f"{option}: {path} is kept, for it is in no other place (trainer.default_hdfs_dir would hold copies)"
            )


def _out_of_memory(error: Exception) -> bool:
    """True for what says nothing of the file that was being read."""
    import torch

    of_host = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
    return of_host or isinstance(error, torch.OutOfMemoryError)


def _parts(contents: Iterable[str]) -> frozenset[str]:
    """What of `WHOLE` the user names; `hf_model` is `model`."""
    return frozenset("model" if part == "hf_model" else part for part in contents)


def changes(then: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, value then, value now) of what differs; what only one of them has is another release's."""
    if not (isinstance(then, Mapping) and isinstance(now, Mapping)):
        if then != now:
            yield key, then, now
        return
    for name in filter(then.__contains__, now):
        path = f"{key}.{name}" if key else name
        if path not in _OF_THE_RESUME:
            yield from changes(then[name], now[name], path)


def data_identity(data: DataConfig | SFTDataConfig, rows: int, seed: int | None) -> dict[str, Any]:
    """What fixes which prompts come when; a resumed run must have the same (docs/checkpoints.md, "Resume").

    `rows`: prompts of an epoch, which a changed file, length limit or template changes, and with them the order.
    """
    files = data.train_files if isinstance(data.train_files, list) else [data.train_files]
    return {
        "data.train_files": [str(f) for f in files],
        "contents of data.train_files": contents(files),
        "usable rows": rows,
        "data.seed": seed,
        "data.shuffle": data.shuffle,
        "data.train_batch_size": data.train_batch_size,
    }


class Checkpoints:
    """Saves and restores the whole state of a run: that of these parts, and what the loop says of itself."""

    def __init__(
        self,
        config: Config,
        save_tokenizer: Callable[[Path], Any],
        tracking: Tracking,
        workers: WorkerSet,
        colocation: Colocation,
        stream: PromptStream,
        kl_controller: KLController | None,
        counters: Counters,
        estimator_state: dict[str, Any],
    ):
        self._config = config
        self._estimator_state = estimator_state
        self._save_tokenizer = save_tokenizer
        self._workers, self._colocation, self._stream = workers, colocation, stream
        self._kl_controller, self._counters, self._tracking = kl_controller, counters, tracking
        self._storage = Storage(config, "actor_rollout_ref.actor.checkpoint", tracking)

    def finish(self) -> None:
        """At the end of a run, whatever the end: see `Storage.finish`."""
        self._storage.finish()

    def save(self, step: int, loop: Mapping[str, Any], batch: Batch, record: dict[str, Any]) -> None:
        """Write `global_step_N`; `loop` is of `PromptSchedule.state`, `record` the step's metrics, in case the run is
        killed before they are logged.

        A failure is an event and a notice; the run goes on. `batch`, the step's, shows whether the weights are worth
        it: see `Storage.refuses`.
        """
        if self._storage.refuses(step, batch, self._log_probs, "actor_rollout_ref.actor.optim.lr"):
            return
        jobs: list[Job] = []
        for role in self._moving():
            jobs.append(("model", role.name, partial(self._save_weights, role)))
            if role.trained:
                jobs.append(("optimizer", f"state/{role.name}_optim", partial(role.save, "optimizer")))
        jobs.append(("extra", "state/rng", rng.save))
        state = {
            "step": step,
            **loop,
            "data_identity": self._identity(),
            "kl_controller": self._kl_controller.state_dict() if self._kl_controller else None,
            "counters": self._counters.state(),
            "estimator": self._estimator_state,
            "seed": self._config.trainer.seed,
            "record": plain_metrics(record)[0],
            "next_row": self._stream.row_at(loop["data_position"]),
            "sample": self._sample(batch),
            "optimizer_norms": self._optimizer_norms(),
        }
        self._storage.save(step, self._storage.chosen(jobs), state)

    def _log_probs(self, row: Trajectory) -> np.ndarray:
        """Of a row's response tokens under the weights of this moment."""
        policy = self._workers.policy
        bare = [Segment(s.context_ids, s.response_ids, s.response_mask, media=s.media) for s in row.segments]
        probe = Trajectory(row.prompt, row.index, segments=bare)
        with self._colocation.computing(policy):
            policy.forward(Batch([probe]), "save_checkpoint", {"log_probs": "old_log_probs"})
        return np.array(probe.old_log_probs)

    def _sample(self, batch: Batch) -> dict[str, Any] | None:
        """A short response and its log-probs: a resume that does not compute them lost a part of the policy."""
        plain = [t for t in batch if t.length and len(t.segments) == 1 and t.segments[0].media is None]
        if not plain:
            return None
        row = min(plain, key=lambda t: len(t.segments[0].context_ids) + t.length)
        sample: dict[str, Any] = {"temperature": self._config.actor_rollout_ref.rollout.temperature}
        sample |= {"dtype": self._workers.policy.compute_dtype, "context": row.segments[0].context_ids.tolist()}
        return sample | {"response": row.response_ids.tolist(), "log_probs": self._log_probs(row).tolist()}

    def _optimizer_norms(self) -> dict[str, float | None]:
        return {role.name: role.optimizer_norm() for role in self._workers.trained(policy=True)}

    def _compare(self, state: Mapping[str, Any]) -> None:
        """An event where the order of the data, what the policy computes, or the optimizers' state is not that of the
        checkpoint."""
        row, sample = state.get("next_row"), state.get("sample")
        if row not in (None, now := self._stream.row_at(state["data_position"])):
            message = f"data: the next row is {now}, and was {row} when the checkpoint was saved: the order has changed"
            self._tracking.event("check_data", message=message)
        norms = (state.get("optimizer_norms") or {}) if self._storage.wants("optimizer") else {}
        for name, loaded in self._optimizer_norms().items() if norms else ():
            saved = norms.get(name)
            if saved is not None and loaded is not None and not math.isclose(saved, loaded, rel_tol=1e-3):
                message = (
                    f"resume: the norm of the {name}'s optimizer state is {loaded:.4g}, and was {saved:.4g} when it "
                    "was saved: it was not saved or not loaded, and updates begin anew"
                )
                self._tracking.event("check_resume", message=message)
        if not sample or not self._storage.wants("model"):
            return
        if sample["temperature"] != self._config.actor_rollout_ref.rollout.temperature:
            return
        response = np.array(sample["response"], np.int64)
        segment = Segment(np.array(sample["context"], np.int64), response, np.ones(len(response), bool))
        prompt = Prompt("resume", segment.context_ids, None)
        apart = np.abs(self._log_probs(Trajectory(prompt, 0, segments=[segment])) - np.array(sample["log_probs"]))
        kind, bound = BOUNDS[precision_of(sample["dtype"], self._workers.policy.compute_dtype)].far
        difference = float(apart.max() if kind == "max" else apart.mean())
        if not difference <= bound:
            message = (
                f"resume: with the weights that were loaded the log-probs of a response differ by {difference:.3g} "
                f"nats ({kind}) from those when they were saved: a part of the policy was not saved or not loaded, or "
                "a setting of the model has changed"
            )
            self._tracking.event("check_resume", message=message)

    def _moving(self) -> list[Role]:
        return [role for role in self._workers.roles.values() if role.moves]

    def _save_weights(self, role: Role, directory: Path) -> None:
        role.save("weights", directory)
        self._save_tokenizer(directory)

    def _identity(self) -> dict[str, Any]:
        data, config = self._config.data, self._config
        seed = data.seed if data.seed is not None else config.trainer.seed
        identity = data_identity(data, self._stream.rows_per_epoch, seed)
        return identity | {"actor_rollout_ref.rollout.n": config.actor_rollout_ref.rollout.n}

    def resume(self) -> int:
        """Restore the checkpoint that `trainer.resume_mode` names; returns its step, 0 for a fresh start."""
        key = "actor_rollout_ref.model.path"
        return self._storage.resume(self._storage.find(), self._identity(), self._restore, model_key=key)

    def _restore(self, checkpoint: Checkpoint) -> None:
        state, wants = checkpoint.loop_state, self._storage.wants
        for role in self._moving():
            if wants("model"):
                role.load("weights", checkpoint.part(role.name))
            if wants("optimizer") and role.trained:
                role.load("optimizer", checkpoint.part(f"state/{role.name}_optim"))
        self._stream.load_state(state["data_position"])
        self._compare(state)
        self._counters.load(state["counters"])
        self._estimator_state |= state.get("estimator", {})
        if self._kl_controller is not None and state.get("kl_controller"):
            self._kl_controller.load_state_dict(state["kl_controller"])
        if wants("extra"):
            rng.load(checkpoint.part("state/rng"))
