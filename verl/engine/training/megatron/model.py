"""Building megatron-core's model of a Hugging Face directory, moving it between memories, writing it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config, unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from verl.config.schema.base import setting
from verl.engine.training.lora import LoraSettings
from verl.engine.training.megatron import bridge as bridges
from verl.engine.training.megatron import mindspeed, vision
from verl.engine.training.megatron.adapter import MegatronAdapter
from verl.engine.training.megatron.vision import VisionTower
from verl.engine.training.process_group import all_gather_json, on_all_ranks, this_rank
from verl.engine.training.weight_files import FILE_BYTES, describe, write_file
from verl.errors import UserError
from verl.models.inputs import special_token_ids
from verl.models.pretrained import build_model, load_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(slots=True)
class MegatronModel:
    """A rank's part of the model: `chunks` of layers, wrapped where it is trained; `outline` is the Hugging Face model
    without weights, for what is written beside them."""

    bridge: Any
    chunks: list[Any]
    outline: Any
    dtype: torch.dtype
    vocabulary: int
    tied: bool
    adapter: MegatronAdapter | None = None
    tower: VisionTower | None = None

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors under Hugging Face names on every rank, the adapter merged. Collective."""
        if self.adapter is not None:
            tensors = self.adapter.merged()
        else:
            tensors = bridges.export(self.bridge, [unwrap_model(chunk) for chunk in self.chunks])
        return vision.stored(self.outline, tensors) if self.bridge.sees else tensors

    @property
    def barred(self) -> list[int]:
        """Tokens without probability."""
        return special_token_ids(self.outline.config)


def build(
    path: str | Path,
    model_cfg: Any,
    megatron: Any,
    head: str,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    trainable: bool,
    *,
    freezes_vision: bool = False,
) -> MegatronModel:
    """This rank's part of the model at `path`, its weights loaded. UserError for what is not supported."""
    hf_config = on_all_ranks(lambda: load_config(path, model_cfg))
    model_parallel_cuda_manual_seed(seed)
    settings = _transformer_settings(model_cfg, megatron, hf_config)
    bridge = bridges.bridge_of(
        hf_config, dtype, settings, int(setting(megatron, "tensor_model_parallel_size", 1)), head
    )
    plain = bridge.get_model(
        wrap_with_ddp=False,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        post_model_creation_callbacks=[_prepare(head, hf_config)],
    )
    outline, tower = build_model(path, model_cfg, head=head), None
    if bridge.sees:
        bridge.outline = outline
        tower = on_all_ranks(lambda: _tower(outline, unwrap_model(plain[0]), dtype, device))
    for chunk in plain:
        chunk.to(device).requires_grad_(trainable)
    if tower is not None and freezes_vision:
        tower.weights.requires_grad_(False)
    tied = bool(getattr(hf_config, "tie_word_embeddings", False)) and head == "lm"
    vocabulary = hf_config.get_text_config().vocab_size
    model = MegatronModel(bridge, plain, outline, dtype, vocabulary, tied, tower=tower)
    if setting(megatron, "use_dist_checkpointing", False):
        load_distributed(model, Path(str(setting(megatron, "dist_checkpointing_path"))))
    else:
        on_all_ranks(lambda: load(model, Path(path)))
    lora = LoraSettings.of(model_cfg, str(path)) if trainable else None
    if lora is not None:
        model.adapter = MegatronAdapter(outline, lora, seed, bridge, plain, dtype)
    if trainable:
        model.chunks = [_wrapped(chunk, megatron, number) for number, chunk in enumerate(plain)]
    return model


def _tower(outline: Any, chunk: Any, dtype: torch.dtype, device: torch.device) -> VisionTower | None:
    return VisionTower(outline, chunk, dtype, device) if chunk.pre_process else None


def _transformer_settings(model_cfg: Any, megatron: Any, hf_config: PreTrainedConfig) -> dict[str, Any]:
    """megatron-core's settings: recomputing, then what the user overrides; UserError for names that it does not
    have."""
    from megatron.core.transformer import MLATransformerConfig

    settings: dict[str, Any] = {"calculate_per_token_loss": True, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    if not bridges.FUSED_KERNELS or setting(megatron, "tensor_model_parallel_size", 1) == 1:
        settings["sequence_parallel"] = False
    elif setting(megatron, "sequence_parallel") is not None:
        settings["sequence_parallel"] = bool(megatron["sequence_parallel"])
    overrides = {k: v for k, v in dict(setting(megatron, "override_transformer_config") or {}).items() if v is not None}
    default = "full" if setting(model_cfg, "enable_gradient_checkpointing") is not False else None
    if overrides.get("recompute_granularity", default) == "full":
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    unknown = set(overrides) - {f.name for f in fields(MLATransformerConfig)}
    if mindspeed.is_installed():
        overrides = {name: value for name, value in overrides.items() if name not in unknown}
    elif unknown:
        names = ", ".join(sorted(unknown))
        raise UserError(f"megatron.override_transformer_config: megatron-core has no setting {names}")
    return settings | overrides


def _prepare(head: str, hf_config: PreTrainedConfig) -> Any:
    """Callback on each chunk that is built: the last one gives its hidden states, for outputs are made elsewhere."""

    padding = getattr(hf_config.get_text_config(), "pad_token_id", None)

    def prepare(model: Any, *, pre_process: bool, post_process: bool, config: Any, **_: Any) -> None:
        if pre_process and padding is not None:
            _keep_padding(model.embedding.word_embeddings, padding, config.sequence_parallel)
        if head != "lm":
            model.share_embeddings_and_output_weights = False
        if hf_config.model_type.startswith("qwen3_vl"):
            vision.interleave(model.rotary_pos_emb, config.mrope_section)
        if not post_process:
            return
        if head != "lm":
            model.output_layer = torch.nn.Linear(config.hidden_size, 1, bias=True, dtype=config.params_dtype)
        gather = gather_from_sequence_parallel_region if config.sequence_parallel else None
        # Every rank has the whole gradient of what it gathers: the outputs add it up over their vocabulary.
        model.output_layer.forward = lambda hidden, **_: (gather(hidden, False) if gather else hidden, None)

    return prepare


def _keep_padding(embedding: Any, padding: int, sequence_parallel: bool) -> None:
    """As in transformers, the embedding of the padding token is not trained: where it is zero, as in a fresh model, the
    first normalisation would multiply its gradient by a thousand."""
    lookup = embedding.forward

    def forward(ids: torch.Tensor) -> torch.Tensor:
        states, is_padding = lookup(ids), ids == padding
        if sequence_parallel:  # states are of this rank's part of the sequence, [S / ranks, B, H]
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            is_padding = is_padding.t().chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        return torch.where(is_padding[..., None], states.detach(), states)

    embedding.forward = forward


def _wrapped(chunk: Any, megatron: Any, number: int) -> Any:
    overrides = dict(setting(megatron, "override_ddp_config") or {})
    settings = {
        "use_distributed_optimizer": bool(setting(megatron, "use_distributed_optimizer", True)),
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": False,
        **overrides,
    }
    if unknown := ", ".join(sorted(set(settings) - {f.name for f in fields(DistributedDataParallelConfig)})):
        raise UserError(f"megatron.override_ddp_config: megatron-core has no setting {unknown}")
    config = get_model_config(chunk)
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(**settings), chunk, disable_bucketing=number > 0
    )


def load(model: MegatronModel, directory: Path) -> None:
    """Read a Hugging Face directory, in place."""
    bridges.load(model.bridge, [unwrap_model(c) for c in model.chunks], model.bridge.files(directory))


@torch.no_grad()
def load_distributed(model: MegatronModel, directory: Path) -> None:
    """Read the weights of megatron-core's distributed checkpoint, whatever the layout that wrote it; a score starts at
    0. Collective. UserError for a checkpoint of another model, or none."""
    chunks, state = [unwrap_model(chunk) for chunk in model.chunks], {}
    scores = model.bridge.head != "lm"
    for number, chunk in enumerate(chunks):
        entries = chunk.sharded_state_dict().items()
        state[str(number)] = {n: e for n, e in entries if not (scores and n.startswith("output_layer."))}
        if scores and chunk.post_process:
            torch._foreach_zero_(list(chunk.output_layer.parameters()))
    try:
        loaded = dist_checkpointing.load(state, str(directory))
    except (KeyError, CheckpointException, CheckpointingException) as error:
        raise UserError(f"megatron.dist_checkpointing_path={directory}: {str(error)[:300]}") from error
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[str(number)], strict=False)  # what is missing was refused


def move_weights(chunks: Sequence[Any], device: torch.device) -> None:
    """The weights to a memory. Parameters stay the same objects; buffers that they are views of move as a whole."""
    for chunk in chunks:
        buffers = [*getattr(chunk, "buffers", [])] if isinstance(chunk, DistributedDataParallel) else []
        buffers += getattr(chunk, "expert_parallel_buffers", []) if buffers else []
        whole = {b.param_data.untyped_storage().data_ptr(): b for b in buffers if b.param_data is not None}
        views = []
        for parameter in chunk.parameters():
            buffer = whole.get(parameter.data.untyped_storage().data_ptr())
            if buffer is None:
                parameter.data = parameter.data.to(device)
            else:
                views.append((parameter, buffer, parameter.data.storage_offset()))
        for buffer in whole.values():
            buffer.param_data = buffer.param_data.to(device)
        for parameter, buffer, offset in views:
            parameter.data = buffer.param_data[offset : offset + parameter.numel()].view(parameter.shape)


@torch.no_grad()
def save(model: MegatronModel, directory: Path, serving_dtype: str) -> None:
    """Write a Hugging Face directory. Every rank sees every tensor; they write files in turn. Collective."""
    on_all_ranks(lambda: directory.mkdir(parents=True, exist_ok=True))
    ranks, files, size = dist.get_world_size(), 0, 0
    mine: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}

    def close() -> None:
        nonlocal files, size, mine
        file = f"model-{files + 1:05d}.safetensors"
        tensors, mine = mine, {}
        on_all_ranks(lambda: write_file(tensors, directory / file))
        weight_map.update(dict.fromkeys(tensors, file))
        files, size = files + 1, 0

    for name, tensor in model.exported():
        if size and size + tensor.numel() * tensor.element_size() > FILE_BYTES:
            close()
        size += tensor.numel() * tensor.element_size()
        if this_rank() == files % ranks:
            mine[name] = tensor.cpu().contiguous().clone()
    close()
    index = all_gather_json(weight_map)

    def finish() -> None:
        if this_rank():
            return
        if files == 1:
            (directory / "model-00001.safetensors").rename(directory / "model.safetensors")
        describe(model.outline, directory, serving_dtype, index, files)

    on_all_ranks(finish)
