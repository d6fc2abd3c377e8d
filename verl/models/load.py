"""Load a causal language model, and find what the engine needs of it: its layers, its limits."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.engine.training.settings import read
from verl.errors import UserError
from verl.models import attention, overrides
from verl.models.layers import layer_configs, sizes_of
from verl.versions import refuse_holes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MASKS_OF_ITS_OWN = frozenset({"doge", "deepseek_v4", "hy_v4", "axk2"})
_WINDOW_IN_MASK = frozenset({"phimoe"})
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


def load_model(
    path: str | Path, model_cfg: Any = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Any directory or hub id that AutoModelForCausalLM loads, in `dtype`, attention through verl's function.

    UserError if the directory is not there, has no configuration or no weights, if weights are missing, or if
    the architecture cannot take another attention function.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    attention.register()
    where = check_directory(path)
    config = load_config(where, model_cfg)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where,
            config=config,
            dtype=dtype,
            attn_implementation=attention.IMPLEMENTATION,
            trust_remote_code=bool(read(model_cfg, "trust_remote_code", False)),
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"model.path={path}: cannot be loaded as a causal language model: {error}{_damaged(where)}"
        ) from error
    module, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(
            f"model.path={path}: {len(missing)} weights are missing, for example {', '.join(missing[:3])}; "
            "the files are incomplete or belong to another architecture"
        )
    check_supported(module, path)
    return module.eval()


def allow_training(module: PreTrainedModel, trainable: bool) -> None:
    """requires_grad as the architecture sets it, False everywhere if the model is not to be trained.

    Loading forgets what an architecture keeps out of training (a router's correction, which has no gradient and
    which weight decay would wear away), so it is asked again.
    """
    module.requires_grad_(trainable)
    if not trainable:
        return
    with torch.device("meta"):
        bare = type(module)(copy.deepcopy(module.config))
    own = dict(module.named_parameters())
    for name, parameter in bare.named_parameters():
        if not parameter.requires_grad and name in own:
            own[name].requires_grad_(False)


def _damaged(where: str) -> str:
    """Which weight files of a directory cannot be opened, as an addition to a message."""
    from safetensors import SafetensorError, safe_open

    damaged = []
    for file in sorted(Path(where).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError):
            damaged.append(f"{file.name} ({file.stat().st_size} bytes)")
    return f". Damaged or cut short: {', '.join(damaged)}; fetch or copy the model again" if damaged else ""


def check_directory(path: str | Path) -> str:
    """The path as from_pretrained wants it; UserError for a local directory that cannot work."""
    text = str(Path(str(path)).expanduser()) if str(path).startswith("~") else str(path)
    folder = Path(text)
    if not folder.exists():
        if text.startswith((".", "/")) or text.count("/") != 1:
            raise UserError(f"model.path={path}: no such directory")
        return text
    if not folder.is_dir():
        raise UserError(
            f"model.path={path} is a file; give the Hugging Face directory that holds config.json"
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path={path}: no config.json in this directory; is it a Hugging Face model?")
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise UserError(
            f"model.path={path}: no weights in this directory (model.safetensors, its index, or pytorch_model.bin)"
        )
    return text


def load_config(path: str | Path, model_cfg: Any = None) -> Any:
    """The model's configuration with `override_config` applied. UserError for an override it does not have, and for
    a transformers with a known security hole."""
    refuse_holes("transformers")
    from transformers import AutoConfig

    source = read(model_cfg, "hf_config_path") or path
    try:
        config = AutoConfig.from_pretrained(
            source, trust_remote_code=bool(read(model_cfg, "trust_remote_code", False))
        )
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={source}: the configuration cannot be read: {error}") from error
    overrides.apply(config, read(model_cfg, "override_config", {}) or {})
    return config


def check_supported(module: PreTrainedModel, path: str | Path) -> None:
    """UserError for architectures whose attention we cannot stand in for."""
    name = type(module).__name__
    if not getattr(module, "_supports_attention_backend", False):
        raise UserError(
            f"model.path={path}: {name} has its own attention that cannot be replaced; choose another model"
        )
    config = module.config.get_text_config()
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise UserError(f"model.path={path}: {name} attends in chunks, which this release does not have")
    if why := _differs(module, config):
        raise UserError(
            f"model.path={path}: {name} {why}, which this release does not do; choose another model"
        )


def _differs(module: PreTrainedModel, config: Any) -> str:
    """What an architecture does beside the attention function that ours would silently leave out; "" for nothing."""
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in module.modules()):
        return "counts positions from its padding token's number on"
    indexed = any(getattr(config, key, None) for key in ("index_topk", "index_topk_blocks"))
    if indexed or config.model_type in _MASKS_OF_ITS_OWN:
        return "chooses for itself which tokens its attention sees"
    encodes = any(getattr(part, "is_decoder", True) is False for part in module.modules())
    both = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if encodes or both or not getattr(config, "is_causal", True):
        return "attends in both directions"
    window = getattr(config, "sliding_window", None)
    if config.model_type in _WINDOW_IN_MASK and window and window < config.max_position_embeddings:
        return f"attends to a window of {window} tokens in a way of its own"
    return ""


def end_token_ids(*sources: Any) -> list[int]:
    """Every id that ends a response: of a generation config, a model's config and a tokenizer, any of which may be None."""
    found: list[int] = []
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found += ids if isinstance(ids, list) else [ids] if ids is not None else []
    return sorted(set(found))


def checkpoint_layers(module: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers that can be recomputed one by one."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]


def switch_off_dropout(layers: Iterable[torch.nn.Module]) -> None:
    """Set the rates that layers keep as numbers of their own (OPT) to 0: their `training` flag has another use."""
    for layer in layers:
        for name, value in vars(layer).items():
            if "drop" in name and isinstance(value, float):
                setattr(layer, name, 0.0)


def activation_bytes(config: Any, tokens: int) -> int:
    """Estimate of what a forward pass of a dense or sparse decoder keeps for the backward pass, in bytes.

    Counted on decoder layers under autocast: about 40 bytes per hidden unit, 16 per used intermediate unit and
    24 per attention unit, for each token and layer (within 20 % of the growth in resident memory).
    """
    text = config.get_text_config()
    per_token = max(_layer_bytes(layer) for layer in layer_configs(text))
    return tokens * int(text.num_hidden_layers) * per_token


def _layer_bytes(c: Any) -> int:
    sizes = sizes_of(c)
    attention_units = sizes.heads * sizes.key_width + sizes.cached
    used = getattr(c, "intermediate_size", None) or 4 * c.hidden_size
    used = max(used) if isinstance(used, (list, tuple)) else int(used)
    if getattr(c, "num_experts_per_tok", None):
        used = int(getattr(c, "moe_intermediate_size", None) or used) * int(c.num_experts_per_tok)
    return 40 * int(c.hidden_size) + 16 * used + 24 * attention_units


def serving_dtype(path: str | Path | None, model_cfg: Any) -> str:
    """The data type that the source directory names for serving; bfloat16 where it names none."""
    named = None if path is None else getattr(load_config(path, model_cfg), "dtype", None)
    return "bfloat16" if named is None else str(named).removeprefix("torch.")
