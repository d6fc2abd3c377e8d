"""The engine against a plain padded forward of the same Hugging Face model, fp32."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.tiny import tiny_model
from tests.unit.engine.training.engine_cases import (
    BOTH,
    assert_close,
    branching_rows,
    gradients,
    reference,
    rows_of,
    simple_loss,
)
from verl.engine.training.activations import ActivationMemory
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.errors import UserError
from verl.models import pretrained

GROUPS = [(7, [5, 9, 1, 0, 3]), (1, [4]), (12, [6, 6]), (3, [0, 0]), (5, [2, 11, 40])]
FP32 = {"fsdp_config": {"dtype": "float32"}, "optim": {"lr": 1e-3}, "grad_clip": 0.0}
ARCHITECTURES = {
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {
        "sliding_window": 8,
        "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2},
    "cohere": {"logit_scale": 0.25},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def build(tmp_path, arch="qwen3", role=FP32, model=None, **options):
    path = tiny_model(tmp_path / arch, arch, scale=4.0, **ARCHITECTURES.get(arch, {}))
    return path, FSDPEngine(path, role_cfg=role, model_cfg=model, device="cpu", **options)


@pytest.mark.parametrize(
    ("arch", "rows"),
    [
        *((arch, rows_of(GROUPS)) for arch in ARCHITECTURES),
        *((a, branching_rows(12)) for a in ("qwen3", "gemma2", "gpt_oss")),
        ("qwen3", branching_rows(12, every_segment=True)),
    ],
    ids=[*ARCHITECTURES, "tree-qwen3", "tree-gemma2", "tree-gpt_oss", "every_segment"],
)
def test_same_numbers_as_a_padded_forward(tmp_path, arch, rows):
    path, engine = build(tmp_path, arch)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    logp, entropy = reference(plain, rows, temperature=0.7)
    total = len(logp)

    stats = engine.forward(rows, BOTH, temperature=0.7)
    torch.testing.assert_close(torch.from_numpy(stats["log_probs"]), logp.detach(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(torch.from_numpy(stats["entropy"]), entropy.detach(), rtol=1e-5, atol=2e-5)

    class Whole:
        candidate_log_probs = None

    whole = Whole()
    whole.rows, whole.log_probs, whole.entropy = rows, logp, entropy
    simple_loss(total, 0.1)(whole)[0].backward()
    engine._optimizer.step = lambda: None
    result = engine.step(rows, simple_loss(total, 0.1), BOTH, temperature=0.7)
    theirs = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in plain.named_parameters()}
    assert_close(gradients(engine), theirs, 1e-4 if arch in ("gemma2", "gpt_oss") else 2e-5)
    assert result.metrics["mean"] == pytest.approx(float(logp.mean()), rel=1e-5)
    assert result.grad_norm == pytest.approx(
        float(torch.linalg.vector_norm(torch.stack([g.norm() for g in theirs.values()]))), rel=1e-4
    )
    assert result.refused == ""


def test_a_head_that_is_more_than_a_product_is_found_out(tmp_path):
    path = tiny_model(tmp_path / "m", "qwen3")
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    plain.lm_head.register_forward_hook(lambda module, inputs, output: output * 2 + 1)
    engine = FSDPEngine(module=plain, role_cfg=FP32, device="cpu")
    assert engine._model.head.layer is None
    rows = rows_of(GROUPS)
    stats = engine.forward(rows, temperature=1.0)
    plain.set_attn_implementation("eager")
    logp, _ = reference(plain, rows)
    torch.testing.assert_close(torch.from_numpy(stats["log_probs"]), logp.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["no directory", "a file", "no config", "no weights", "other weights", "override"])
def test_directories_that_cannot_work(tmp_path, kind):
    path, model = tiny_model(tmp_path / "m"), None
    if kind == "no directory":
        path = tmp_path / "absent"
    elif kind == "a file":
        path = path / "config.json"
    elif kind == "no config":
        (path / "config.json").unlink()
    elif kind == "no weights":
        (path / "model.safetensors").unlink()
    elif kind == "other weights":
        other = tiny_model(tmp_path / "other", num_hidden_layers=1)
        (other / "model.safetensors").rename(path / "model.safetensors")
    else:
        model = {"override_config": {"hiden_size": 3}}
    with pytest.raises(UserError, match="model\\.") as caught:
        FSDPEngine(path, model_cfg=model, role_cfg=FP32, device="cpu")
    assert len(str(caught.value)) < 400


def test_recomputing_layers_does_not_wake_their_dropout(tmp_path):
    """OPT reads its dropout rate beside the layer's `training` flag, which recomputation has to set."""
    path = tiny_model(
        tmp_path / "m", "opt", word_embed_proj_dim=32, ffn_dim=64, dropout=0.3, max_position_embeddings=64
    )
    engine = FSDPEngine(path, role_cfg=FP32, device="cpu", model_cfg={"enable_gradient_checkpointing": True})
    rows = rows_of([(5, [4, 3]), (7, [6])])
    expected = torch.from_numpy(engine.forward(rows, temperature=1.0)["log_probs"])
    seen = []

    def loss(batch):
        seen.append(batch.log_probs.detach().clone())
        return batch.log_probs.sum(), {}

    engine.step(rows, loss, temperature=1.0)
    torch.testing.assert_close(torch.cat(seen), expected, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("error:.*gradient_checkpointing_enable.*")
def test_layers_are_recomputed_by_the_name_that_the_installed_transformers_has(tmp_path):
    _, engine = build(tmp_path, model={"enable_gradient_checkpointing": True})
    assert all(layer.gradient_checkpointing for layer in pretrained.checkpoint_layers(engine.module))
    asked = []
    older = SimpleNamespace(gradient_checkpointing_enable=asked.append)
    pretrained.recompute_layers(older, {"use_reentrant": False})
    assert asked == [{"use_reentrant": False}]


def test_what_a_pass_keeps_is_measured_where_it_fits() -> None:
    taken = [0]
    device = SimpleNamespace(allocated=lambda index: taken[0])

    class Kept:
        """Outputs whose pass keeps 300 bytes of any number of tokens and 7 of each."""

        def __init__(self, tokens: int):
            self.size = 300 + 7 * tokens
            taken[0] += self.size

        def __del__(self) -> None:
            taken[0] -= self.size

    measured = ActivationMemory.measured(Kept, device, 0)
    assert measured == ActivationMemory(7.0, 300.0, 0.7) and taken == [0]
    assert measured.fits(100, 1000 / 0.7) and not measured.fits(101, 1000 / 0.7)
    assert ActivationMemory.measured(lambda tokens: None, device, 0) is None
    estimate, config = ActivationMemory(10.0), Qwen3Config(max_position_embeddings=1024)
    assert estimate.may_be_measured(config, 120, 15_000) and not estimate.may_be_measured(config, 121, 15_000)
    assert not estimate.may_be_measured(Qwen3Config(max_position_embeddings=512), 0, 1e9)
