"""Decoder layers by the processor's compiled kernels against the same layers as transformers has them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_config
from verl.engine.rollout.base import Completion, SamplingParams
from verl.engine.rollout.native.decoder_layers import SamplerLayers
from verl.engine.rollout.native.engine import NativeEngine
from verl.models.fused_layers import FusedLayers
from verl.platform import cpu_kernels


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv(cpu_kernels.SWITCH, "auto")
    if cpu_kernels.state().library is None:
        pytest.skip(cpu_kernels.state().text)
    return monkeypatch


def built(arch: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(arch, **settings), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.08)
    return model


def sample(model: Any, dtype: str) -> tuple[int, list[Completion]]:
    """How many layers were replaced; three responses to each of three prompts, in passes of 33 tokens."""
    engine = NativeEngine(
        model, eos_token_ids=[], max_model_len=96, max_num_seqs=6, dtype=dtype, max_num_batched_tokens=33
    )

    async def run() -> list[Completion]:
        calls = [
            engine.generate(
                [7 + i] * length, SamplingParams(seed=j, max_tokens=25), request_id=f"{i}.{j}", group=str(i)
            )
            for i, length in enumerate((5, 45, 1))
            for j in range(3)
        ]
        return await asyncio.gather(*calls)

    layers = model.model.layers
    return sum(layer in engine._runner._fused.forwards for layer in layers), asyncio.run(run())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("qwen2", {}),  # biases of the products
        ("qwen3", {}),  # norms of heads
        (
            "qwen3",
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True},
        ),
        ("gemma", {}),  # offsets of norms, another gate
        ("qwen3_moe", {}),
        ("granite", {"residual_multiplier": 1.0}),
    ],
)
def test_a_replaced_layer_gives_what_it_gave(
    arch: str, settings: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(arch, **settings)
    replaced, ours = sample(model, dtype)
    assert replaced == 2
    monkeypatch.setattr(SamplerLayers, "forward_for", FusedLayers.forward_for)
    kept, theirs = sample(model, dtype)
    assert kept == 0
    for response, expected in zip(ours, theirs, strict=True):
        equal = np.cumprod(response.token_ids == expected.token_ids).sum()  # rounding may tip a draw in bfloat16
        assert equal == 25 or dtype == "bfloat16"
        tolerance = 1e-5 if dtype == "float32" else 0.02
        np.testing.assert_allclose(response.log_probs[:equal], expected.log_probs[:equal], atol=tolerance)


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("granite", {"residual_multiplier": 0.5}),
        ("gemma2", {}),  # two norms more
        ("olmo2", {}),  # norms after attention and MLP
        ("cohere", {}),  # attention and MLP side by side
        ("phi", {}),  # rotates a part of a head
        ("diffllama", {}),  # attends twice
    ],
)
def test_other_layers_keep_their_code(arch: str, settings: dict[str, Any]) -> None:
    assert sample(built(arch, **settings), "float32")[0] == 0


def test_parts_that_only_look_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of the usual names that computes something else is seen by what it gives."""
    model = built("qwen3")
    original = type(model.model.layers[0]).forward
    monkeypatch.setattr(
        type(model.model.layers[0]), "forward", lambda layer, x, **named: original(layer, x, **named) + 0.01 * x
    )
    assert sample(model, "float32")[0] == 0
