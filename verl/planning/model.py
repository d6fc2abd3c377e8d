"""Parameters, cached numbers and products of a language model, from its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.model_facts import LINEAR_ATTENTION
from verl.errors import UserError

_UNGATED = frozenset({"gpt_neox", "opt", "phi", "starcoder2", "nemotron"})
"""Types whose MLP has two matrices; those of the others have a gate besides."""
_QUERY_BIAS = frozenset({"qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"})
_QUERY_NORM = frozenset({"qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"})

_OUTPUT_GATE = ("qwen3_next", "qwen3_5")
"""Types whose attention has a gate for its output."""


class UnknownModel(UserError):
    """config.json does not say what a plan needs."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a model.

    Parameters of all layers together: embedding, head (0 where it shares the embedding's), attention, mlp (dense MLPs
    and shared experts), experts (all of them), active_experts (those that one token goes to), vision, other (norms,
    routers).

    layers, hidden, vocabulary, heads   as in config.json; attending: layers that attend
    query      numbers of a token's queries in a layer: heads × width
    cached     numbers of a token's keys and values that a sampler keeps in a layer
    unpacked   the same as attention reads them in training (all heads of compressed keys)
    pair       FLOPs of one layer for a pair of tokens in a forward pass
    state      numbers of a sequence's state in all layers of linear attention
    window     tokens that attention looks back in layers with a window, None for all; windowed: how many such layers
    used       intermediate numbers of a token in a layer, of the experts those chosen
    chosen, expert_count   experts of a token, and of a layer; 0 for a dense model
    """

    name: str
    embedding: int
    head: int
    attention: int
    mlp: int
    experts: int
    active_experts: int
    vision: int
    other: int
    layers: int
    attending: int
    state: int
    hidden: int
    vocabulary: int
    heads: int
    query: int
    cached: int
    unpacked: int
    pair: float
    window: int | None
    windowed: int
    used: int
    chosen: int
    expert_count: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.trunk + self.embedding + self.head + self.vision

    @property
    def trunk(self) -> int:
        """Parameters of the layers."""
        return self.attention + self.mlp + self.experts + self.other

    @property
    def active(self) -> int:
        """Parameters that a token uses, embeddings included."""
        return self.total - self.experts + self.active_experts - self.vision

    @property
    def layer(self) -> float:
        """Parameters of one layer, as a mean."""
        return self.trunk / self.layers

    @property
    def output(self) -> int:
        """Weights of the product that gives the logits."""
        return self.hidden * self.vocabulary

    def pairs(self, length: float) -> float:
        """FLOPs of attention in all layers, for a token of a causal sequence of that length, as a mean."""
        full = self.pair * (self.attending - self.windowed) * length / 2
        return full + self.pair * self.windowed * min(length / 2, self.window or length)


class _Reader:
    """Numbers of a mapping under any of several names; UnknownModel where a needed one is absent."""

    def __init__(self, config: Mapping[str, Any]):
        self._config = config

    def __call__(self, *names: str, default: int | None = None) -> int:
        values = (self._config.get(name) for name in names)
        value = next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), default)
        if value is None:
            raise UnknownModel(f"config.json has no {names[0]}, without which sizes cannot be computed")
        return value


def model_size(config: Mapping[str, Any]) -> ModelSize:
    """Sizes of the model that a config.json describes. UnknownModel where it lacks a number that is needed."""
    text = config.get("text_config") or config.get("llm_config") or config
    read, kind = _Reader(text), str(text.get("model_type", ""))
    hidden, vocabulary = read("hidden_size", "n_embd"), read("vocab_size")
    layers, heads = read("num_hidden_layers", "n_layer"), read("num_attention_heads", "n_head")
    attention, shapes = _attention(text, read, kind, hidden, heads)
    mlp, experts, active, routers = _mlps(text, read, kind, hidden, layers)
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", kind.startswith("gemma"))))
    kinds = list(text.get("layer_types") or ())
    if not kinds and (interval := read("full_attention_interval", default=0)):
        kinds = [LINEAR_ATTENTION if number % interval else "full_attention" for number in range(1, layers + 1)]
    linear = kinds.count(LINEAR_ATTENTION)
    linear_count, state = _linear_attention(read, hidden) if linear else (0, 0)
    attending = sum(k not in (LINEAR_ATTENTION, "conv") for k in kinds) or layers
    windowed = kinds.count("sliding_attention")
    if not kinds and text.get("sliding_window") and text.get("use_sliding_window", True):
        windowed = layers
    chosen = read("num_experts_per_tok", "moe_topk", default=0)
    return ModelSize(
        name=str(config.get("model_type", kind)),
        embedding=vocabulary * hidden,
        head=0 if tied else vocabulary * hidden,
        attention=attention * layers + linear * (linear_count - attention if linear_count else 0),
        mlp=mlp,
        experts=experts,
        active_experts=active,
        vision=_vision(config.get("vision_config") or {}, hidden),
        other=routers + (2 * layers + 1) * hidden,
        layers=layers,
        attending=attending,
        state=linear * state,
        hidden=hidden,
        vocabulary=vocabulary,
        heads=heads,
        **shapes,
        window=read("sliding_window", default=0) or None,
        windowed=windowed,
        used=(mlp + active) // ((2 if kind in _UNGATED else 3) * hidden * layers),
        chosen=chosen if experts else 0,
        expert_count=_expert_count(read) if experts else 0,
    )


def _attention(
    text: Mapping[str, Any], read: _Reader, kind: str, hidden: int, heads: int
) -> tuple[int, dict[str, Any]]:
    """Parameters of one layer's attention, and the fields of ModelSize that its shapes decide."""
    if (compressed := read("kv_lora_rank", default=0)) > 0:
        nope, rope, value = read("qk_nope_head_dim"), read("qk_rope_head_dim"), read("v_head_dim")
        queries = heads * (nope + rope)
        rank = read("q_lora_rank", default=0)
        count = rank * (hidden + queries + 1) if rank else hidden * queries
        count += hidden * (compressed + rope) + compressed + compressed * heads * (nope + value)
        count += heads * value * hidden
        unpacked = heads * (nope + rope + value)
        pair = 2.0 * heads * (nope + rope + value)
        return count, {"query": queries, "cached": unpacked, "unpacked": unpacked, "pair": pair}
    # transformers' own default of the families with normalised queries, whatever the hidden size
    width = read("head_dim", default=128 if kind in _QUERY_NORM else hidden // heads)
    keys = read("num_key_value_heads", default=heads) * width
    queries = heads * width
    count = hidden * (2 * queries + 2 * keys)
    if kind in _QUERY_BIAS or text.get("attention_bias"):
        count += queries + 2 * keys
    if text.get("attention_bias") and kind in ("llama", "qwen3", "qwen3_moe"):
        count += hidden
    if kind in _QUERY_NORM or text.get("use_qk_norm"):
        count += 2 * width
    if kind.startswith(_OUTPUT_GATE):
        count += hidden * queries + 2 * width
    return count, {"query": queries, "cached": 2 * keys, "unpacked": 2 * keys, "pair": 4.0 * queries}


def _linear_attention(read: _Reader, hidden: int) -> tuple[int, int]:
    """Parameters of one layer of linear attention, and numbers of its state; zeros where no gated delta net is said."""
    heads, width = read("linear_num_value_heads", default=0), read("linear_value_head_dim", default=0)
    key_width = read("linear_key_head_dim", default=0)
    keys, values = read("linear_num_key_heads", default=0) * key_width, heads * width
    if not keys or not values:
        return 0, 0
    count = hidden * (2 * keys + 3 * values + 2 * heads) + 2 * heads + width
    return count + read("linear_conv_kernel_dim", default=4) * (2 * keys + values), values * key_width


def _expert_count(read: _Reader) -> int:
    return read("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", default=0)


def _mlps(text: Mapping[str, Any], read: _Reader, kind: str, hidden: int, layers: int) -> tuple[int, int, int, int]:
    """Parameters of all layers: dense MLPs and shared experts, experts, the experts of one token, routers."""
    count, matrices = _expert_count(read), 2 if kind in _UNGATED else 3
    dense = matrices * hidden * (read("intermediate_size", "n_inner", default=4 * hidden))
    if count <= 1:
        return dense * layers, 0, 0, 0
    width = read("moe_intermediate_size", "intermediate_size")
    plain, step = set(text.get("mlp_only_layers") or ()), read("decoder_sparse_step", default=1)
    plain |= set(range(read("first_k_dense_replace", default=0)))
    plain |= {number for number in range(layers) if (number + 1) % step}
    sparse = layers - len(plain)
    shared = read("n_shared_experts", default=0) * width
    gate = 0
    if extra := read("shared_expert_intermediate_size", default=0):
        shared, gate = extra, hidden
    experts, chosen = matrices * hidden * width, read("num_experts_per_tok", "moe_topk", default=1)
    mlp = dense * len(plain) + matrices * hidden * shared * sparse
    return mlp, experts * count * sparse, experts * chosen * sparse, (count * hidden + gate) * sparse


def _vision(vision: Mapping[str, Any], hidden: int) -> int:
    """Parameters of an image encoder, norms left out; 0 without one."""
    if not vision:
        return 0
    read, gated = _Reader(vision), str(vision.get("model_type")).startswith("qwen2_5_vl")
    width = read("embed_dim", "hidden_size", default=0)
    inner = read("intermediate_size", default=4 * width)
    patch = read("in_channels", "in_chans", "num_channels", default=3) * read("patch_size", default=14) ** 2
    patch *= read("temporal_patch_size", default=1)
    layer = 4 * width * width + (3 if gated else 2) * width * inner + 4 * width + inner * (2 if gated else 1) + width
    merged = width * read("spatial_merge_size", default=1) ** 2
    merger = merged * (merged + read("out_hidden_size", default=hidden))
    mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
    return read("depth", "num_hidden_layers", default=0) * layer + patch * width + merger * mergers
