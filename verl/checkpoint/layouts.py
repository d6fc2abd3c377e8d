"""Recognises what a directory is by the names in it: ours, Hugging Face, PEFT, or the public verl's.

Only names are looked at; nothing is loaded.
"""

from pathlib import Path

from verl.checkpoint import manifest

OURS = "ours"
RUN = "run folder"
HUGGING_FACE = "hugging face"
PEFT = "peft adapter"
VERL_FSDP = "public verl, FSDP shards"
VERL_HF = "public verl, hf_model"
VERL_MEGATRON = "public verl, Megatron"

# What in a directory, or in that of a role below it, tells which layout it has; the first that is found counts.
_SIGNS = (
    ("model_world_size_*_rank_*.pt", VERL_FSDP),
    ("dist_ckpt", VERL_MEGATRON),
    ("huggingface/*.safetensors", VERL_HF),
    ("adapter_config.json", PEFT),
    ("config.json", HUGGING_FACE),
)
_START = "then start with actor_rollout_ref.model.path=<that directory>"
_MERGE = f"merged into a Hugging Face directory first (the public model_merger does it); {_START}"


def detect(path: Path) -> tuple[str | None, Path]:
    """Which layout a directory has (one of the constants here), or None if it is none of them; and where its sign is.

    Accepts a run folder, a `global_step_N`, or a role's directory inside one.
    """
    if (path / manifest.NAME).is_file():
        return OURS, path
    for place in (path, path / "actor", path / "critic"):
        for sign, layout in _SIGNS:
            if any(place.glob(sign)):
                return layout, place
    return (RUN if any(True for _ in manifest.step_directories(path)) else None), path


def foreign(path: Path) -> str:
    """Why a directory that is not a checkpoint of ours cannot be resumed, and what to do; "" for anything else."""
    layout, place = detect(path)
    if layout in (None, OURS, RUN) or (path / "state").is_dir():  # the latter: ours, unfinished
        return ""
    advice = {
        VERL_HF: f"its weights can start a new run: actor_rollout_ref.model.path={place / 'huggingface'}",
        VERL_FSDP: f"its shards (model_world_size_*_rank_*.pt) have to be {_MERGE}",
        VERL_MEGATRON: f"its distributed checkpoint (dist_ckpt/) has to be {_MERGE}",
        HUGGING_FACE: f"a model directory cannot be resumed; start with actor_rollout_ref.model.path={place}",
    }
    remedy = advice.get(str(layout), "it cannot be resumed")
    return f"{path} is not a checkpoint of this verl ({layout}): {remedy}"
