"""What the vLLM tests share: tiny models that its CPU kernels take, and an engine with small limits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests import vllm_processes
from tests.tiny import LINEAR_ATTENTION, tiny_model
from verl.engine.registry import EnginePackageError
from verl.engine.rollout.base import Completion, SamplingParams
from verl.engine.rollout.vllm import ENGINE, launch


def require_vllm() -> None:
    """Skip the module where vLLM cannot be used, saying why."""
    try:
        ENGINE.installed()
    except EnginePackageError as error:
        pytest.skip(f"{error}", allow_module_level=True)


def vllm_model(path: Path, arch: str = "qwen3", *, tied: bool = False) -> Path:
    """A tiny model with attention heads of 32 elements, the smallest that vLLM's CPU kernels have."""
    shape: dict[str, Any] = {"hidden_size": 64, "head_dim": 32}
    if arch in ("qwen2", "gpt2"):
        shape = {"hidden_size": 128} | ({"n_layer": 2, "n_head": 4, "head_dim": 32} if arch == "gpt2" else {})
    if arch == "gemma2":
        shape |= {"sliding_window": 40, "query_pre_attn_scalar": 32}
    if arch == "deepseek_v3":  # latent vectors as wide as vLLM's kernel for them takes; experts as published
        shape |= {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
        shape |= {"qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": 64, "n_group": 2, "topk_group": 1}
        shape |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        shape |= {"first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    if arch == "gpt_oss":
        shape |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    shape |= {name: value for name, value in LINEAR_ATTENTION.get(arch, {}).items() if name not in shape}
    return tiny_model(path, arch, tied=tied, scale=3.0, **shape)


def allow_float32_linear_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """For layers that the tests compute for vLLM (`vllm_linear_attention`); the rest of the check stays."""
    check = launch.check_cpu_model
    monkeypatch.setattr(launch, "check_cpu_model", lambda config, dtype: check(config, "bfloat16"))


def vllm_engine(path: Path, *, forked: bool = True, **more: Any) -> Any:
    """A float32 engine of at most 8 responses of at most 256 tokens. forked: see `vllm_processes`; else vLLM starts its
    processes as for a user."""
    if forked:
        vllm_processes.use()
    from verl.engine.rollout.vllm_engine import VLLMEngine

    limits = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    return VLLMEngine(str(path), **(limits | more))


def sample(engine: Any, prompts: list[list[int]], n: int = 1, **params: Any) -> list[Completion]:
    """n responses to each prompt, seeds 1000·prompt + response; one event loop of its own."""

    async def run() -> list[Completion]:
        calls = []
        for i, prompt in enumerate(prompts):
            for j in range(n):
                sampling = SamplingParams(**({"max_tokens": 24, "seed": 1000 * i + j} | params))
                calls.append(engine.generate(prompt, sampling, request_id=f"{id(prompts)}-{i}.{j}", group=str(i)))
        return await asyncio.gather(*calls)

    return asyncio.run(run())
