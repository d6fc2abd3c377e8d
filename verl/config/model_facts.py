"""Facts of a model, or of a peft adapter, from the JSON in its directory: no torch, no transformers, no network."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.problems import Kind
from verl.errors import UserError
from verl.versions import package_folder

ADAPTER_CONFIG = "adapter_config.json"
VALUE_LAYERS = ("score", "classifier")  # as transformers names the layer to one number
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_MAPPINGS = ("auto_map", "text_config", "llm_config", "vision_config", "rope_scaling", "rope_parameters")
_SIZES: tuple[str, ...] = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES += ("num_key_value_heads", "vocab_size", "max_position_embeddings")
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
    "None": (type(None),),
}
_KINDS |= {"list": (list,), "tuple": (list,), "dict": (dict,)}
QWEN_VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
QWEN3_5 = ("qwen3_5", "qwen3_5_moe")
GLM_VISION = ("glm4v", "glm4v_moe")
VISION_MODELS = (*QWEN_VISION, *QWEN3_5, *GLM_VISION, "glm46v", "kimi_vl")
"""Types of models that see images and were seen to be trained as transformers computes them (docs/vision.md)."""
VIDEOS_AS_ONE = ("qwen2_vl", "qwen2_5_vl")
"""Those in whose prompts a video is one run of tokens; in others' each row of time is one, after its time."""
_BUILT_OF = {"kimi_vl": "kimi_k25"}
"""Types of models that this package builds of another one's parts in transformers."""
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
"""Kinds of layers that carry no state along a row."""
LINEAR_ATTENTION = "linear_attention"
"""The kind of layers that carry one; those by the delta rule are packed and cut like others (`models/recurrent`)."""
ADAPTER_FOLDER = "lora_adapter"
"""The adapter's folder inside `actor/` of a checkpoint."""


@dataclass(frozen=True)
class ModelFacts:
    """A model's config.json with overrides applied; `text` is its language model's part."""

    folder: Path
    config: dict[str, Any]
    text: dict[str, Any]

    @property
    def context(self) -> int | None:
        """Longest sequence in tokens, rope scaling included, or None if the config does not say."""
        length = self.text.get("max_position_embeddings")
        scaling = self.text.get("rope_scaling") or self.text.get("rope_parameters") or {}
        if not isinstance(length, int):
            return None
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else None
        factor = scaling.get("factor", 1.0) if kind in ("yarn", "linear", "dynamic") else 1.0
        original = scaling.get("original_max_position_embeddings") if kind == "yarn" else None
        try:
            return max(length, int((original or length) * factor))
        except (TypeError, ValueError, OverflowError):  # no number: said where the configuration is applied
            return length

    @property
    def heads(self) -> int | None:
        """Attention heads."""
        return self._int("num_attention_heads", "n_head")

    @property
    def experts(self) -> int:
        """Experts per layer; 0 for a dense model."""
        return self._int("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") or 0

    @property
    def vision(self) -> bool:
        """True for a model that sees images."""
        return "vision_config" in self.config

    @property
    def name(self) -> str:
        """The architecture's name."""
        return str(self.config.get("model_type", "unknown"))

    @property
    def remote_code(self) -> bool:
        """True if the model can only be built by code that is shipped with it."""
        return "auto_map" in self.config and not _transformers(_BUILT_OF.get(self.name, self.name))

    def weight_names(self) -> list[str]:
        """Names of the tensors in the safetensors files, from the index or the file's header; empty if unavailable."""
        from safetensors import SafetensorError, safe_open

        try:
            index = next(iter(sorted(self.folder.glob("*.safetensors.index.json"))), None)
            if index is not None:
                return sorted(json.loads(index.read_text())["weight_map"])
            files = self.folder.glob("*.safetensors")
            return sorted({name for file in files for name in safe_open(file, "numpy").keys()})  # noqa: SIM118
        except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError):
            return []  # damaged files are named when the model is loaded

    def missing_weights(self) -> str | None:
        """What is wrong with the weight files, or None."""
        for index in sorted(self.folder.glob("*.index.json")):
            try:
                shards = set(json.loads(index.read_text())["weight_map"].values())
            except (OSError, ValueError, KeyError, AttributeError):
                return f"{index.name} cannot be read"
            gone = sorted(s for s in shards if not (self.folder / s).exists())
            return f"{index.name} names {', '.join(gone[:3])}, which is not there" if gone else None
        files = ("*.safetensors", "pytorch_model*.bin", "model_world_size_*.pt", "../model_world_size_*.pt")
        if any(next(self.folder.glob(pattern), None) for pattern in files):
            return None
        return f"no *.safetensors there (it holds {_content(self.folder)}); name a directory with weights"

    def _int(self, *names: str) -> int | None:
        return next((self.text[n] for n in names if isinstance(self.text.get(n), int)), None)


class ModelTrouble(UserError, ValueError):
    """The model cannot be used. `kind` as in Problem; `download` if a run could fetch it."""

    def __init__(self, message: str, kind: Kind = "configuration", download: bool = False):
        super().__init__(message)
        self.kind = kind
        self.download = download


def look(path: str, overrides: dict[str, Any] | None = None, config_path: str | None = None) -> ModelFacts:
    """Facts of a model on disk: a directory, or an id in the hub's cache. Raises ModelTrouble."""
    folder = find(path)
    config_folder = find(config_path) if config_path and config_path != path else folder
    places = (config_folder / "config.json", folder / "huggingface" / "config.json")
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        holds = f"the directory holds {_content(folder)}"
        raise ModelTrouble(f"{places[0]} does not exist ({holds}); name a model's directory")
    changes, config = flat_overrides(overrides or {}), _json_object(file)
    if damage := _damage(config):
        raise ModelTrouble(f"{file} is damaged: {'; '.join(damage)}; copy the model again")
    config = _changed(config, changes)
    text = config.get("text_config") or config.get("llm_config") or config
    if text is not config:
        text = _changed(text, {k: v for k, v in changes.items() if k in text})
    return ModelFacts(file.parent, config, text)


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelTrouble(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelTrouble(f"{file}: holds no JSON object")
    return content


def _damage(config: dict[str, Any]) -> list[str]:
    """Fields of a configuration with which the installed transformers builds no model."""
    wrong = [name for name in _MAPPINGS if not isinstance(config.get(name), Mapping | None)]
    if wrong:
        return [f"{name} is {_shown(config[name])}, a mapping is needed" for name in wrong]
    kind = config.get("model_type")
    if not (isinstance(kind, str) and kind) and not config.get("auto_map"):
        return [f"model_type is {_shown(kind)}, the name of an architecture is needed"]
    declared, damage = _declared("" if config.get("auto_map") else str(kind)), {}
    for part in (config, *(config.get(name) or {} for name in _MAPPINGS)):
        for name, value in part.items():
            kinds = declared.get(name, set())
            if kinds and kinds <= _KINDS.keys() and not any(type(value) in _KINDS[k] for k in kinds):
                damage[name] = f"{name} is {_shown(value)}, {' or '.join(sorted(kinds))} is needed"
            elif name in _SIZES and type(value) is int and value < 1:
                damage[name] = f"{name} is {value}, at least 1 is needed"
    return list(damage.values())


def _shown(value: Any) -> str:
    return f"{json.dumps(value):.60}"


def _declared(model_type: str) -> dict[str, set[str]]:
    """The types of each field of an architecture's configurations, as transformers declares and demands them."""
    declared = {name: {"float", "None"} for name in ("rope_theta", "factor")}
    declared |= {name: {"str", "None"} for name in ("rope_type", "type")}
    folder = _transformers(model_type)
    for file in folder.glob("configuration_*.py") if folder else ():
        for name, kinds in re.findall(
            r"^    (\w+)(?<!_token_id): (.+?)(?: = .*)?$", file.read_text("utf-8"), re.MULTILINE
        ):
            declared.setdefault(name, set()).update(kind.partition("[")[0] for kind in kinds.split(" | "))
    return declared


def flat_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`override_config` with what its `model_config` holds, if that is a mapping, beside the rest."""
    nested = overrides.get("model_config") or {}
    if not isinstance(nested, Mapping):
        return dict(overrides)
    return {name: value for name, value in overrides.items() if name != "model_config"} | dict(nested)


def _changed(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """With the changes in place; parts that are mappings are merged, as the run does it (verl/models/overrides.py)."""
    new = dict(config)
    for name, value in changes.items():
        old = config.get(name)
        if not isinstance(old, Mapping) or not isinstance(value, Mapping):
            new[name] = value
        else:
            merge = merged_positions if name in ("rope_scaling", "rope_parameters") else _changed
            new[name] = merge(dict(old), value)
    return new


def merged_positions(parameters: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` with those given in their place; another kind of scaling keeps nothing of the old but theta."""
    new = dict(overrides)
    if "type" in new:
        new.setdefault("rope_type", new.pop("type"))
    old = parameters.get("rope_type", parameters.get("type"))
    if new.get("rope_type", old) != old:
        parameters = {k: v for k, v in parameters.items() if k in ("rope_theta", "partial_rotary_factor")}
    return {**parameters, **new}


def _content(folder: Path) -> str:
    return ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"


def find(path: str) -> Path:
    """The directory of a model on this disk. Raises ModelTrouble with class "machine" if it is not here."""
    if "://" in path:
        raise ModelTrouble(f"{path} is remote; it would be copied first", "machine", download=True)
    local = Path(path)
    if os.path.isdir(local):  # Path.is_dir raises for a name that is too long
        return local
    if os.path.exists(local):
        raise ModelTrouble(f"{path} is a file; name the directory that holds config.json")
    cached = _hub_folder(path)
    if cached is not None:
        return cached
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelTrouble(f"{path}: no such directory on this disk", "machine")
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    why = "HF_HUB_OFFLINE is set" if offline else f"`hf download {path}` fetches it"
    message = f"the model {path} is not on this disk ({why}; or name a directory)"
    raise ModelTrouble(message, "machine", download=not offline)


def _hub_folder(name: str) -> Path | None:
    """The snapshot of a hub id in the cache, or None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None


def _transformers(model_type: str) -> Path | None:
    """The folder of the architecture in the installed transformers, or None if it does not have it."""
    package, name = package_folder("transformers"), model_type.replace("-", "_").replace(".", "_")
    folder = package / "models" / name if package and name else None
    return folder if folder and folder.is_dir() else None


def adapter_directory(path: str | Path) -> Path:
    """The directory of an adapter: a peft directory, or one inside a `global_step_N` or its `actor/`.

    UserError if there is none.
    """
    folder = Path(path).expanduser()
    for place in (folder, folder / ADAPTER_FOLDER, folder / "actor" / ADAPTER_FOLDER):
        if (place / ADAPTER_CONFIG).is_file():
            return place
    if not folder.is_dir():
        raise UserError(f"model.lora_adapter_path={path}: no such directory")
    holds = f"no {ADAPTER_CONFIG} there (it holds {_content(folder)})"
    raise UserError(f"model.lora_adapter_path={path}: {holds}; name a peft adapter's directory")


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """adapter_config.json of a directory. UserError if it cannot be read."""
    return _json_object(Path(directory) / ADAPTER_CONFIG)
