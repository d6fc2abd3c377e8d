"""What a checkpoint of a run holds beside the weights, and how a run is put back exactly where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint import rng
from verl.errors import UserError
from verl.tracking.names import plain_metrics
from verl.trainer.health import has_nonfinite_log_probs
from verl.trainer.storage import Storage
from verl.trajectory import Batch, Segment, Trajectory

if TYPE_CHECKING:
    from verl.config import Config
    from verl.tracking.tracker import Tracking
    from verl.trainer.ppo_trainer import PPOTrainer
    from verl.workers.roles import Role


def data_identity(config: Config, rows: int) -> dict[str, Any]:
    """What fixes which prompts come when; a resumed run must have the same (config.md §16, rule 21).

    `rows`: prompts of an epoch, which a changed file, length limit or template changes, and with them the order.
    """
    data = config.data
    files = data.train_files if isinstance(data.train_files, list) else [data.train_files]
    return {
        "data.train_files": [str(f) for f in files],
        "usable rows": rows,
        "data.seed": data.seed if data.seed is not None else config.trainer.seed,
        "data.shuffle": data.shuffle,
        "data.train_batch_size": data.train_batch_size,
        "actor_rollout_ref.rollout.n": config.actor_rollout_ref.rollout.n,
    }


def refuse_other_data(
    saved: dict[str, Any],
    now: dict[str, Any],
    checkpoint: Path,
    model_key: str = "actor_rollout_ref.model.path",
) -> None:
    """Raise UserError naming every setting that changed since the checkpoint."""
    changed = [
        f"{key}: {saved[key]!r} then, {now[key]!r} now"
        for key in now
        if key in saved and saved[key] != now[key]
    ]
    if changed:
        raise UserError(
            f"cannot resume from {checkpoint}: the order of the data would change ({'; '.join(changed)}). Restore the "
            "settings, or start a new run from the weights: "
            f"{model_key}={checkpoint / 'actor'} trainer.resume_mode=disable"
        )


class Checkpoints:
    """Saves and restores a trainer's whole state."""

    def __init__(self, config: Config, save_tokenizer: Callable[[Path], Any], tracking: Tracking):
        self._config = config
        self._save_tokenizer = save_tokenizer
        self._tracking = tracking
        self._storage = Storage(
            tracking.run_dir,
            config.trainer,
            config.actor_rollout_ref.actor.checkpoint,
            tracking,
            narrowed=config.was_set("actor_rollout_ref.actor.checkpoint.load_contents"),
        )

    def finish(self) -> None:
        """At the end of a run, whatever the end: see `Storage.finish`."""
        self._storage.finish()

    def save(self, trainer: PPOTrainer, batch: Batch, record: dict[str, Any]) -> None:
        """Write `global_step_N`; `record` is the step's metrics, in case a kill comes before they are logged.

        A failure is an event and a notice; the run goes on. Weights that `batch`, the step's, shows to be has_nonfinite_log_probs
        are not saved.
        """
        policy, contents = trainer.policy, self._storage.saved_parts

        def log_probs(row: Trajectory) -> Any:
            bare = [
                Segment(s.context_ids, s.response_ids, s.response_mask, media=s.media) for s in row.segments
            ]
            probe = Trajectory(row.prompt, row.index, segments=bare)
            policy.forward(Batch([probe]), "save_checkpoint", {"log_probs": "old_log_probs"})
            return probe.old_log_probs

        rate = "actor_rollout_ref.actor.optim.lr"
        if "model" in contents and (why := has_nonfinite_log_probs(log_probs, batch, rate)):
            self._storage.refuse(trainer.step, why)
            return
        jobs: dict[str, Callable[[Path], Any]] = {}
        for role in self._trained(trainer):
            if "model" in contents:
                jobs[role.name] = partial(self._save_weights, role)
            if "optimizer" in contents:
                jobs[_optimizer_of(role)] = partial(role.save, "optimizer")
        if "extra" in contents:
            jobs["state/rng"] = rng.save
        state = self._loop_state(trainer) | {"record": plain_metrics(record)[0]}
        self._storage.save(trainer.step, jobs, state)

    @staticmethod
    def _trained(trainer: PPOTrainer) -> list[Role]:
        return [role for role in trainer.parts.workers.roles.values() if role.trained]

    def _save_weights(self, role: Role, directory: Path) -> None:
        role.save("weights", directory)
        self._save_tokenizer(directory)

    def _loop_state(self, trainer: PPOTrainer) -> dict[str, Any]:
        parts = trainer.parts
        resolved = json.dumps(self._config.to_dict(), sort_keys=True, default=str)
        return {
            "step": trainer.step,
            "weight_version": trainer.step,
            "data_position": trainer.schedule.position(trainer.step),
            "data_identity": data_identity(self._config, parts.stream.rows_per_epoch),
            "kl_controller": parts.kl_controller.state_dict() if parts.kl_controller else None,
            "counters": trainer.record.counters.state(),
            "seed": self._config.trainer.seed,
            "config_hash": hashlib.sha256(resolved.encode()).hexdigest(),
        }

    def resume(self, trainer: PPOTrainer) -> int:
        """Restore the checkpoint that `trainer.resume_mode` names; returns its step, 0 for a fresh start."""
        found = self._storage.find()
        if found is None:
            return 0
        state, parts, wants = found.loop_state, trainer.parts, self._storage.wants
        now = data_identity(self._config, parts.stream.rows_per_epoch)
        refuse_other_data(state.get("data_identity", {}), now, found.path)
        for role in self._trained(trainer):
            if wants("model"):
                role.load("weights", found.part(role.name))
            if wants("optimizer"):
                role.load("optimizer", found.part(_optimizer_of(role)))
        parts.stream.load_state(state["data_position"])
        trainer.record.counters.load(state["counters"])
        if parts.kl_controller is not None and state.get("kl_controller"):
            parts.kl_controller.load_state_dict(state["kl_controller"])
        if wants("extra"):
            rng.load(found.part("state/rng"))
        self._tracking.resumed(found.step, state.get("record"))
        self._tracking.event("resumed", step=found.step, path=str(found.path))
        self._tracking.notice(f"resuming from {found.path}, step {found.step}")
        self._storage.loaded(found)
        return found.step


def _optimizer_of(role: Role) -> str:
    """Where a role's optimizer is in a checkpoint."""
    return f"state/{role.name}_optim"
