"""One optimizer step in one process: AdamW written out, float16, a model that two engines share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tiny import tiny_model
from tests.unit.engine.training.engine_cases import BOTH, rows_of, simple_loss
from verl.engine.training.fsdp.engine import FSDPEngine

GROUPS = [(7, [5, 9, 1, 0, 3]), (4, [6, 2])]
ROLE = {"fsdp_config": {"dtype": "float32"}, "optim": {"lr": 1e-2}, "ppo_micro_batch_size_per_gpu": 2}


def engine_at(path, **changes):
    return FSDPEngine(path, role_cfg=ROLE | changes, device="cpu")


def test_adamw_is_adamw(tmp_path):
    """Two steps against the update written out (Loshchilov and Hutter, 1711.05101)."""
    engine = engine_at(tiny_model(tmp_path / "m"), grad_clip=0.0)
    rows = rows_of(GROUPS)
    lr, decay, b1, b2, eps = 1e-2, 0.01, 0.9, 0.999, 1e-8
    weights = {n: p.detach().double().clone() for n, p in engine._names.items()}
    m = {n: torch.zeros_like(w) for n, w in weights.items()}
    v = {n: torch.zeros_like(w) for n, w in weights.items()}
    for t in (1, 2):
        engine.step(rows, simple_loss(26), temperature=1.0)
        for n, p in engine._names.items():
            g = p.grad.double()
            m[n], v[n] = b1 * m[n] + (1 - b1) * g, b2 * v[n] + (1 - b2) * g * g
            step = (m[n] / (1 - b1**t)) / ((v[n] / (1 - b2**t)).sqrt() + eps)
            weights[n] = weights[n] * (1 - lr * decay) - lr * step
    for n, p in engine._names.items():
        torch.testing.assert_close(p.detach().double(), weights[n], rtol=1e-4, atol=1e-6)


def test_a_reference_may_share_the_actors_model(tmp_path):
    actor = engine_at(tiny_model(tmp_path / "m"))
    frozen = FSDPEngine(module=actor.module, role_cfg=ROLE, device="cpu", trainable=False, role="ref")
    rows = rows_of(GROUPS)
    assert actor.step(rows, simple_loss(26), temperature=1.0).grad_norm > 0
    a, b = (e.forward(rows, temperature=1.0)["log_probs"] for e in (actor, frozen))
    assert np.array_equal(a, b)


@pytest.mark.parametrize("size", [1e6, 1e-3])
def test_float16_keeps_the_gradients_of_a_loss_over_many_tokens(tmp_path, size):
    """Unscaled, a loss over a million tokens has gradients that float16 rounds to zero; a large one overflows
    scaled."""
    path = tiny_model(tmp_path / "m", scale=4.0)
    rows = rows_of([(7, [5, 9]), (12, [6])])
    found = {}
    for dtype in ("float32", "float16"):
        role = {"fsdp_config": {"dtype": dtype}, "optim": {"lr": 0.0}, "grad_clip": 0.0}
        engine = FSDPEngine(path, role_cfg=role, device="cpu")
        result = engine.step(rows, lambda batch: (batch.log_probs.sum() / size, {}), temperature=1.0)
        assert result.refused == ""
        found[dtype] = (result.grad_norm, [p.grad.clone() for p in engine.module.parameters()])
    norm, gradients = found["float16"]
    expected, exact = found["float32"]
    assert abs(norm / expected - 1) < 0.02
    difference = sum(float((a - b).square().sum()) for a, b in zip(gradients, exact, strict=True)) ** 0.5
    assert difference < 0.02 * expected


@pytest.mark.parametrize(("arch", "offset"), [("qwen3", 0.0), ("gemma3_text", 1.0)])
def test_the_derivative_by_a_factor_of_all_logits(tmp_path, arch, offset):
    """Against a difference of two losses, and against Σ c·(log p + entropy); cut into any micro-batches."""
    path, rows = tiny_model(tmp_path / "m", arch, scale=4.0), rows_of(GROUPS)
    weights = np.random.default_rng(0).standard_normal(26)

    def loss(batch):
        part = np.concatenate([weights[np.array(row.response_ids) % 26] for row in batch.rows])
        return (torch.from_numpy(part) * batch.log_probs).sum(), {}

    engine = engine_at(path, optim={"lr": 0.0}, grad_clip=1e-3)
    derivative = engine.step(rows, loss, temperature=0.7).scale_derivative
    outputs = engine.forward(rows, BOTH, temperature=0.7)
    c = np.concatenate([weights[np.array(row.response_ids) % 26] for row in rows]).astype(np.float64)
    assert derivative == pytest.approx(float(c @ (outputs["log_probs"] + outputs["entropy"])), rel=1e-4)
    norm = engine._names["model.norm.weight"]
    before, losses = norm.detach().clone(), []
    for factor in (1.01, 0.99):
        norm.data.copy_((before + offset) * factor - offset)
        losses.append(float(c @ engine.forward(rows, temperature=0.7)["log_probs"]))
    assert derivative == pytest.approx((losses[0] - losses[1]) / 0.02, rel=1e-2)


def test_beside_an_adapter_there_is_such_a_derivative(tmp_path):
    """Of the frozen normalisation, which stays as it was; the norm of the gradients is the adapter's alone."""
    path, rows = tiny_model(tmp_path / "m", scale=4.0), rows_of(GROUPS)
    engine = FSDPEngine(path, model_cfg={"lora_rank": 2}, role_cfg=ROLE | {"grad_clip": 1e3}, device="cpu")
    before = engine.module.get_parameter("model.norm.weight").detach().clone()
    for _ in range(2):
        outputs = engine.forward(rows, BOTH, temperature=1.0)
        result = engine.step(rows, lambda batch: (batch.log_probs.sum() / 26, {}), temperature=1.0)
        expected = float((outputs["log_probs"] + outputs["entropy"]).sum(dtype=np.float64)) / 26
        assert result.scale_derivative == pytest.approx(expected, rel=1e-4)
        squares = [float(p.grad.square().sum()) for p in engine._parameters]
        assert result.grad_norm == pytest.approx(sum(squares) ** 0.5, rel=1e-5)
    assert torch.equal(before, engine.module.get_parameter("model.norm.weight"))


def test_the_norm_of_the_optimizers_state(tmp_path):
    engine, rows = engine_at(tiny_model(tmp_path / "m")), rows_of(GROUPS)
    assert engine.optimizer_norm() == 0.0
    engine.step(rows, simple_loss(26), temperature=1.0)
    moments = [
        s[name].double().square().sum() for s in engine._optimizer.state.values() for name in s if name != "step"
    ]
    assert engine.optimizer_norm() == pytest.approx(float(sum(moments)) ** 0.5, rel=1e-5)
