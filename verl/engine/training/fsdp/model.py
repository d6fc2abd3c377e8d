"""Building the model of an engine: whole in one process, cut over the ranks of several.

On one rank transformers loads it, and a sampler of this process may read the very tensors that the optimizer writes. On
several it is built without weights, which come from the files one unit after the other: a unit (one decoder layer, or
several merged) is the piece that torch's `fully_shard` gathers at once. What is in no layer (embedding, last
normalisation, head) is the root's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from verl.config.layout import MODEL_KEYS, model_problems
from verl.config.schema.base import setting
from verl.engine.training.fsdp.expert_parallel import ExpertParallel
from verl.engine.training.fsdp.fuse import FusedForwards
from verl.engine.training.fsdp.sharding import Layout, sharded_modules
from verl.engine.training.fsdp.tensor_parallel import TensorParallel
from verl.engine.training.fsdp.ulysses import SequenceParallel
from verl.engine.training.heads import HEADS, OutputHead
from verl.engine.training.lora import Adapter, AdapterSource, LoraSettings, inject
from verl.engine.training.process_group import on_all_ranks
from verl.engine.training.settings import named_dtype
from verl.engine.training.weight_files import FileSource, WeightSource, model_folder, open_source
from verl.errors import UserError
from verl.models import attention, mtp, positions, pretrained, recurrent
from verl.models.inputs import sees_images, takes_features
from verl.models.layers import is_recurrent, layer_configs
from verl.platform import platform_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What decides how the model is built; see `FSDPEngine`. fsdp: `fsdp_config`. streams: units come from host memory
    during a step. compiles: `use_torch_compile`."""

    path: str | Path | None
    model_cfg: Any
    fsdp: Any
    head: str
    device: torch.device
    compute_dtype: torch.dtype
    trainable: bool
    seed: int
    longest: int | None
    streams: bool = False
    freezes_vision: bool = False
    compiles: bool = True

    @property
    def kind(self) -> dict[str, Any]:
        """What decides the model's class, and which weights its files may lack."""
        return {"head": self.head, "trainable": self.trainable}

    @property
    def predicts_further(self) -> bool:
        """Whether the model gets its layer for the token after the next one: the policy's alone does."""
        return self.trainable and self.head == "lm" and bool(setting(self.model_cfg, "mtp.enable", False))

    @property
    def lora(self) -> LoraSettings | None:
        """The adapter to train, None for all weights."""
        return LoraSettings.of(self.model_cfg, str(self.path)) if self.trainable else None


@dataclass(slots=True)
class EngineModel:
    """The model, in `head`, as this rank holds it; `fused` are the replacements of its layers that fit."""

    head: OutputHead
    fused: FusedForwards
    adapter: Adapter | None = None
    tensor: TensorParallel | None = None
    sequence: SequenceParallel | None = None


def whole_model(settings: ModelSettings, module: PreTrainedModel | None = None) -> EngineModel:
    """The model of one process, loaded or as given: a given one keeps its tensors and their requires_grad."""
    if module is None:
        assert settings.path is not None, "give model_path or module"
        module = pretrained.load_model(settings.path, settings.model_cfg, **settings.kind)
        pretrained.allow_training(module, settings.trainable)
        if settings.predicts_further:
            layer = _predict_further(module, settings)
            names = {id(p): name for name, p in module.named_parameters()}
            _source(module, settings.path, settings).fill(layer.modules(), names)
    else:
        attention.register()
        pretrained.check_supported(module, settings.path or type(module).__name__)
        module.set_attn_implementation(attention.IMPLEMENTATION)
        recurrent.attach(module)
    positions.settle(module, settings.longest)
    module.to(settings.device)  # type: ignore[arg-type]
    adapter, lora = None, settings.lora
    if lora is not None:
        adapter = inject(module, lora)
        adapter.materialise(AdapterSource(module, lora, settings.seed, None), settings.device)
    if settings.freezes_vision:
        pretrained.freeze_vision_tower(module)
    return EngineModel(_headed(module.eval(), settings), FusedForwards(module, compiles=settings.compiles), adapter)


def sharded_model(settings: ModelSettings, layout: Layout) -> EngineModel:
    """This rank's part of the model. Collective; what fails on one rank is raised by all."""
    assert settings.path is not None
    path, lora = settings.path, settings.lora
    module = on_all_ranks(lambda: pretrained.build_model(path, settings.model_cfg, **settings.kind))
    if settings.predicts_further:
        for key in ("tensor", "expert", "sequence"):
            if getattr(layout, key) is not None:
                raise UserError(f"model.mtp.enable=True with {layout.placement.at(key)} is not here; unset one")
        _predict_further(module, settings)
    tensor = None if layout.tensor is None else TensorParallel(module, layout.tensor)
    expert = None
    if layout.expert is not None:
        expert = ExpertParallel(module, layout.expert, layout.placement.at("expert"))
    sequence = _sequence_parallel(module, layout)
    if lora is not None and (tensor or expert):
        key = "tensor" if tensor else "expert"
        raise UserError(f"model.lora_rank with fsdp_config.{key}_parallel_size > 1 is not here; unset one")
    source, adapter = _source(module, path, settings), None
    positions.settle(module, settings.longest)
    if lora is not None:
        adapter = on_all_ranks(lambda: inject(module, lora))
        source = on_all_ranks(lambda: AdapterSource(module, lora, settings.seed, source))
    if settings.freezes_vision:
        pretrained.freeze_vision_tower(module)
    model = EngineModel(_headed(module, settings), FusedForwards(compiles=settings.compiles), adapter, tensor, sequence)
    on_all_ranks(lambda: _shard(model, source, layout, settings, expert))
    return model


def _headed(module: PreTrainedModel, settings: ModelSettings) -> OutputHead:
    head: OutputHead = HEADS[settings.head](module)
    head.further_detached = bool(setting(settings.model_cfg, "mtp.detach_encoder", True))
    return head


def _predict_further(module: PreTrainedModel, settings: ModelSettings) -> torch.nn.Module:
    """Give the model its layer that predicts a token further, and return it."""
    if settings.lora is not None:
        raise UserError("model.mtp.enable=True with model.lora_rank is not here; unset one")
    layer, trains = mtp.attach(module, settings.path), bool(setting(settings.model_cfg, "mtp.enable_train", False))
    layers = {name: tensor for name, tensor in module.state_dict().items() if name.startswith(f"{mtp.NAME}.")}
    if missing := FileSource(model_folder(settings.path or ""), module).missing(layers):
        raise UserError(
            f"model.mtp.enable=True: the files of model.path={settings.path} lack {missing[0]}; set it to False"
        )
    return layer.requires_grad_(trains)


def _sequence_parallel(module: PreTrainedModel, layout: Layout) -> SequenceParallel | None:
    """How ranks share sequences, if they do. UserError for sizes of any kind that do not suit the model."""
    placement = layout.placement
    text = module.config.get_text_config()
    for config in layer_configs(text):
        for key, problem in model_problems(placement, {key: getattr(config, key, None) for key in MODEL_KEYS}):
            raise UserError(f"{key}: {problem}")
    if layout.sequence is None:
        return None
    name = type(module).__name__
    if is_recurrent(module):
        raise UserError(f"{placement.at('sequence')}: {name} carries a state along the row; set it to 1")
    heads, sees = int(text.num_attention_heads) // layout.placement.tensor, sees_images(module.config)
    if sees and not takes_features(module):
        raise UserError(f"{placement.at('sequence')}: {name} takes no encoded images; set it to 1")
    return SequenceParallel(layout.sequence, heads, module.config.image_token_id if sees else None)


def _source(module: PreTrainedModel, path: str | Path, settings: ModelSettings) -> WeightSource:
    """Weights for the meta parameters; buffers get theirs here."""
    unknown = set(pretrained.fill_buffers(module))
    parameters: dict[str, torch.Tensor] = dict(module.named_parameters())
    # Where a buffer's value is unknown only a model that was loaded whole can tell.
    buffers = {n: b for n, b in module.named_buffers() if n in module.state_dict() or n in unknown}

    def load() -> dict[str, torch.Tensor]:
        loaded = pretrained.load_model(path, settings.model_cfg, **settings.kind)
        return dict(loaded.named_parameters()) | dict(loaded.named_buffers())

    fresh = pretrained.starts_at_zero(module, **settings.kind)
    source = open_source(path, module, parameters | buffers, load, fresh)
    for name, buffer in buffers.items():
        buffer.copy_(source.read(name, buffer))
    return source


def _shard(
    model: EngineModel, source: WeightSource, layout: Layout, settings: ModelSettings, expert: ExpertParallel | None
) -> None:
    """Fill the meta parameters from `source`, unit by unit, and cut each over the ranks.

    While a unit's weights are whole, `model.fused` looks which of its modules it can stand in for.
    """
    module, tensor, cfg = model.head.module, model.tensor, settings.fsdp
    names = {id(p): name for name, p in module.named_parameters()}
    places = {id(part): name for name, part in module.named_modules()}
    options = _unit_options(layout, settings)
    free: dict[str, Any] = {"reshard_after_forward": bool(setting(cfg, "reshard_after_forward", True))}
    buffers = setting(cfg, "mixed_precision.buffer_dtype")
    buffer_dtype = buffers and named_dtype(buffers, "fsdp_config.mixed_precision.buffer_dtype")

    def fill(parts: Sequence[torch.nn.Module], *, gated: bool = True) -> None:
        source.fill(parts, names, trainable=settings.trainable)
        model.fused.add(parts, gated=gated)
        if buffer_dtype is not None:
            _cast_buffers(parts, buffer_dtype)

    units = _units(pretrained.checkpoint_layers(module), int(setting(cfg, "wrap_policy.min_num_params", 0)))
    inside: set[int] = set()
    for unit in units:
        parts = [part for layer in unit for part in layer.modules()]
        inside |= {id(part) for part in parts}
        fill(parts, gated=tensor is None)
        for layer in unit if tensor is not None else ():
            tensor.apply(places[id(layer)], layer)
        for holder in expert.cut(parts) if expert is not None else ():
            fully_shard(holder, **free, **expert.options(options))
        fully_shard(unit, **free, **options)
    fill([part for part in module.modules() if id(part) not in inside])
    # Not freed after the forward pass: the backward pass begins with it.
    fully_shard(model.head, reshard_after_forward=False, **options)
    # A loss is divided by global counts already: gradients are summed over ranks, not averaged.
    for part in sharded_modules(model.head):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    if setting(cfg, "forward_prefetch", False):
        for current, following in pairwise(unit[0] for unit in units):
            current.set_modules_to_forward_prefetch([following])  # type: ignore[operator]


def _unit_options(layout: Layout, settings: ModelSettings) -> dict[str, Any]:
    """Arguments of `fully_shard`; gradients are added over ranks in float32 unless `fsdp_config` says otherwise."""
    key = "mixed_precision.reduce_dtype"
    reduce = named_dtype(setting(settings.fsdp, key, "float32"), f"fsdp_config.{key}")
    compute = None if settings.compute_dtype == torch.float32 else settings.compute_dtype
    offload = OffloadPolicy()
    if settings.streams:
        offload = CPUOffloadPolicy(pin_memory=not platform_of(settings.device).on_host)
    mixed = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    return {"mesh": layout.mesh, "mp_policy": mixed, "offload_policy": offload}


def _units(layers: Sequence[torch.nn.Module], least: int) -> list[list[torch.nn.Module]]:
    """Layers, neighbours merged until a unit has `least` parameters."""
    units: list[list[torch.nn.Module]] = []
    size = 0
    for layer in layers:
        if units and size < least:
            units[-1].append(layer)
        else:
            units.append([layer])
            size = 0
        size += sum(p.numel() for p in layer.parameters())
    return units


def _cast_buffers(parts: Iterable[torch.nn.Module], dtype: torch.dtype) -> None:
    for part in parts:
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)
