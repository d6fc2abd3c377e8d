"""Finding a checkpoint again: only complete ones count, damaged ones are named and passed over; directories of other
systems are recognised by the names in them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.checkpoint import manifest
from verl.checkpoint.manifest import LOOP, NAME, CheckpointError, Manifest
from verl.checkpoint.write import OnEvent, no_event, sealed

_START = "start with actor_rollout_ref.model.path="
_MERGE = f"have to be merged into a Hugging Face directory first (the public model_merger does it); then {_START}it"
# What in a directory, or in that of a role below it, tells another system's layout: its name, and what to do with it.
_FOREIGN = {
    "model_world_size_*_rank_*.pt": (
        "public verl, FSDP shards",
        f"its shards (model_world_size_*_rank_*.pt) {_MERGE}",
    ),
    "dist_ckpt": ("public verl, Megatron", f"the files of its distributed checkpoint (dist_ckpt/) {_MERGE}"),
    "huggingface/*.safetensors": (
        "public verl, hf_model",
        f"{_START}{{place}}/huggingface for its weights",
    ),
    "adapter_config.json": ("peft adapter", "it cannot be resumed"),
    "config.json": ("hugging face", f"a model directory cannot be resumed; {_START}{{place}}"),
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A sealed and verified checkpoint."""

    path: Path
    step: int
    loop_state: dict[str, Any]
    manifest: Manifest

    def has(self, part: str) -> bool:
        """True if the part ("actor", "state/actor_optim", …) was saved."""
        return any(name.startswith(part + "/") for name in self.manifest.files)

    def part(self, name: str) -> Path:
        """Directory of a part. CheckpointError if it was left out when saving."""
        if not self.has(name):
            why = "it was saved without (checkpoint.save_contents): a model that cannot be resumed"
            raise CheckpointError(f"{self.path} has no {name}/, {why}")
        return self.path / name


def open_checkpoint(path: Path, *, hashes: bool = True) -> Checkpoint:
    """Open a `global_step_N` of ours and check it against its manifest (`hashes=False`: sizes only).

    CheckpointError when it is missing, another system's, unfinished or damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist or is not a directory")
    if why := foreign(path):
        raise CheckpointError(why)
    seal = manifest.read_manifest(path)
    manifest.verify(path, seal, hashes=hashes)
    try:
        loop_state = json.loads((path / LOOP).read_text("utf-8"))
        if loop_state["step"] != seal.step:
            raise ValueError(f"step {loop_state['step']}, in {NAME} it is {seal.step}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / LOOP} cannot be read ({type(error).__name__}: {error})") from error
    return Checkpoint(path, seal.step, loop_state, seal)


def clean(root: Path, *, on_event: OnEvent = no_event) -> None:
    """Tidy up after an interrupted save or deletion. Only the run that owns the folder may call it.

    A `.tmp` that was already sealed and only lacked its rename is published; every other one is removed.
    """
    for path in manifest.stale_entries(Path(root)):
        final = path.with_suffix("")
        try:
            if manifest.step_of(final) is not None and not final.exists():
                open_checkpoint(path)
                os.rename(path, final)
                manifest.sync_directory(final.parent)
                on_event("checkpoint_completed", path=str(final), message=f"{final.name} was sealed: kept")
                continue
        except CheckpointError as error:
            on_event("checkpoint_unfinished", path=str(path), message=f"unfinished, removed: {error}")
        manifest.remove(path)
        on_event("checkpoint_stale_removed", path=str(path))


def newest_sealed(root: Path) -> Path | None:
    """The `global_step_N` that was sealed last. Its manifest reads; its files are not looked at."""
    checkpoints = sealed(root)
    return checkpoints[-1][2] if checkpoints else None


def newest(root: Path, *, on_event: OnEvent = no_event, tidy: bool = True) -> Checkpoint | None:
    """The newest complete checkpoint of a run folder, fully verified, or None.

    Newest is what was sealed last. Incomplete, damaged or foreign directories are named in an event
    `checkpoint_passed_over`. `tidy=False` leaves the `.tmp` of a save in progress alone (readers that do not own
    the run: reports, exports).
    """
    root = Path(root)
    if tidy:
        clean(root, on_event=on_event)

    def pass_over(path: Path, error: CheckpointError) -> None:
        reason = foreign(path) or error
        on_event("checkpoint_passed_over", path=str(path), message=f"passed over: {reason}")

    for *_, path in reversed(sealed(root, pass_over)):
        try:
            return open_checkpoint(path)
        except CheckpointError as error:
            pass_over(path, error)
    return None


def resolve_resume(
    mode: str, path: str | Path | None, root: str | Path, *, on_event: OnEvent = no_event
) -> Checkpoint | None:
    """Where a run starts: a checkpoint, or None for the beginning.

    mode (`trainer.resume_mode`): `disable`: the beginning; `auto`: the newest complete checkpoint of `root`, if
    any; `resume_path`: `path` (`trainer.resume_from_path`), a run folder or a `global_step_N`, which must be
    usable. CheckpointError says what is wrong and what to change.
    """
    root = Path(root)
    if mode == "auto":
        return newest(root, on_event=on_event)
    clean(root, on_event=on_event)
    if mode == "disable":
        return None
    if not path:
        raise CheckpointError("resume_mode=resume_path needs trainer.resume_from_path=<run or global_step_N>")
    return _resume_path(Path(path).expanduser(), on_event)


def _resume_path(path: Path, on_event: OnEvent) -> Checkpoint:
    key = f"trainer.resume_from_path={path}"
    if not path.is_dir():
        raise CheckpointError(f"{key} does not exist or is not a directory")
    if path.name in ("actor", "critic") and (path.parent / NAME).is_file():
        path = path.parent
    if manifest.step_of(path) is not None or (path / NAME).is_file():
        return open_checkpoint(path)
    if why := foreign(path):
        raise CheckpointError(f"{key}: {why}")
    return newest_of(path, key, on_event)


def newest_of(root: Path, name: str, on_event: OnEvent = no_event) -> Checkpoint:
    """`newest` of a folder that this run does not own. CheckpointError where there is none: it says why, and calls the
    folder `name`."""
    problems: list[str] = []

    def note(kind: str, **fields: Any) -> None:
        problems.append(str(fields["message"]))
        on_event(kind, **fields)

    checkpoint = newest(root, on_event=note, tidy=False)
    if checkpoint is None:
        why = "; ".join(problems) or "it holds no global_step_N"
        raise CheckpointError(f"{name} has no complete checkpoint: {why}")
    return checkpoint


def foreign(path: Path) -> str:
    """Why a directory that is not a checkpoint of ours cannot be resumed, and what to do; "" for anything else.

    Only names are looked at, of a `global_step_N` or of a role's directory inside one; nothing is loaded.
    """
    if (path / NAME).is_file() or (path / "state").is_dir():  # the latter: ours, unfinished
        return ""
    for place in (path, path / "actor", path / "critic"):
        for sign, (layout, remedy) in _FOREIGN.items():
            if any(place.glob(sign)):
                return f"{path} is not a checkpoint of this verl ({layout}): {remedy.format(place=place)}"
    return ""
