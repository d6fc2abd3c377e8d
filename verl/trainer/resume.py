"""What a checkpoint of a run holds beside the weights, and how a run is put back exactly where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint import read, rng, write
from verl.errors import UserError
from verl.tracking.names import plain_metrics

if TYPE_CHECKING:
    from verl.config import Config
    from verl.trainer.ppo_trainer import PPOTrainer


def data_identity(config: Config) -> dict[str, Any]:
    """The settings that fix which prompts come when; a resumed run must have the same (config.md §16, rule 21)."""
    data = config.data
    files = data.train_files if isinstance(data.train_files, list) else [data.train_files]
    return {
        "data.train_files": [str(f) for f in files],
        "data.seed": data.seed if data.seed is not None else config.trainer.seed,
        "data.shuffle": data.shuffle,
        "data.train_batch_size": data.train_batch_size,
        "actor_rollout_ref.rollout.n": config.actor_rollout_ref.rollout.n,
    }


def refuse_other_data(saved: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> None:
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
            f"actor_rollout_ref.model.path={checkpoint / 'actor'} trainer.resume_mode=disable"
        )


class Checkpoints:
    """Saves and restores a trainer's whole state under `root`."""

    def __init__(
        self,
        root: Path,
        config: Config,
        save_tokenizer: Callable[[Path], Any],
        event: Callable[..., None],
        notice: Callable[[str], None],
    ):
        self.root = root
        self._config = config
        self._save_tokenizer = save_tokenizer
        self._event = event
        self._notice = notice
        self._unsaved: int | None = None

    def say_unsaved(self) -> None:
        """At the end of a run: say once more that its last checkpoint could not be written."""
        if self._unsaved is not None:
            self._notice(
                f"the checkpoint of step {self._unsaved} was NOT written (see events.jsonl): the newest weights of this run "
                "are lost. Free space in the run folder and run the same command again"
            )

    def save(self, trainer: PPOTrainer, record: dict[str, Any]) -> Path | None:
        """Write `global_step_N`; `record` is the step's metrics, in case a kill comes before they are logged.

        A failure is an event and a notice; the run goes on.
        """
        parts, keep = trainer.parts, self._config.trainer
        contents = set(self._config.actor_rollout_ref.actor.checkpoint.save_contents)
        jobs: dict[str, Callable[[Path], Any]] = {}
        if contents & {"model", "hf_model"}:
            jobs["actor"] = self._save_actor(trainer)
        if "optimizer" in contents:
            jobs["state/actor_optim"] = parts.actor.save_optimizer
        if "extra" in contents:
            jobs["state/rng"] = rng.save
        path = write.save(
            self.root,
            trainer.step,
            jobs,
            loop_state=self._loop_state(trainer) | {"record": plain_metrics(record)[0]},
            keep=keep.max_ckpt_to_keep or keep.max_actor_ckpt_to_keep,
            on_event=self._event,
        )
        self._unsaved = trainer.step if path is None else None
        if path is not None and not {"model", "optimizer", "extra"} <= contents:
            self._notice(f"{path.name} holds {sorted(contents)} only: it can be used but not resumed")
        return path

    def _save_actor(self, trainer: PPOTrainer) -> Callable[[Path], None]:
        def save(directory: Path) -> None:
            trainer.parts.actor.save(directory)
            self._save_tokenizer(directory)

        return save

    def _loop_state(self, trainer: PPOTrainer) -> dict[str, Any]:
        parts = trainer.parts
        resolved = json.dumps(self._config.to_dict(), sort_keys=True, default=str)
        return {
            "step": trainer.step,
            "weight_version": trainer.step,
            "data_position": trainer.draws.position(trainer.step),
            "data_identity": data_identity(self._config),
            "kl_controller": parts.kl_controller.state_dict() if parts.kl_controller else None,
            "counters": parts.counters.state(),
            "seed": self._config.trainer.seed,
            "config_hash": hashlib.sha256(resolved.encode()).hexdigest(),
        }

    def resume(self, trainer: PPOTrainer) -> int:
        """Restore the checkpoint that `trainer.resume_mode` names; returns its step, 0 for a fresh start."""
        settings = self._config.trainer
        found = read.resolve_resume(
            settings.resume_mode, settings.resume_from_path, self.root, on_event=self._event
        )
        if found is None:
            return 0
        state, parts = found.loop_state, trainer.parts
        refuse_other_data(state.get("data_identity", {}), data_identity(self._config), found.path)
        parts.actor.load(found.part("actor"))
        parts.actor.load_optimizer(found.part("state/actor_optim"))
        parts.stream.load_state(state["data_position"])
        parts.counters.load(state["counters"])
        if parts.kl_controller is not None and state.get("kl_controller"):
            parts.kl_controller.load_state_dict(state["kl_controller"])
        rng.load(found.part("state/rng"))
        trainer.parts.tracking.resumed(found.step, state.get("record"))
        self._event("resumed", step=found.step, path=str(found.path))
        self._notice(f"resuming from {found.path}, step {found.step}")
        return found.step
