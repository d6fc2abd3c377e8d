"""One optimizer step: refused when non-finite, clipped, exact after save and load."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_model
from tests.unit.engine_cases import rows_of, simple_loss
from verl.engine.training.local_engine import LocalEngine
from verl.errors import UserError

GROUPS = [(7, [5, 9, 1, 0, 3]), (4, [6, 2])]
ROLE = {"fsdp_config": {"dtype": "float32"}, "optim": {"lr": 1e-2}, "ppo_micro_batch_size_per_gpu": 2}


def engine_at(path, **changes):
    return LocalEngine(path, role_cfg=ROLE | changes, device="cpu")


def snapshot(engine):
    state = {n: t.clone() for n, t in engine.module.state_dict().items()}
    for name, p in engine._names.items():
        for key, value in engine._optimizer.state.get(p, {}).items():
            state[f"{name}/{key}"] = torch.as_tensor(value).clone()
    return state


def identical(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def spoiled(how, good):
    """A loss that goes wrong in the last micro-batch."""
    seen = []

    def loss(batch):
        value, metrics = good(batch)
        seen.append(1)
        if len(seen) == 4:
            value = value * float("nan") if how == "loss" else value + (batch.log_probs * 0).sqrt().sum()
        return value, metrics

    return loss


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_non_finite_moves_nothing(tmp_path, how):
    engine = engine_at(tiny_model(tmp_path / "m"))
    rows = rows_of(GROUPS)
    engine.step(rows, simple_loss(26), temperature=1.0)
    before = snapshot(engine)
    result = engine.step(rows, spoiled(how, simple_loss(26)), temperature=1.0)
    assert how in result.refused and identical(snapshot(engine), before)
    assert ("0:" in result.refused) == (how == "loss")
    after = engine.step(rows, simple_loss(26), temperature=1.0)
    assert after.refused == "" and not identical(snapshot(engine), before)


def test_metrics_follow_the_sum_and_weight_convention(tmp_path):
    engine = engine_at(tiny_model(tmp_path / "m"))
    rows = rows_of(GROUPS)
    logp = engine.log_probs(rows, temperature=1.0).log_probs
    result = engine.step(rows, simple_loss(26), temperature=1.0)
    assert result.metrics["mean"] == pytest.approx(float(logp.mean()), rel=1e-5)
    a = np.concatenate([r.advantages for r in rows])
    assert result.metrics["sum"] == pytest.approx(float(-(a * (logp + logp**2 / 4)).sum() / 26), rel=1e-4)
    assert result.metrics["actor/grad_norm"] == result.grad_norm
    assert result.tokens > 0


def test_clipping_is_the_global_norm(tmp_path):
    path = tiny_model(tmp_path / "m")
    rows = rows_of(GROUPS)
    grads = {}
    for limit in (0.0, 1e-3):
        engine = engine_at(path, grad_clip=limit)
        result = engine.step(rows, simple_loss(26), temperature=1.0)
        grads[limit] = torch.cat([p.grad.flatten() for p in engine.module.parameters()])
    assert float(grads[0.0].norm()) == pytest.approx(result.grad_norm, rel=1e-5)
    torch.testing.assert_close(grads[1e-3], grads[0.0] * (1e-3 / result.grad_norm), rtol=1e-3, atol=1e-9)


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


def test_only_empty_responses(tmp_path):
    engine = engine_at(tiny_model(tmp_path / "m"))
    rows = rows_of([(4, [0, 0])])
    assert engine.log_probs(rows, temperature=1.0, entropy=True).entropy.shape == (0,)
    assert engine.log_probs([], temperature=1.0).log_probs.shape == (0,)
    result = engine.step(rows, lambda b: (b.log_probs.sum(), {}), temperature=1.0)
    assert result.refused == "" and result.grad_norm == 0.0 and result.tokens == 0


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_goes_on_bit_for_bit(tmp_path, arch, tied):
    path = tiny_model(tmp_path / "m", arch, tied=tied)
    rows = rows_of(GROUPS)
    optim = {"lr": 1e-2, "lr_scheduler_type": "cosine", "lr_warmup_steps": 1}
    one = engine_at(path, optim=optim)
    one.schedule(8)

    def go(engine, steps):
        rates = []
        for _ in range(steps):
            engine.step(rows, simple_loss(26), temperature=1.0)
            rates.append(engine.advance())
        return rates

    go(one, 3)
    one.save_weights(tmp_path / "w")
    one.save_optimizer(tmp_path / "o")
    rates = go(one, 3)

    other = engine_at(path, optim=optim)
    other.schedule(8)
    storage = [p.data_ptr() for p in other.module.parameters()]
    other.load_weights(tmp_path / "w")
    other.load_optimizer(tmp_path / "o")
    assert storage == [p.data_ptr() for p in other.module.parameters()]
    assert go(other, 3) == rates
    assert identical(snapshot(one), snapshot(other))


def test_saved_directory_is_a_hugging_face_one(tmp_path):
    path = tiny_model(tmp_path / "m", "qwen3_moe")
    engine = engine_at(path)
    engine.save_weights(tmp_path / "w")
    config = json.loads((tmp_path / "w/config.json").read_text())
    assert config["dtype"] == json.loads((path / "config.json").read_text()).get("dtype", "bfloat16")
    assert "verl" not in json.dumps(config)
    assert (tmp_path / "w/generation_config.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "w", dtype=torch.float32).state_dict()
    assert identical(loaded, engine.module.state_dict())
    from safetensors.torch import load_file

    on_disk = load_file(tmp_path / "w/model.safetensors")
    named = dict(engine.named_weights())
    assert set(on_disk) <= set(named)
    assert all(torch.equal(named[k], v) for k, v in on_disk.items())
    assert any(".experts.0." in k for k in named)
    assert all(v.dtype == torch.float32 for v in on_disk.values())


def test_optimizer_state_that_is_not_there(tmp_path):
    engine = engine_at(tiny_model(tmp_path / "m"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no optimizer state"):
        engine.load_optimizer(tmp_path / "empty")
    engine.step(rows_of(GROUPS), simple_loss(26), temperature=1.0)
    engine.save_optimizer(tmp_path / "o")
    smaller = engine_at(tiny_model(tmp_path / "s", num_hidden_layers=1))
    with pytest.raises(UserError, match="does not have"):
        smaller.load_optimizer(tmp_path / "o")


def test_a_reference_has_no_optimizer(tmp_path):
    engine = LocalEngine(tiny_model(tmp_path / "m"), role_cfg=ROLE, device="cpu", trainable=False, role="ref")
    assert all(p.grad is None and not p.requires_grad for p in engine.module.parameters())
    assert math.isfinite(engine.log_probs(rows_of(GROUPS), temperature=1.0).log_probs.sum())
    with pytest.raises(RuntimeError, match="trainable"):
        engine.step(rows_of(GROUPS), simple_loss(26), temperature=1.0)


def test_a_reference_may_share_the_actors_model(tmp_path):
    actor = engine_at(tiny_model(tmp_path / "m"))
    frozen = LocalEngine.from_module(actor.module, role_cfg=ROLE, device="cpu", trainable=False, role="ref")
    rows = rows_of(GROUPS)
    assert actor.step(rows, simple_loss(26), temperature=1.0).grad_norm > 0
    a, b = (e.log_probs(rows, temperature=1.0).log_probs for e in (actor, frozen))
    assert np.array_equal(a, b)


@pytest.mark.parametrize("size", [1e6, 1e-3])
def test_float16_keeps_the_gradients_of_a_loss_over_many_tokens(tmp_path, size):
    """Unscaled, a loss over a million tokens has gradients that float16 rounds to zero; a large one overflows scaled."""
    path = tiny_model(tmp_path / "m", scale=4.0)
    rows = rows_of([(7, [5, 9]), (12, [6])])
    found = {}
    for dtype in ("float32", "float16"):
        role = {"fsdp_config": {"dtype": dtype}, "optim": {"lr": 0.0}, "grad_clip": 0.0}
        engine = LocalEngine(path, role_cfg=role, device="cpu")
        result = engine.step(rows, lambda batch: (batch.log_probs.sum() / size, {}), temperature=1.0)
        assert result.refused == ""
        found[dtype] = (result.grad_norm, [p.grad.clone() for p in engine.module.parameters()])
    norm, gradients = found["float16"]
    expected, exact = found["float32"]
    assert abs(norm / expected - 1) < 0.02
    difference = sum(float((a - b).square().sum()) for a, b in zip(gradients, exact, strict=True)) ** 0.5
    assert difference < 0.02 * expected
