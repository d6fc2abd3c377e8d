"""Building the model of an engine: whole in one process, cut over the ranks of several.

On one rank transformers loads it, and a sampler of this process may read the very tensors that the optimizer writes. On
several it is built without weights, which come from the files one unit after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.config.layout import MODEL_KEYS, Sizes, model_problems
from verl.engine.training.fuse import FusedForwards
from verl.engine.training.heads import OutputHead, head_class
from verl.engine.training.layout import Layout
from verl.engine.training.lora import Adapter, AdapterSource, inject
from verl.engine.training.lora_config import LoraSettings
from verl.engine.training.process_group import on_all_ranks
from verl.engine.training.sharding import Policy, shard
from verl.engine.training.tensor_parallel import TensorParallel
from verl.engine.training.ulysses import SequenceParallel
from verl.engine.training.weight_source import WeightSource, open_source
from verl.errors import UserError
from verl.models import attention, meta_init, positions
from verl.models import load as models
from verl.models.layers import is_recurrent, layer_configs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What decides how the model is built; see `FSDPEngine`."""

    path: str | Path | None
    model_cfg: Any
    role_cfg: Any
    head: str
    device: torch.device
    compute_dtype: torch.dtype
    trainable: bool
    seed: int
    longest: int | None

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
        if settings.path is None:
            raise ValueError("give model_path or module")
        module = models.load_model(settings.path, settings.model_cfg)
        models.allow_training(module, settings.trainable)
    else:
        attention.register()
        models.check_supported(module, settings.path or type(module).__name__)
        module.set_attn_implementation(attention.IMPLEMENTATION)
    positions.settle(module, settings.longest)
    module.to(settings.device)  # type: ignore[arg-type]
    adapter, lora = None, settings.lora
    if lora is not None:
        adapter = inject(module, lora)
        adapter.materialise(AdapterSource(module, lora, settings.seed, None), settings.device)
    return EngineModel(head_class(settings.head)(module.eval()), FusedForwards(module), adapter)


def sharded_model(settings: ModelSettings, layout: Layout) -> EngineModel:
    """This rank's part of the model. Collective; what fails on one rank is raised by all."""
    assert settings.path is not None
    path, model_cfg = settings.path, settings.model_cfg
    module = on_all_ranks(lambda: meta_init.build(path, model_cfg))
    tensor = None if layout.tensor is None else TensorParallel(module, layout.tensor)
    _refuse_sizes(module, layout)
    sequence = _sequence_parallel(module, layout)
    lora, adapter = settings.lora, None
    if lora is not None and tensor is not None:
        raise UserError(
            "model.lora_rank with fsdp_config.tensor_parallel_size > 1 is not here; set one of them to 0, 1"
        )
    source = _source(module, path, model_cfg)
    positions.settle(module, settings.longest)
    if lora is not None:
        adapter = on_all_ranks(lambda: inject(module, lora))
        source = on_all_ranks(lambda: AdapterSource(module, lora, settings.seed, source))
    head, fused = head_class(settings.head)(module), FusedForwards()
    policy = Policy.of(settings.role_cfg, settings.compute_dtype, settings.device)
    options: dict[str, Any] = {"trainable": settings.trainable, "tensor": tensor}
    on_all_ranks(lambda: shard(head, source, layout, policy, fused, **options))
    return EngineModel(head, fused, adapter, tensor, sequence)


def _refuse_sizes(module: PreTrainedModel, layout: Layout) -> None:
    sizes = Sizes(layout.sequence_size, layout.tensor_size)
    for config in layer_configs(module.config.get_text_config()):
        for text, problem in model_problems(sizes, {key: getattr(config, key, None) for key in MODEL_KEYS}):
            raise UserError(f"{text}: {problem}")


def _sequence_parallel(module: PreTrainedModel, layout: Layout) -> SequenceParallel | None:
    if layout.sequence is None:
        return None
    if is_recurrent(module):
        raise UserError(
            f"ulysses_sequence_parallel_size={layout.sequence_size}: {type(module).__name__} carries a "
            "state along the row, so a row cannot be split; set it to 1"
        )
    heads = int(module.config.get_text_config().num_attention_heads) // layout.tensor_size
    return SequenceParallel(layout.sequence, heads)


def _source(module: PreTrainedModel, path: str | Path, model_cfg: Any) -> WeightSource:
    """Weights for the meta parameters; buffers get theirs here."""
    unknown = set(meta_init.fill_buffers(module))
    wanted: dict[str, torch.Tensor] = dict(module.named_parameters())
    kept = {n: b for n, b in module.named_buffers() if n in module.state_dict()}
    # Where a buffer's value is unknown only a model that was loaded whole can tell.
    strange = {n: b for n, b in module.named_buffers() if n in unknown}

    def load() -> dict[str, torch.Tensor]:
        loaded = models.load_model(path, model_cfg)
        return dict(loaded.named_parameters()) | dict(loaded.named_buffers())

    source = open_source(path, module, wanted | kept | strange, load)
    for name, buffer in (kept | strange).items():
        buffer.copy_(source.read(name, buffer))
    return source
