"""Architectures that differ from the usual decoder: the engine against the model alone, one row at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import LINEAR_ATTENTION, tiny_config, tiny_model
from tests.unit.engine.training.engine_cases import assert_close, rows_of
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.engine.training.fsdp.tensor_parallel import TensorParallel
from verl.errors import UserError
from verl.models.pretrained import build_model, fill_buffers
from verl.trajectory import Trajectory

FP32 = {"fsdp_config": {"dtype": "float32"}, "optim": {"lr": 0.0, "weight_decay": 0.0}, "grad_clip": 0.0}
ROWS = [(9, [12, 7]), (3, [15])]
FOUR = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 264,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    # Layers of several sizes, and keys that later layers take from earlier ones.
    "gemma3n_text": FOUR
    | {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "laurel_rank": 8},
    "gemma4_text": FOUR | {"global_head_dim": 32},
    # Looks at attention's output through a view.
    "jetmoe": {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "diffllama": {},
    "phi3": {"sliding_window": 6},
    # Frequencies from an alpha of its own, under the name of those that follow the length.
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 100.0, "factor": 1.0}
    },
} | LINEAR_ATTENTION


def built(arch: str) -> Any:
    torch.manual_seed(0)
    config = tiny_config(arch, **ARCHITECTURES[arch])
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.08)
    return module.eval()


def alone(module: Any, rows: list[Any]) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Log-probs of every row by itself through the model's own attention, and the gradients of their sum."""
    found = []
    for row in rows:
        ids = torch.from_numpy(np.concatenate((row.prompt.ids, row.response_ids)))
        logp = module(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        start = len(row.prompt.ids)
        found.append(logp[start - 1 : -1].gather(1, ids[start:, None])[:, 0])
    flat = torch.cat(found)
    flat.sum().backward()
    return flat.detach().numpy(), {n: p.grad for n, p in module.named_parameters()}


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_log_probs_and_gradients_are_the_models_own(tmp_path: Path, arch: str) -> None:
    module, rows = built(arch), rows_of(ROWS)
    module.save_pretrained(tmp_path)
    log_probs, gradients = alone(module, rows)
    engine = FSDPEngine(tmp_path, role_cfg=FP32, device="cpu", longest=64)
    np.testing.assert_allclose(engine.forward(rows, temperature=1.0)["log_probs"], log_probs, atol=1e-4)
    engine.step(rows, lambda batch: (batch.log_probs.sum(), {}), temperature=1.0)
    for name, parameter in engine.module.named_parameters():
        theirs = torch.zeros_like(parameter) if gradients[name] is None else gradients[name]
        difference = float(torch.linalg.vector_norm(parameter.grad - theirs))
        assert difference <= 1e-3 * max(1e-3, float(torch.linalg.vector_norm(theirs))), name


@pytest.mark.parametrize("arch", sorted(LINEAR_ATTENTION.keys() - {"qwen3_next", "qwen3_5_moe_text", "olmo_hybrid"}))
def test_states_begin_with_each_sequence_and_pass_from_prompt_to_responses(tmp_path: Path, arch: str) -> None:
    """Layers are recomputed in the backward pass. Prompts shorter than the convolution and longer than a chunk of the
    delta rule, responses of one token too."""
    module = built(arch)
    rows = rows_of([(1, [3, 1]), (70, [2, 1, 67, 9]), (2, [5]), (2, [1, 2, 3])])
    module.save_pretrained(tmp_path)
    log_probs, gradients = alone(module, rows)
    model = {"enable_gradient_checkpointing": True}
    engine = FSDPEngine(tmp_path, role_cfg=FP32, model_cfg=model, device="cpu", longest=140)
    np.testing.assert_allclose(engine.forward(rows, temperature=1.0)["log_probs"], log_probs, atol=1e-5)
    result = engine.step(rows, lambda batch: (batch.log_probs.sum(), {}), temperature=1.0)
    assert result.tokens == 1 + 70 + 2 + 2 + sum(row.length - 1 for row in rows)  # each prompt once
    ours = {n: p.grad for n, p in engine.module.named_parameters()}
    assert_close(ours, {n: g if g is not None else torch.zeros_like(ours[n]) for n, g in gradients.items()}, 1e-5)


def test_states_pass_down_a_tree_of_rows(tmp_path: Path) -> None:
    """Rows that go on from the middle of another one's response, one token apart."""
    module = built("qwen3_5_text")
    (first,) = rows_of([(12, [40])])
    written = np.concatenate((first.prompt.ids, first.response_ids))
    rows = [first]
    for number, (place, length) in enumerate(((30, 9), (31, 4), (31, 1), (45, 6)), 1):
        prompt = replace(first.prompt, ids=written[:place])
        ids = (written[:length] + number) % 200
        rows.append(Trajectory(prompt, number, ids, np.ones(length, bool)))
    module.save_pretrained(tmp_path)
    log_probs, gradients = alone(module, rows)
    engine = FSDPEngine(tmp_path, role_cfg=FP32, device="cpu", longest=140)
    np.testing.assert_allclose(engine.forward(rows, temperature=1.0)["log_probs"], log_probs, atol=1e-5)
    result = engine.step(rows, lambda batch: (batch.log_probs.sum(), {}), temperature=1.0)
    assert result.tokens == 12 + sum(row.length - 1 for row in rows)  # each shared token once
    ours = {n: p.grad for n, p in engine.module.named_parameters()}
    assert_close(ours, {n: g if g is not None else torch.zeros_like(ours[n]) for n, g in gradients.items()}, 1e-5)


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_a_model_without_weights_has_none_and_all_buffers(tmp_path: Path, arch: str) -> None:
    """diffllama draws parameters in a way that minds no device; gemma3n's text model fills buffers of its own."""
    whole = built(arch)
    whole.save_pretrained(tmp_path)
    module = build_model(tmp_path)
    assert [n for n, p in module.named_parameters() if not p.is_meta] == []
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in whole.named_parameters()]
    assert fill_buffers(module) == []
    for name, buffer in whole.named_buffers():
        assert torch.equal(dict(module.named_buffers())[name], buffer), name


def test_what_an_architecture_keeps_out_of_training_stays_out(tmp_path: Path) -> None:
    """A router's correction has no gradient: trained, weight decay would wear it away."""
    config = tiny_config("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=24)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    name = next(n for n, p in module.named_parameters() if not p.requires_grad)
    with torch.no_grad():
        module.get_parameter(name).fill_(0.5)
    module.save_pretrained(tmp_path)
    role = FP32 | {"optim": {"lr": 0.1, "weight_decay": 0.1}}
    engine = FSDPEngine(tmp_path, role_cfg=role, device="cpu")
    before = engine.module.lm_head.weight.detach().clone()
    engine.step(rows_of(ROWS), lambda batch: (batch.log_probs.sum(), {}), temperature=1.0)
    assert not torch.equal(engine.module.lm_head.weight, before)
    assert torch.equal(engine.module.get_parameter(name), torch.full_like(engine.module.get_parameter(name), 0.5))


STRETCHED = {
    "phi3": {
        "head_dim": 8,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0, 4.0, 6.0, 8.0],
            "original_max_position_embeddings": 16,
        },
    },
    "llama": {
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
}


@pytest.mark.parametrize("arch", sorted(STRETCHED))
@pytest.mark.parametrize("longest", [16, 48])
def test_log_probs_do_not_depend_on_how_long_the_neighbours_are(tmp_path: Path, arch: str, longest: int) -> None:
    """transformers would choose other frequencies for a pack with a long sequence in it."""
    path = tiny_model(tmp_path / "m", arch, scale=4.0, **STRETCHED[arch])
    engine = FSDPEngine(path, role_cfg=FP32, device="cpu", longest=longest)
    rows = rows_of([(4, [5]), (6, [4, 30]), (3, [2])])
    together = engine.forward(rows, temperature=1.0)["log_probs"]
    one_by_one = [engine.forward([row], temperature=1.0)["log_probs"] for row in rows]
    np.testing.assert_allclose(together, np.concatenate(one_by_one), atol=1e-5)
    # The run's longest sequence decides, so the model alone agrees wherever a sequence is on the same side.
    module = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    same = [r for r in rows if (len(r.prompt.ids) + r.length > 16) == (longest > 16)]
    if arch == "phi3" or longest <= 16:
        theirs, _ = alone(module, same)
        np.testing.assert_allclose(engine.forward(same, temperature=1.0)["log_probs"], theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("arch", "more", "why"),
    [
        ("bloom", {}, "own attention"),
        ("roberta", {"is_decoder": True}, "positions"),
        ("doge", {}, "chooses for itself"),
        ("bert", {"is_decoder": False}, "both directions"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "both directions"),
        ("minimax_m3_vl_text", {"num_local_experts": 4, "num_experts_per_tok": 2}, "chooses for itself"),
        ("phimoe", {"sliding_window": 6, "num_local_experts": 4}, "window of 6"),
    ],
)
def test_what_attention_would_silently_leave_out_is_refused(arch: str, more: dict[str, Any], why: str) -> None:
    module = AutoModelForCausalLM.from_config(tiny_config(arch, **more), dtype=torch.float32)
    with pytest.raises(UserError, match=why):
        FSDPEngine(module=module, device="cpu")


def test_a_learned_activation_between_cut_layers_is_not_cut() -> None:
    """Each rank would have a part of its gradient, and go its own way with it."""

    class Two:
        def size(self) -> int:
            return 2

    module = AutoModelForCausalLM.from_config(tiny_config("apertus"), dtype=torch.float32)
    with pytest.raises(UserError, match=r"tensor_parallel_size=2: model.layers.0.mlp.act_fn"):
        TensorParallel(module, Two())  # type: ignore[arg-type]
    usual = AutoModelForCausalLM.from_config(tiny_config("qwen3"), dtype=torch.float32)
    TensorParallel(usual, Two())  # type: ignore[arg-type]
