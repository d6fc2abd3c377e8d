"""Load a causal language or vision-language model from a directory, whole or without weights; its limits and layers.

A model without weights has parameters on the meta device and real buffers. Weights come in one sharded unit after the
other, so no rank ever holds the whole model. Buffers that no checkpoint holds (rotary frequencies) are computed by the
architecture's own initialisation; whether it did is checked.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import swap_tensors

from verl.config.schema.base import setting
from verl.errors import UserError
from verl.models import attention, overrides, recurrent
from verl.models.inputs import sees_images
from verl.versions import refuse_holes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from verl.config.schema.model import ModelConfig

_MASKS_OF_ITS_OWN = frozenset({"doge", "deepseek_v4", "hy_v4", "axk2"})
_WINDOW_IN_MASK = frozenset({"phimoe"})
_WORDS = dict.fromkeys(("lm", "value"), "a causal language model") | {"score": "a sequence classifier"}
_UNSET = -(2**31) + 7
_UNBUILT = (OSError, ValueError, LookupError, AssertionError)
"""Errors of transformers for a configuration, perhaps an overridden one, that no model can be made of."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


class NotPacked(UserError):
    """A model that works by itself, but not on packed tokens."""


def load_model(
    path: str | Path,
    model_cfg: ModelConfig | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    head: str = "lm",
    packed: bool = True,
    trainable: bool = False,
) -> PreTrainedModel:
    """Any directory or hub id that AutoModelForCausalLM loads, in `dtype`, attention through verl's function.

    head: "value" for the same decoder under a linear layer to one number, which starts at 0 unless the directory has it
    (transformers' token classifier with one label); "score" for a sequence classifier with one label, whose layer
    starts at 0 in the same way where it is `trainable`.
    packed: False for a model that is used as transformers has it, with its own attention.
    UserError if the directory is not there, has no configuration or no weights, if weights are missing, or if
    the architecture cannot take another attention function.
    """
    from safetensors import SafetensorError

    attention.register()
    where = check_directory(path)
    config = load_config(where, model_cfg)
    options = {**_options(model_cfg, dtype), "config": config, "output_loading_info": True}
    if not packed:
        del options["attn_implementation"]
    try:
        with _quiet():
            module, report = _kind(config, head, path, trainable).from_pretrained(where, **options)
    except (*_UNBUILT, SafetensorError) as error:
        raise UserError(
            f"model.path={path}: cannot be loaded as {_WORDS[head]}: {type(error).__name__}: {error}{_damaged(where)}"
        ) from error
    absent = set(report["missing_keys"])
    fresh = absent & starts_at_zero(module, head, trainable).keys()
    for name in fresh:
        module.get_parameter(name).detach().zero_()
    missing = sorted(absent - fresh)
    if missing:
        raise UserError(
            f"model.path={path}: {len(missing)} weights are missing, for example {', '.join(missing[:3])}; "
            "the files are incomplete or belong to another architecture"
        )
    if packed:
        check_supported(module, path)
        recurrent.attach(module)
    return module.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """No table of weights that are missing or left over: `load_model` refuses what matters."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _kind(config: PreTrainedConfig, head: str, path: str | Path, trainable: bool = False) -> Any:
    """The class that loads a model with this head."""
    from transformers import modeling_layers
    from transformers.models.auto import modeling_auto as auto

    kind, sees = type(config), sees_images(config)
    if head == "lm" and sees and kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return auto.AutoModelForImageTextToText
    if head == "lm":
        return auto.AutoModelForCausalLM
    if head == "score":
        _check_classifier(config, path, trainable)
        if sees and kind not in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            whole: Any = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
            return _headed(whole, modeling_layers.GenericForSequenceClassification)
        return auto.AutoModelForSequenceClassification
    config.num_labels = 1
    if (mapped := auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(kind, None)) is not None:
        return mapped
    causal: Any = auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    if causal is None:
        raise UserError(f"model.path={path}: {kind.__name__} has no value head here; choose another model")
    return _headed(causal, modeling_layers.GenericForTokenClassification)


def _headed(kind: type, head: type) -> Any:
    """The class of an architecture under another head, where transformers has none. kind: its class for language."""
    from transformers import PreTrainedModel

    base = next(base_class for base_class in kind.__mro__[1:] if issubclass(base_class, PreTrainedModel))
    return type(kind.__name__.partition("For")[0] + head.__name__.removeprefix("Generic"), (head, base), {})


def _check_classifier(config: PreTrainedConfig, path: str | Path, trainable: bool) -> None:
    """UserError unless the directory names a sequence classifier with one label; another model becomes one by training
    alone."""
    names = ", ".join(getattr(config, "architectures", None) or ["a model of no named architecture"])
    if "ForSequenceClassification" not in names and trainable:
        config.num_labels = 1
    elif "ForSequenceClassification" not in names:
        raise UserError(f"model.path={path}: this is {names}, not a sequence classifier")
    if config.num_labels != 1:
        raise UserError(f"model.path={path}: it has {config.num_labels} labels; a reward model has one")


def value_layer(module: PreTrainedModel) -> torch.nn.Linear:
    """The linear layer to one number of a model with a value or score head."""
    layer: Any = getattr(module, "score", None) or getattr(module, "classifier", None)
    return layer


def value_weights(module: PreTrainedModel) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and tensors of `value_layer`."""
    ids = {id(parameter) for parameter in value_layer(module).parameters()}
    return [(name, p) for name, p in module.named_parameters() if id(p) in ids]


def starts_at_zero(module: PreTrainedModel, head: str, trainable: bool) -> dict[str, torch.nn.Parameter]:
    """The weights that a directory may lack, by name."""
    return dict(value_weights(module)) if head == "value" or (head == "score" and trainable) else {}


def build_model(
    path: str | Path, model_cfg: ModelConfig | None = None, *, head: str = "lm", trainable: bool = False
) -> PreTrainedModel:
    """The architecture of a directory or hub id, float32, all tensors on the meta device.

    UserError as `load_model` raises it, but for what only the weights themselves can show.
    """
    from transformers import GenerationConfig

    attention.register()
    where = check_directory(path)
    config = load_config(where, model_cfg)
    kind, options = _kind(config, head, path, trainable), _options(model_cfg, torch.float32)
    build = getattr(kind, "_from_config", None) or kind.from_config
    if hasattr(kind, "_from_config"):
        del options["trust_remote_code"]  # only the automatic class takes it
    try:
        with torch.device("meta"):
            module = build(config, **options)
    except _UNBUILT as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"model.path={path}: cannot be built as {_WORDS[head]}: {why}") from error
    check_supported(module, path)
    recurrent.attach(module)
    _without_values(module)
    if module.can_generate() and Path(where, "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(where)
    return module.eval()


def _options(model_cfg: ModelConfig | None, dtype: torch.dtype) -> dict[str, Any]:
    trusted = bool(setting(model_cfg, "trust_remote_code", False))
    return {"dtype": dtype, "attn_implementation": attention.IMPLEMENTATION, "trust_remote_code": trusted}


def _without_values(module: torch.nn.Module) -> None:
    """Take parameters that came with values to the meta device: not every function that an architecture draws its start
    from minds `torch.device`. Only meta parameters are filled later."""
    for parameter in module.parameters():
        if not parameter.is_meta:
            empty = torch.empty_like(parameter, device="meta")
            swap_tensors(parameter, torch.nn.Parameter(empty, requires_grad=parameter.requires_grad))


@torch.no_grad()
def fill_buffers(module: PreTrainedModel) -> list[str]:
    """Give every meta buffer its real value in host memory; returns the names of those whose value is not known.

    Call it while the parameters are on the meta device: initialising them there costs nothing.
    """
    from transformers import PreTrainedModel

    unknown = []
    # As transformers does it: a model inside of the model initialises what is its own.
    owners: dict[str, PreTrainedModel] = {}
    for prefix, part in module.named_modules():
        above = owners.get(prefix.rpartition(".")[0], module)
        owner = owners[prefix] = part if isinstance(part, PreTrainedModel) else above
        meta_buffers = {name: b for name, b in part._buffers.items() if b is not None and b.is_meta}
        if not meta_buffers:
            continue
        for name, buffer in meta_buffers.items():
            mark = torch.tensor(float("nan") if buffer.is_floating_point() else _UNSET)
            part._buffers[name] = mark.to(buffer.dtype).expand(buffer.shape).contiguous()
        owner._init_weights(part)
        for name, buffer in meta_buffers.items():
            value: Any = part._buffers[name]
            unset = value.isnan() if value.is_floating_point() else value == _UNSET
            # Types too small for the mark say nothing.
            if buffer.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16) or bool(unset.any()):
                unknown.append(f"{prefix}.{name}".lstrip("."))
    return unknown


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
    parameters = dict(module.named_parameters())
    for name, parameter in bare.named_parameters():
        if not parameter.requires_grad and name in parameters:
            parameters[name].requires_grad_(False)


def freeze_vision_tower(module: PreTrainedModel) -> None:
    """Keep the vision tower, its projection included, out of training. Nothing for a text model."""
    if sees_images(module.config):
        module.get_encoder(modality="image").requires_grad_(False)
        if (projector := getattr(module.base_model, "mm_projector", None)) is not None:  # not in the tower
            projector.requires_grad_(False)


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


def check_directory(path: str | Path | None) -> str:
    """The path as from_pretrained wants it; UserError for a local directory that cannot work."""
    text = str(Path(str(path)).expanduser()) if str(path).startswith("~") else str(path)
    folder = Path(text)
    if not folder.exists():
        if text.startswith((".", "/")) or text.count("/") != 1:
            raise UserError(f"model.path={path}: no such directory")
        return text
    if not folder.is_dir():
        raise UserError(f"model.path={path} is a file; give the directory that holds config.json")
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path={path}: no config.json in this directory; is it a Hugging Face model?")
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise UserError(f"model.path={path}: no weights (model.safetensors, its index, or pytorch_model.bin)")
    return text


def load_config(path: str | Path, model_cfg: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The model's configuration with `override_config` applied. UserError for an override it does not have, and for
    a transformers with a known security hole."""
    refuse_holes("transformers")
    from transformers import AutoConfig

    source = setting(model_cfg, "hf_config_path") or path
    trusted = bool(setting(model_cfg, "trust_remote_code", False))
    register_own(source)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trusted)
    except Exception as error:  # of a damaged file each class has its own
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"model.path={source}: the configuration cannot be read: {why}") from error
    refused = overrides.apply(config, setting(model_cfg, "override_config", {}) or {})
    if refused:
        raise UserError("; ".join(f"model.override_config.{name}: {why}" for name, why in refused.items()))
    return config


def register_own(source: str | Path) -> None:
    """Make transformers know the type of a directory or hub id that this package builds of its parts."""
    from transformers import PreTrainedConfig

    try:
        facts, _ = PreTrainedConfig.get_config_dict(source)
    except (OSError, ValueError):
        return  # who loads it says why
    if facts.get("model_type") == "kimi_vl":
        if importlib.util.find_spec("transformers.models.kimi_k25") is None:
            raise UserError(
                f"model.path={source}: Kimi-VL is built of Kimi-K2.5's parts, which this transformers lacks"
            )
        importlib.import_module("verl.models.kimi_vl").register()


def check_supported(module: PreTrainedModel, path: str | Path) -> None:
    """NotPacked for architectures whose attention we cannot stand in for."""
    if why := _differs(module, module.config.get_text_config()):
        name = type(module).__name__
        raise NotPacked(f"model.path={path}: {name} {why}, which is not here; choose another model")


def _differs(module: PreTrainedModel, config: PreTrainedConfig) -> str:
    """What an architecture does beside the attention function that ours would silently leave out; "" for nothing."""
    if not recurrent.takes_attention(module):
        return "has its own attention that cannot be replaced"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "attends in chunks"
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
    """Every id that ends a response, from a generation config, a model's config and a tokenizer, or None."""
    end_ids: list[int] = []
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        end_ids += ids if isinstance(ids, list) else [ids] if ids is not None else []
    return sorted(set(end_ids))


def checkpoint_layers(module: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers that can be recomputed one by one."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]


def recompute_layers(module: PreTrainedModel, options: Mapping[str, Any]) -> None:
    """Have the layers recomputed in the backward pass. options: of `torch.utils.checkpoint.checkpoint`."""
    # Newer versions of transformers warn of the old name, older ones (5.19) have no other.
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    enable(dict(options))


def switch_off_dropout(layers: Iterable[torch.nn.Module]) -> None:
    """Set the rates that layers keep as numbers of their own (OPT) to 0: their `training` flag has another use."""
    for layer in layers:
        for name, value in vars(layer).items():
            if "drop" in name and isinstance(value, float):
                setattr(layer, name, 0.0)


def serving_dtype(path: str | Path | None, model_cfg: ModelConfig | None) -> str:
    """The data type that the source directory names for serving; bfloat16 where it names none."""
    dtype = None if path is None else getattr(load_config(path, model_cfg), "dtype", None)
    return "bfloat16" if dtype is None else str(dtype).removeprefix("torch.")
