"""What a model's configuration says of its layers: their sizes, and whether they carry a state along the row.

For the training engine and for the sampler, neither of which imports the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.config.layout import ATTENTION_LAYERS

if TYPE_CHECKING:
    import torch

_NO_ATTENTION = frozenset({"linear_attention", "conv", "moe"})
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


def is_recurrent(module: torch.nn.Module) -> bool:
    """True if some layer carries a state along the row, so that two sequences must not share one."""
    text = module.config.get_text_config()  # type: ignore[operator, union-attr]
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds:
        return bool(kinds - ATTENTION_LAYERS)
    return any(word in type(m).__name__.lower() for m in module.modules() for word in _STATEFUL)
