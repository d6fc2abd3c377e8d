"""Sizes of models from their config.json: against transformers' own models, and public parameter counts."""

from __future__ import annotations

import pytest
from plan_models import LLAMA_8B, QWEN2_05B, QWEN3_8B, QWEN3_30B

from verl.planning.model import UnknownModel, model_size


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (QWEN2_05B, 494.0e6, 494.0e6),
        (QWEN3_8B, 8.19e9, 8.19e9),
        (LLAMA_8B, 8.03e9, 8.03e9),
        (QWEN3_30B, 30.5e9, 3.35e9),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_public_counts(config, total, active):
    size = model_size(config)
    assert size.total == pytest.approx(total, rel=2e-3)
    assert size.active == pytest.approx(active, rel=2e-3)


TINY = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"intermediate_size": 96, "vocab_size": 256}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
COMPRESSED = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
LINEAR |= {"linear_value_head_dim": 12, "full_attention_interval": 3}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32, "attention_bias": True}),
        ("qwen3_moe", {**EXPERTS, "head_dim": 32, "mlp_only_layers": [0]}),
        ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("glm4_moe", {**ROUTED, "first_k_dense_replace": 1, "head_dim": 32, "use_qk_norm": True}),
        ("deepseek_v3", {**ROUTED, **COMPRESSED, "first_k_dense_replace": 1, "num_key_value_heads": 4}),
        ("starcoder2", {"use_bias": False}),
        ("qwen3_5_text", {**LINEAR, "head_dim": 32}),
        ("qwen3_next", {**LINEAR, **EXPERTS, "head_dim": 32, "shared_expert_intermediate_size": 48}),
    ],
)
def test_as_transformers_builds_it(kind, changes):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **TINY | changes)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    size = model_size(config.to_dict())
    assert size.total == pytest.approx(sum(p.numel() for p in module.parameters()), rel=5e-3)
    if changes.items() >= LINEAR.items():
        assert (size.attending, size.state) == (1, 2 * 4 * 8 * 12)
        assert model_size(TINY | changes | {"model_type": kind}) == size, "as published, without layer_types"


def test_a_vision_tower():
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=TINY, vision_config=vision)
    with torch.device("meta"):
        module = AutoModelForImageTextToText.from_config(config)
    size = model_size(config.to_dict())
    tower = sum(p.numel() for p in module.get_encoder(modality="image").parameters())
    assert size.vision == pytest.approx(tower, rel=0.02)
    assert size.total == pytest.approx(sum(p.numel() for p in module.parameters()), rel=0.02)


def test_what_is_missing_is_named():
    with pytest.raises(UnknownModel, match="num_hidden_layers"):
        model_size({"hidden_size": 64, "vocab_size": 256})
