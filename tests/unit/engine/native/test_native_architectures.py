"""Architectures that differ from the usual decoder: the sampler against the model alone, before and after an update."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import LINEAR_ATTENTION, tiny_config
from verl.engine.rollout.base import Completion, SamplingParams
from verl.engine.rollout.native.architecture import cache_needs
from verl.engine.rollout.native.cache import AttentionCalls
from verl.engine.rollout.native.engine import NativeEngine
from verl.errors import UserError
from verl.models import pretrained
from verl.models.layers import attention_sizes

MLA = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
SHARED = LAYERS | {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
SMALL_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 264}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    # Queries, keys and values are parts of one product; positions are learned.
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    # Layers of several sizes, and keys that later layers take from earlier ones.
    "gemma4_text": SHARED | SMALL_INPUTS | {"global_head_dim": 32},
    "gemma3n_text": SHARED
    | SMALL_INPUTS
    | {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "laurel_rank": 8},
    # Attends twice in a layer; goes several times through its layers.
    "diffllama": {},
    "hrm_text": {},
    # Values narrower than keys, experts.
    "deepseek_v3": MLA | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "gpt_oss": EXPERTS | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    # Keys repeated before attention; layers with other heads for windows.
    "jetmoe": {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mimo_v2_flash": EXPERTS | LAYERS | {"num_hidden_layers": 4, "v_head_dim": 12},
    # Frequencies from an alpha of its own, under the name of those that follow the length.
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 100.0, "factor": 1.0}
    },
    # Scaled logits; a bias in the head.
    "cohere": {"logit_scale": 0.25},
    "phi": {},
} | LINEAR_ATTENTION

SLOW = ("gemma3n_text", "hrm_text", "mimo_v2_flash", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_next")


def built(arch: str) -> Any:
    torch.manual_seed(0)
    config = tiny_config(arch, **ARCHITECTURES[arch])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    disturb(model, 0)
    return model


@torch.no_grad()
def disturb(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.08)


def sample(engine: NativeEngine, prompts: list[list[int]], temperature: float) -> list[Completion]:
    """Three responses of 9, 22 and 35 tokens to each prompt."""

    async def run() -> list[Completion]:
        calls = []
        for i, prompt in enumerate(prompts):
            for j in range(3):
                how = SamplingParams(seed=9 * i + j, max_tokens=9 + 13 * j, temperature=temperature)
                calls.append(engine.generate(prompt, how, request_id=f"{i}.{j}", group=str(i)))
        return await asyncio.gather(*calls)

    return asyncio.run(run())


@torch.no_grad()
def worst(alone: Any, prompts: list[list[int]], responses: list[Completion]) -> float:
    """The largest difference to the log-probs of the model alone, one sequence at a time."""
    largest = 0.0
    for number, response in enumerate(responses):
        prompt = prompts[number // 3]
        ids = torch.tensor(prompt + response.token_ids.tolist())
        logits = alone(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        theirs = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
        largest = max(largest, float((theirs - torch.from_numpy(response.log_probs)).abs().max()))
    return largest


@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=[pytest.mark.long] * (a in SLOW)) for a in sorted(ARCHITECTURES)]
)
def test_log_probs_are_the_models_own(arch: str) -> None:
    """Prompts longer than a block and a pass, responses that cross blocks and windows, a queue, and a cache too
    small."""
    alone = built(arch)
    model = copy.deepcopy(alone)
    pretrained.check_supported(model, arch)
    prompts = [torch.randint(0, 250, (n,)).tolist() for n in (5, 45, 1)]
    tight = {"max_num_batched_tokens": 33, "cache_tokens": 144}
    for size, temperature, versions in ((tight, 1.0, (1, 2)), ({}, 0.0, (3,))):
        engine = NativeEngine(model, eos_token_ids=[], max_model_len=100, max_num_seqs=5, **size)
        preempted = 0
        for version in versions:
            responses = sample(engine, prompts, temperature)
            assert [len(a.token_ids) for a in responses] == [9, 22, 35] * 3
            assert worst(alone, prompts, responses) <= 1e-4
            preempted += sum(a.num_preempted for a in responses)
            disturb(model, version)
            disturb(alone, version)
            engine.weights_updated(version)
        assert (preempted > 0) == bool(size)
    layout = engine._pool.layout
    stored = layout.blocks * layout.rows * layout.cols
    assert sum(tensor.nbytes for tensor in engine._pool.tensors()) == stored * cache_needs(model, torch.float32).token


@pytest.mark.parametrize(
    ("arch", "more", "why"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of kind conv are no attention"),
        # transformers 5.23 names the kind of its layers.
        (
            "recurrent_gemma",
            {"num_hidden_layers": 3, "lru_width": 32},
            "(state along the row|linear_attention)",
        ),
        ("bloom", {}, "its own attention that cannot be replaced"),
    ],
)
def test_what_the_cache_does_not_keep_is_refused(arch: str, more: dict[str, Any], why: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(arch, **more), dtype=torch.float32)
    with pytest.raises(UserError, match=rf"{type(model).__name__} \({arch}\): .*{why}.*rollout.name=vllm"):
        NativeEngine(model, eos_token_ids=[], max_model_len=64)


def test_a_body_that_takes_no_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32)
    monkeypatch.setattr(model.model, "forward", lambda input_ids, **rest: None)
    with pytest.raises(UserError, match="takes no position_ids"):
        NativeEngine(model, eos_token_ids=[], max_model_len=64)


def test_a_model_that_never_asks_for_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32)
    monkeypatch.setattr(model, "forward", lambda **inputs: SimpleNamespace(logits=torch.zeros(1, 1, 264)))
    with pytest.raises(UserError, match=r"Qwen3ForCausalLM: it never asks .*rollout.name=vllm"):
        NativeEngine(model, eos_token_ids=[], max_model_len=64)


def test_a_model_that_cannot_choose_rows_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32).eval()
    disturb(model, 0)
    alone, whole = copy.deepcopy(model), model.forward
    monkeypatch.setattr(model, "forward", lambda input_ids, position_ids, **rest: whole(
        input_ids=input_ids, position_ids=position_ids, use_cache=False))  # fmt: skip
    prompts = [torch.randint(0, 250, (n,)).tolist() for n in (5, 45, 1)]
    engine = NativeEngine(model, eos_token_ids=[], max_model_len=100, max_num_seqs=5)
    assert worst(alone, prompts, sample(engine, prompts, 1.0)) <= 1e-4


def test_passes_that_attend_in_another_order_are_an_error() -> None:
    first, second = torch.nn.Identity(), torch.nn.Identity()
    calls = AttentionCalls()
    for _ in range(2):
        calls.start()
        assert [calls.number(m) for m in (first, second, first)] == [0, 1, 2]
        calls.finish()
    for others in ((first,), (first, first, second), (first, second, first, second)):
        calls.start()
        for module in others:
            calls.number(module)
        with pytest.raises(RuntimeError, match=f"of {len(others)} attention calls differs .*rollout.name=vllm"):
            calls.finish()


def test_sizes_of_layers_that_a_configuration_names_in_several_ways() -> None:
    def sizes(**more: Any) -> list[tuple[int, int, int, int]]:
        text = SimpleNamespace(**{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32} | more)
        return [(s.heads, s.kv_heads, s.key_width, s.value_width) for s in attention_sizes(text)]

    assert sizes() == [(4, 4, 8, 8)] * 2
    assert sizes(num_key_value_heads=2, head_dim=16) == [(4, 2, 16, 16)] * 2
    assert sizes(num_key_value_heads=2, head_dim=16, v_head_dim=12) == [(4, 2, 16, 12)] * 2
    assert sizes(multi_query=True) == [(4, 1, 8, 8)] * 2
    assert sizes(**MLA) == [(4, 4, 16, 12)] * 2
    assert sizes(layer_types=["conv", "full_attention"]) == [(4, 4, 8, 8)]
    own = [SimpleNamespace(num_attention_heads=4, hidden_size=32, head_dim=d) for d in (8, 16)]
    assert sizes(is_heterogeneous=True, per_layer_config=own) == [(4, 4, 8, 8), (4, 4, 16, 16)]
