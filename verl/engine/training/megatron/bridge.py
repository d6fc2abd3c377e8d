"""Hugging Face weights to and from megatron-core models, by mbridge's tables of names.

A bridge of mbridge knows a family's configuration and names for layers of TransformerEngine. What is added here: layers
of megatron-core's own where TransformerEngine is not installed, whose norms and experts have other names; settings of
transformers 5; files that every rank reads for itself.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mbridge.core.bridge import _MODEL_REGISTRY
from mbridge.core.llm_bridge import LLMBridge
from megatron.core import parallel_state
from megatron.core.models import backends
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe import moe_utils
from safetensors import safe_open

from verl.engine.training.megatron import has_transformer_engine
from verl.engine.training.megatron.vision import HF_TEXT, HF_TOWER, TOWER, VisionFiles
from verl.engine.training.weight_files import reading
from verl.errors import UserError
from verl.models.inputs import sees_images

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_TEXT_FAMILIES = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
"""The family of the language model of models that see images."""

FUSED_KERNELS = has_transformer_engine()
"""TransformerEngine is installed: its layers, fused operations and packed sequences are used."""

if not FUSED_KERNELS and not hasattr(moe_utils, "te_general_gemm"):
    # megatron-core 0.16 asks whether it is None, and defines it only with TransformerEngine.
    moe_utils.te_general_gemm = None

_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
_EXPERT_WEIGHT = re.compile(r"(\.mlp\.experts\.linear_fc[12]\.weight)(\d+)$")

# Without TransformerEngine these kernels are not there.
_PLAIN = {
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "sequence_parallel": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
}


class _HostMixin:
    """What this package changes in a bridge of mbridge; goes before it in the order of resolution."""

    #: "lm", or another head, whose layer from hidden states to one number is `score` in Hugging Face files.
    head = "lm"
    #: The model sees images: the Hugging Face model without weights is `outline`, `hf_config` that of its language
    # model.
    sees = False
    outline: Any = None

    def files(self, directory: Path) -> WeightFiles | VisionFiles:
        """What reads the weights in a Hugging Face directory."""
        return VisionFiles(directory, self.outline) if self.sees else WeightFiles(directory)

    def _adjust_mapping_for_shared_weights(self: Any) -> None:
        # mbridge writes into the table of the class, which outlives this model.
        self._DIRECT_MAPPING = dict(self._DIRECT_MAPPING)
        super()._adjust_mapping_for_shared_weights()  # type: ignore[misc]

    def _build_base_config(self: Any, *args: Any, **settings: Any) -> Any:
        if not FUSED_KERNELS:
            settings |= _PLAIN
        settings["fp16"] = self.dtype == torch.float16
        if self.sees:
            settings |= {"mrope_section": list(_rope(self.hf_config)["mrope_section"]), "apply_rope_fusion": False}
        if settings.get("moe_router_score_function") == "sigmoid":
            settings |= _of_routers(self.hf_config)
        if "kv_lora_rank" in settings:
            del settings["max_position_embeddings"]  # an older name
            settings |= _of_latent_attention(_rope(self.hf_config))
        if "moe_router_pre_softmax" in settings and hasattr(self.hf_config, "norm_topk_prob"):
            # Weights of the chosen experts that sum to 1 are a softmax over these alone.
            settings["moe_router_pre_softmax"] = not self.hf_config.norm_topk_prob
        return super()._build_base_config(*args, **settings)  # type: ignore[misc]

    def _model_provider(self: Any, callbacks: Any) -> Any:
        # DeepSeek's pads no vocabulary, and differs otherwise in its prediction of several tokens, which is not built.
        if self.config.multi_latent_attention:
            return LLMBridge._model_provider(self, callbacks)
        return super()._model_provider(callbacks)  # type: ignore[misc]

    def _get_transformer_layer_spec(self: Any, vp_stage: int | None = None) -> Any:
        self.has_vp_stage = True
        return get_gpt_decoder_block_spec(self.config, use_transformer_engine=FUSED_KERNELS, vp_stage=vp_stage)

    def _get_gptmodel_args(self: Any) -> dict[str, Any]:
        arguments = super()._get_gptmodel_args()  # type: ignore[misc]
        rope = _rope(self.hf_config)
        kind = rope.get("rope_type", "default")
        if self.sees:
            arguments["position_embedding_type"] = "mrope"
        if self.config.multi_latent_attention:
            return arguments  # the scaling is in its configuration
        if kind == "llama3":
            arguments |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        elif kind not in ("default", "linear"):
            raise UserError(f"strategy=megatron: rotary positions of type {kind} are not here; use strategy=fsdp2")
        return arguments

    def _weight_name_mapping_mcore_local_to_global(self: Any, model: Any, consider_ep: bool = True) -> dict[str, str]:
        names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)  # type: ignore[misc]
        first = 0
        if consider_ep and self.mpu.ep_size > 1:
            first = self.config.num_moe_experts // self.mpu.ep_size * self.mpu.ep_rank
        return {local: _numbered(self._fused_name(name), first) for local, name in names.items()}

    def _weight_name_mapping_mcore_to_hf(self: Any, name: str) -> list[str]:
        if self.head != "lm" and name.startswith("output_layer."):
            return [name.replace("output_layer.", "score.")]
        if name.startswith(TOWER):
            return [name.replace(TOWER, HF_TOWER, 1)]
        names = super()._weight_name_mapping_mcore_to_hf(name)  # type: ignore[misc]
        return [re.sub(r"^model\.", HF_TEXT, n) for n in names] if self.sees else names

    def _weight_to_hf_format(self: Any, name: str, weights: torch.Tensor) -> Any:
        if name.startswith(TOWER) or (self.head != "lm" and name.startswith("output_layer.")):
            return self._weight_name_mapping_mcore_to_hf(name), [weights]
        return super()._weight_to_hf_format(name, weights)  # type: ignore[misc]

    def _weight_split_across_tp(self: Any, name: str, weights: torch.Tensor, parameter: Any, size: int) -> Any:
        if name.startswith(TOWER):  # its layers have names of megatron-core's
            return [weights] * size
        return super()._weight_split_across_tp(name, weights, parameter, size)  # type: ignore[misc]

    def _fused_name(self: Any, name: str) -> str:
        """The name that TransformerEngine's layers have for a weight of megatron-core's own."""
        name = _EXPERT.sub(r".mlp.experts.\2.weight\1", name)
        if "input_layernorm.weight" not in self._ATTENTION_MAPPING:
            name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
        if self.config.multi_latent_attention:
            name = re.sub(r"\.(q|kv)_layernorm\.weight$", r".linear_\1_up_proj.layer_norm_weight", name)
        if name.endswith(".pre_mlp_layernorm.weight") and "pre_mlp_layernorm" not in self._MLP_MAPPING:
            name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
        return name


def _rope(hf_config: PreTrainedConfig) -> dict[str, Any]:
    return dict(getattr(hf_config.get_text_config(), "rope_parameters", None) or {})


def _of_routers(hf_config: PreTrainedConfig) -> dict[str, Any]:
    """Routers whose scores are sigmoids: groups of experts; the correction of the scores stays, as in transformers."""
    if not getattr(hf_config, "norm_topk_prob", True):
        raise UserError("strategy=megatron: weights of experts are normalized (norm_topk_prob); use strategy=fsdp2")
    groups, chosen, experts = hf_config.n_group or 1, hf_config.topk_group or 1, hf_config.num_experts_per_tok
    if groups > 1 and experts != 2 * chosen:
        raise UserError("strategy=megatron: num_experts_per_tok must be twice topk_group; use strategy=fsdp2")
    limits = {"moe_router_num_groups": groups, "moe_router_group_topk": chosen} if groups > 1 else {}
    return {"moe_router_bias_update_rate": 0.0, "mtp_num_layers": None} | limits


def _of_latent_attention(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions of DeepSeek's attention. UserError for those that megatron-core's layer does not have."""
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        raise UserError(f"strategy=megatron: rotary positions of type {kind} are not here; use strategy=fsdp2")
    settings: dict[str, Any] = {"mscale": 1.0, "mscale_all_dim": 0.0, "rotary_scaling_factor": rope.get("factor", 1.0)}
    names = (*settings, "beta_fast", "beta_slow", "original_max_position_embeddings")
    settings |= {name: rope[name] for name in names if name in rope}
    return settings | {"rope_type": "rope" if kind == "default" else kind}


def _numbered(name: str, first: int) -> str:
    """The name of a weight, its local expert's number turned into that among all experts."""
    return _EXPERT_WEIGHT.sub(lambda match: f"{match[1]}{int(match[2]) + first}", name)


def bridge_of(
    hf_config: PreTrainedConfig, dtype: torch.dtype, settings: dict[str, Any], divisor: int, head: str
) -> Any:
    """mbridge's bridge of a model family, for this process's parallel groups.

    settings: of megatron-core's transformer configuration. divisor: what the padded vocabulary is a multiple of.
    UserError for a family that mbridge does not know, and for settings that megatron-core refuses.
    """
    family, text = hf_config.model_type, hf_config.get_text_config()
    if sees_images(hf_config):
        family = _TEXT_FAMILIES.get(family, f"{family}, which sees images,")
        text.tie_word_embeddings = hf_config.tie_word_embeddings
    if family not in _MODEL_REGISTRY:
        families = ", ".join(sorted(_MODEL_REGISTRY))
        raise UserError(f"strategy=megatron: model type {family} is not here (mbridge has {families}); use fsdp2")
    plain = inspect.signature(backends.DotProductAttention).parameters
    if getattr(text, "kv_lora_rank", None) and not FUSED_KERNELS and "k_channels" not in plain:
        raise UserError(
            f"strategy=megatron: {family} needs TransformerEngine, which is not installed; use strategy=fsdp2"
        )
    for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):  # where mbridge looks for them
        setattr(text, name, _rope(text).get(name, getattr(text, name, default)))
    attributes = {"sees": text is not hf_config}
    kind = type(f"Host{_MODEL_REGISTRY[family].__name__}", (_HostMixin, _MODEL_REGISTRY[family]), attributes)
    bridge = kind(text, dtype=dtype, make_vocab_size_divisible_by=divisor)
    bridge.head = head
    try:
        bridge.set_extra_args(**settings)
    except (TypeError, ValueError, AssertionError, KeyError) as error:  # KeyError: a name of no enumeration
        raise UserError(f"megatron.override_transformer_config: megatron-core refuses it: {error}") from error
    return bridge


WEIGHT_FILES = ("model.safetensors.index.json", "model.safetensors")


class WeightFiles:
    """The safetensors files of a Hugging Face directory, read one tensor at a time. UserError if there are none."""

    def __init__(self, directory: Path):
        index, single = (directory / name for name in WEIGHT_FILES)
        if index.is_file():
            with reading(index):
                self._files = {n: directory / f for n, f in json.loads(index.read_text("utf-8"))["weight_map"].items()}
        elif single.is_file():
            with reading(single), safe_open(single, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), single)
        else:
            raise UserError(f"{directory}: strategy=megatron reads safetensors files, and there are none")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise UserError(f"{next(iter(self._files.values())).parent}: weights are missing, for example {name}")
        with reading(self._files[name]), safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name)


@torch.no_grad()
def load(bridge: Any, chunks: Sequence[Any], files: WeightFiles) -> None:
    """Give the model's chunks of layers this rank's share of the weights in `files`. Each rank reads for itself. A
    score that the files lack starts at 0."""
    for chunk in chunks:
        state = chunk.state_dict()
        for local, name in bridge._weight_name_mapping_mcore_local_to_global(chunk).items():
            parameter = state[local]
            hf_names = bridge._weight_name_mapping_mcore_to_hf(name)
            if hf_names[0].startswith("score."):
                parameter.copy_(files.read(hf_names[0]) if hf_names[0] in files else torch.zeros_like(parameter))
                continue
            tensors = [files.read(hf_name) for hf_name in hf_names]
            full = bridge._weight_to_mcore_format(name, tensors)
            size, rank = bridge.mpu.tp_size, bridge.mpu.tp_rank
            if ".mlp.experts.linear_fc" in name:
                size, rank = bridge.mpu.etp_size, bridge.mpu.etp_rank
            share = bridge._weight_split_across_tp(name, full, parameter, size)[rank]
            parameter.copy_(share)


def export(bridge: Any, chunks: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors under Hugging Face names, one after the other, on every rank. Collective."""
    seen = set()  # the last pipeline stage has the embedding too where it is tied to the output layer
    with _without_adapters(chunks):
        for name, tensor in bridge.export_weights(list(chunks)):
            if name not in seen:
                yield name, tensor.detach()
            seen.add(name)


@contextmanager
def _without_adapters(chunks: Sequence[Any]) -> Iterator[None]:
    """In this block the chunks have the tensors that mbridge knows alone."""
    hidden = [(chunk, chunk._modules.pop("adapters", None)) for chunk in chunks]
    try:
        yield
    finally:
        for chunk, adapters in hidden:
            if adapters is not None:
                chunk.adapters = adapters


def is_last_stage() -> bool:
    """This rank has the last layers and computes outputs."""
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))
