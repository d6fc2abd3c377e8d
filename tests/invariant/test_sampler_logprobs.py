"""The sampler's log-probs are those of a plain forward pass of the same model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_model
from verl.engine.rollout.base import Completion, SamplingParams
from verl.engine.rollout.native.engine import NativeEngine

PROMPT_LENGTHS = (5, 37, 1, 150)
CASES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"tied": True},
    "llama": {},
    "qwen3_moe": {},
    "mistral": {"sliding_window": 24},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 24, "query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": 24},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 300},
    "olmo2": {},
}


def load(tmp_path: Path, arch: str, **overrides: Any) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    path = tiny_model(tmp_path / arch, arch, scale=8.0, **overrides)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def sample(engine: NativeEngine, prompts: list[list[int]], n: int, **params: Any) -> list[list[Completion]]:
    async def run() -> list[Completion]:
        calls = [
            engine.generate(
                p, SamplingParams(**({"seed": 100 * i + j, "max_tokens": 80, "ignore_eos": True} | params)),
                request_id=f"{i}.{j}", group=str(i),
            )
            for i, p in enumerate(prompts)
            for j in range(n)
        ]  # fmt: skip
        return await asyncio.gather(*calls)

    flat = asyncio.run(run())
    return [flat[i * n : (i + 1) * n] for i in range(len(prompts))]


def make_prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def full_log_probs(
    model: torch.nn.Module, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    logits = model(torch.tensor([prompt + response])).logits.float()[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def worst(
    model: torch.nn.Module, prompts: list[list[int]], groups: list[list[Completion]], temperature: float = 1.0
) -> float:
    return max(
        float((full_log_probs(model, p, c.token_ids.tolist(), temperature) - torch.from_numpy(c.log_probs)).abs().max())
        for p, group in zip(prompts, groups, strict=True)
        for c in group
    )


@pytest.mark.parametrize("arch", list(CASES))
def test_float32_agrees_with_a_full_forward(tmp_path: Path, arch: str) -> None:
    model = load(tmp_path, arch, **CASES[arch])
    prompts = make_prompts()
    engine = NativeEngine(model, eos_token_ids=[258], max_model_len=300, max_num_seqs=64)
    groups = sample(engine, prompts, 3, temperature=0.8)
    assert all(len(c.token_ids) == 80 for group in groups for c in group)
    assert len({tuple(c.token_ids) for c in groups[0]}) == 3
    assert worst(model, prompts, groups, 0.8) <= 1e-4


@pytest.mark.parametrize("arch", list(CASES))
def test_bfloat16_agrees_with_autocast(tmp_path: Path, arch: str) -> None:
    """bf16 rounds differently in any two orders of computation: the mean difference is what must be small."""
    model = load(tmp_path, arch, **CASES[arch])
    prompts = make_prompts()
    engine = NativeEngine(model, eos_token_ids=[], max_model_len=300, dtype="bfloat16")
    groups = sample(engine, prompts, 3)
    if "attn_logit_softcapping" not in CASES[arch]:  # which torch's attention does not have
        model.set_attn_implementation("sdpa")  # type: ignore[operator]
    differences, noise = [], []
    for p, group in zip(prompts, groups, strict=True):
        for c in group:
            response = c.token_ids.tolist()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                rounded = full_log_probs(model, p, response)
            differences.append((rounded - torch.from_numpy(c.log_probs)).abs())
            noise.append((rounded - full_log_probs(model, p, response)).abs())
    # the sampler may be no further from the trainer's bf16 than that is from the truth
    assert float(torch.cat(differences).mean()) <= 1.5 * float(torch.cat(noise).mean())
