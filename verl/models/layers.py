"""What a model's configuration says of its layers: their sizes, whether they carry a state along the row, and what a
forward pass through them costs.

For the training engine and for the sampler, neither of which imports the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.config.model_facts import ATTENTION_LAYERS, LINEAR_ATTENTION
from verl.models.recurrent import recurrent_layers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from verl.platform import Platform

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NO_ATTENTION = frozenset({LINEAR_ATTENTION, "conv", "moe"})
_STATEFUL = ("mamba", "deltanet", "rwkv", "recurrent", "shortconv")


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Heads of one layer, and numbers of one head in a key (as in a query) and in a value."""

    heads: int
    kv_heads: int
    key_width: int
    value_width: int

    @property
    def cached(self) -> int:
        """Numbers that the keys and values of one token are."""
        return self.kv_heads * (self.key_width + self.value_width)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """FLOPs of one forward pass: `per_token`, and `per_pair` for each pair of a token and one that it attends to.

    `peak`: FLOP/s of all training devices together, in the data type that the products run in.
    """

    per_token: float
    per_pair: float
    peak: float

    def forward(self, lengths: Iterable[int]) -> float:
        """FLOPs of a forward pass over causal sequences of these lengths."""
        tokens = pairs = 0
        for length in lengths:
            tokens += length
            pairs += length * (length + 1) // 2
        return self.per_token * tokens + self.per_pair * pairs


def expert_count(config: PreTrainedConfig) -> int:
    """Experts of a layer by a model's configuration; 0 for a dense model."""
    text = config.get_text_config()
    return next((count for name in _EXPERTS if isinstance(count := getattr(text, name, None), int)), 0)


def layer_configs(text: Any) -> list[Any]:
    """The configuration as each layer has it, where layers differ in their sizes (Gemma 4); else the one of all."""
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]


def attention_sizes(text: Any) -> list[AttentionSizes]:
    """The sizes of each layer that attends, in order. `text`: `config.get_text_config()`.

    What the configuration says: some architectures repeat keys before attention, or attend twice in a layer.
    """
    count = int(text.num_hidden_layers)
    configs = layer_configs(text)
    configs = configs if len(configs) > 1 else configs * count
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * count
    return [sizes_of(c) for c, kind in zip(configs, kinds, strict=False) if kind not in _NO_ATTENTION]


def sizes_of(c: Any) -> AttentionSizes:
    """The sizes that the configuration of one layer (or of all) names."""
    heads = int(c.num_attention_heads)
    if getattr(c, "kv_lora_rank", None):
        # compressed keys (DeepSeek) are unpacked before attention: every head has its own
        width = int(c.qk_nope_head_dim) + int(c.qk_rope_head_dim)
        return AttentionSizes(heads, heads, width, int(c.v_head_dim))
    kv_heads = 1 if getattr(c, "multi_query", False) else getattr(c, "num_key_value_heads", None)
    width = int(getattr(c, "head_dim", None) or c.hidden_size // heads)
    return AttentionSizes(heads, int(kv_heads or heads), width, int(getattr(c, "v_head_dim", None) or width))


def state_numbers(text: Any) -> int:
    """Numbers of a sequence's state in one layer of linear attention; 0 for a model without such layers."""
    if LINEAR_ATTENTION not in (getattr(text, "layer_types", None) or ()):
        return 0
    heads = int(getattr(text, "linear_num_value_heads", None) or getattr(text, "linear_num_heads", None) or 0)
    key_width = int(getattr(text, "linear_key_head_dim", None) or getattr(text, "linear_head_dim", None) or 0)
    return heads * key_width * int(getattr(text, "linear_value_head_dim", None) or key_width)


def activation_bytes(config: PreTrainedConfig) -> int:
    """Estimate of what a forward pass of a dense or sparse decoder keeps of one token for the backward pass, in bytes.

    Counted on decoder layers under autocast: about 40 bytes per hidden unit, 16 per used intermediate unit and
    24 per attention unit, for each layer (within 20 % of the growth in resident memory).
    """
    text = config.get_text_config()
    return int(text.num_hidden_layers) * max(_layer_bytes(layer) for layer in layer_configs(text))


def _layer_bytes(c: Any) -> int:
    sizes = sizes_of(c)
    attention_units = sizes.heads * sizes.key_width + sizes.cached
    used = getattr(c, "intermediate_size", None) or 4 * c.hidden_size
    used = max(used) if isinstance(used, (list, tuple)) else int(used)
    if getattr(c, "num_experts_per_tok", None):
        used = int(getattr(c, "moe_intermediate_size", None) or used) * int(c.num_experts_per_tok)
    return 40 * int(c.hidden_size) + 16 * used + 24 * attention_units


def is_recurrent(module: torch.nn.Module) -> bool:
    """True if some layer carries a state along the row that no plan hands to it (`verl.models.recurrent`), so that two
    sequences must not share one."""
    text = module.config.get_text_config()  # type: ignore[operator, union-attr]
    kinds = list(getattr(text, "layer_types", None) or ())
    if kinds:
        return sum(kind not in ATTENTION_LAYERS for kind in kinds) > len(recurrent_layers(module))
    return any(word in type(m).__name__.lower() for m in module.modules() for word in _STATEFUL)


def model_cost(module: PreTrainedModel, platform: Platform, dtype: torch.dtype, devices: int = 1) -> ModelCost | None:
    """The cost of a pass on so many devices; None where the devices' peak is not known."""
    peak = platform.peak_flops(dtype)
    if peak is None:
        return None
    config = module.config.get_text_config()
    # scores and weighted values: a product each for every head and pair
    per_pair = sum(2.0 * s.heads * (s.key_width + s.value_width) for s in attention_sizes(config))
    return ModelCost(2.0 * product_weights(module, config), per_pair, peak * devices)


def product_weights(module: PreTrainedModel, config: PreTrainedConfig) -> float:
    """Weights that one token is multiplied with: all matrices but the input embedding; of the experts those chosen.

    A head that shares the embedding's weights counts; a vision tower's weights do not: no text token passes them.
    """
    sees = getattr(module.config, "vision_config", None) is not None
    tower = set(module.get_encoder(modality="image").parameters()) if sees else set()
    embedding = module.get_input_embeddings().weight
    head = module.get_output_embeddings()
    chosen = float(getattr(config, "num_experts_per_tok", None) or 1)
    experts = expert_count(config) or chosen
    total = 0.0
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2 or parameter is embedding or parameter in tower:
            continue
        total += parameter.numel() * (chosen / experts if ".experts." in name else 1.0)
    if head is not None and head.weight is embedding:
        total += embedding.numel()
    return total
