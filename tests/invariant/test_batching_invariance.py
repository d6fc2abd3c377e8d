"""How rows are cut, packed and shared never changes log-probs, gradients or metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_config, tiny_model
from tests.unit.engine.training.engine_cases import (
    BOTH,
    assert_close,
    gradients,
    reference,
    rows_of,
    simple_loss,
)
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.engine.training.log_prob import CANDIDATE_OUTPUTS

CONFIG = {"fsdp_config": {"dtype": "float32"}, "grad_clip": 0.0, "optim": {"lr": 0.0, "weight_decay": 0.0}}


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3"), dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0) if p.ndim > 1 else None
    return model.eval()


def run(module, rows, model_cfg=None, **options):
    engine = FSDPEngine(module=module, role_cfg=CONFIG | options, model_cfg=model_cfg, device="cpu", topk=4)
    stats = engine.forward(rows, (*BOTH, "topk_log_probs"), temperature=0.8)
    for row in rows:
        row.teacher_topk_ids = np.stack([row.response_ids, row.response_ids * 3 % 250], 1).astype(np.int32)
    loss = simple_loss(max(1, len(stats["log_probs"])), 0.1)
    result = engine.step(rows, loss, (*BOTH, *CANDIDATE_OUTPUTS), temperature=0.8)
    return stats, result, gradients(engine)


def same(a, b, tolerance=2e-5):
    for name in (*BOTH, "topk_log_probs"):
        torch.testing.assert_close(*(torch.from_numpy(x[0][name]) for x in (a, b)), rtol=1e-5, atol=2e-5)
    assert_close(a[2], b[2], tolerance)
    assert a[1].metrics == pytest.approx(b[1].metrics, rel=1e-4, abs=1e-6)


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(0, 24), min_size=1, max_size=5)),
        min_size=1,
        max_size=4,
    ),
    size=st.one_of(st.none(), st.integers(1, 6)),
    tokens=st.integers(1, 120),
    share=st.sampled_from([None, True, False]),
    seed=st.integers(0, 5),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cut_gives_the_same(module, groups, size, tokens, share, seed):
    rows = rows_of(groups, seed)
    whole = run(module, rows)
    other = run(
        module,
        rows,
        ppo_micro_batch_size_per_gpu=size,
        ppo_max_token_len_per_gpu=tokens,
        use_prefix_grouper=share,
    )
    same(other, whole)
    if sum(r.length for r in rows):
        # `reference` needs the model's own attention; the engine sets its own again when it is built.
        module.set_attn_implementation("eager")
        logp, _ = reference(module, rows, 0.8)
        torch.testing.assert_close(torch.from_numpy(other[0]["log_probs"]), logp.detach(), rtol=1e-5, atol=2e-5)


def test_token_budget_wins_over_size_if_dynamic(module):
    rows = rows_of([(5, [4, 4, 4])])
    engine = FSDPEngine(
        module=module,
        role_cfg=CONFIG | {"ppo_micro_batch_size_per_gpu": 1, "use_dynamic_bsz": True},
        device="cpu",
    )
    assert engine.update_batching.rows is None
    assert engine.step(rows, simple_loss(12), temperature=1.0).tokens == 5 + 9


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputed_layers_give_the_same(tmp_path, arch, dtype):
    path = tiny_model(tmp_path / "m", arch, scale=4.0)
    rows = rows_of([(7, [5, 9, 1, 0, 3]), (1, [4]), (12, [6, 6])])
    results = []
    for on in (True, False):
        role = CONFIG | {"fsdp_config": {"dtype": dtype}, "ppo_max_token_len_per_gpu": 20}
        engine = FSDPEngine(path, role_cfg=role, model_cfg={"enable_gradient_checkpointing": on}, device="cpu")
        calls = count_layer_calls(engine)
        result = engine.step(rows, simple_loss(28), temperature=1.0)
        results.append((calls["n"], gradients(engine), result.grad_norm))
        assert not any(m.training for m in engine.module.modules())
    (n_on, with_recompute, norm_on), (n_off, without, norm_off) = results
    assert n_on == 2 * n_off
    assert norm_on == norm_off
    for name in without:
        assert torch.equal(with_recompute[name], without[name]), name


def count_layer_calls(engine):
    calls = {"n": 0}

    def count(*_):
        calls["n"] += 1

    for layer in engine._layers:
        layer.mlp.register_forward_pre_hook(count)
    return calls


def test_memory_decides_when_nobody_does(module, monkeypatch):
    rows = rows_of([(7, [5, 9])])
    engine = FSDPEngine(module=module, role_cfg=CONFIG, device="cpu")
    seen = []
    original = engine._outputs

    def spy(*args):
        seen.append(any(layer.training for layer in engine._layers))
        return original(*args)

    monkeypatch.setattr(engine, "_outputs", spy)
    engine.step(rows, simple_loss(14), temperature=1.0)
    monkeypatch.setattr(engine.platform, "memory", lambda index=0: (1000, 1000))
    engine.step(rows, simple_loss(14), temperature=1.0)
    assert seen == [False, True]
