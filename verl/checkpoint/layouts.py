"""Recognises what a directory is by the names in it: ours, Hugging Face, PEFT, or the public verl's.

Only names are looked at; nothing is loaded.
"""

from __future__ import annotations

from pathlib import Path

from verl.checkpoint import manifest

OURS = "ours"
RUN = "run folder"
HUGGING_FACE = "hugging face"
PEFT = "peft adapter"
VERL_FSDP = "public verl, FSDP shards"
VERL_HF = "public verl, hf_model"
VERL_MEGATRON = "public verl, Megatron"

_ROLES = ("actor", "critic")


def detect(path: Path) -> str | None:
    """Which layout a directory has (one of the constants here), or None if it is none of them.

    Accepts a run folder, a `global_step_N`, or a role's directory inside one.
    """
    if not path.is_dir():
        return None
    if (path / manifest.NAME).is_file():
        return OURS
    for place in (path, *(path / role for role in _ROLES)):
        found = _detect_role(place)
        if found is not None:
            return found
    return RUN if any(True for _ in manifest.step_directories(path)) else None


def _detect_role(place: Path) -> str | None:
    if not place.is_dir():
        return None
    if any(place.glob("model_world_size_*_rank_*.pt")):
        return VERL_FSDP
    if (place / "dist_ckpt").is_dir():
        return VERL_MEGATRON
    if any((place / "huggingface").glob("*.safetensors")):
        return VERL_HF
    if (place / "adapter_config.json").is_file():
        return PEFT
    if (place / "config.json").is_file():
        return HUGGING_FACE
    return None


def model_directory(path: Path, role: str = "actor") -> Path | None:
    """The Hugging Face directory that a path stands for, or None.

    Follows a run folder to its newest `global_step_N` (by the pointer file, else the highest number), a
    `global_step_N` to `{role}/` or the public system's `{role}/huggingface/`, and takes a directory with
    config.json and weights as it is.
    """
    path = Path(path)
    for place in (path, path / role, path / role / "huggingface", path / "huggingface"):
        if (place / "config.json").is_file() and (
            any(place.glob("*.safetensors")) or any(place.glob("pytorch_model*.bin"))
        ):
            return place
    step = newest_by_name(path)
    return model_directory(step, role) if step is not None else None


def newest_by_name(root: Path) -> Path | None:
    """The `global_step_N` that the pointer file names, else the one with the highest N; nothing is verified."""
    pointer = root / manifest.LATEST
    if pointer.is_file():
        named = root / f"global_step_{pointer.read_text('utf-8').strip()}"
        if named.is_dir():
            return named
    return max(manifest.step_directories(root), key=lambda p: manifest.step_of(p) or 0, default=None)


def foreign(path: Path) -> str:
    """Why a directory that is not a checkpoint of ours cannot be resumed, and what to do; "" for anything else."""
    layout = detect(path)
    if layout in (None, OURS, RUN) or (path / "state").is_dir():  # the latter: ours, unfinished
        return ""
    merge = "the public model_merger does it); then start with actor_rollout_ref.model.path=<that directory>"
    advice = {
        VERL_HF: f"its weights can start a new run: actor_rollout_ref.model.path={model_directory(path)}",
        VERL_FSDP: "its shards (model_world_size_*_rank_*.pt) have to be merged into a Hugging Face directory first "
        f"({merge}",
        VERL_MEGATRON: "its distributed checkpoint (dist_ckpt/) has to be merged into a Hugging Face directory first "
        f"({merge}",
        HUGGING_FACE: "a model directory cannot be resumed; start with "
        f"actor_rollout_ref.model.path={model_directory(path) or path}",
    }
    what = advice.get(str(layout), "it cannot be resumed")
    return f"{path} is not a checkpoint of this verl ({layout}): {what}"
