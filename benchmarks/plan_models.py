"""config.json of public models, as far as a plan reads them."""

from __future__ import annotations

from typing import Any


def _dense(kind: str, hidden: int, inner: int, layers: int, heads: int, keys: int, vocabulary: int, **more: Any):
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip(names, (hidden, inner, layers, heads, keys), strict=True))
    return {"model_type": kind, **sizes, "vocab_size": vocabulary, **more}


def _experts(count: int, chosen: int, width: int) -> dict[str, int]:
    return {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": width, "head_dim": 128}


QWEN2_05B = _dense("qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True)
QWEN3_06B = _dense("qwen3", 1024, 3072, 28, 16, 8, 151936, tie_word_embeddings=True, head_dim=128)
QWEN3_4B = _dense("qwen3", 2560, 9728, 36, 32, 8, 151936, tie_word_embeddings=True, head_dim=128)
QWEN3_8B = _dense("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128)
LLAMA_8B = _dense("llama", 4096, 14336, 32, 32, 8, 128256)
QWEN3_30B = _dense("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, **_experts(128, 8, 768))
QWEN3_235B = _dense("qwen3_moe", 4096, 12288, 94, 64, 4, 151936, **_experts(128, 8, 1536))
GLM_AIR = _dense("glm4_moe", 4096, 10944, 46, 96, 8, 151552, n_shared_experts=1, first_k_dense_replace=1)
GLM_AIR |= _experts(128, 8, 1408) | {"attention_bias": True}
BENCHMARK = _dense("qwen3", 512, 1536, 8, 8, 4, 2048, tie_word_embeddings=True, head_dim=64)
"""That of benchmarks/work.py."""

MODELS = {
    "Qwen/Qwen3-0.6B": QWEN3_06B,
    "Qwen/Qwen3-4B-Instruct-2507": QWEN3_4B,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": QWEN3_30B,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": QWEN3_235B,
    "PrimeIntellect/INTELLECT-3": GLM_AIR,
}
