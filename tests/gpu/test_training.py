"""The training engines on a device: against the processor, in bfloat16, over nccl, and resumed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.engine.training.engine_cases import BOTH, gradients, rows_of, simple_loss

GROUPS = [(70, [50, 9, 1, 30]), (1, [4]), (120, [60, 6]), (5, [2, 110, 40])]
KIND_LIMITS = {"log_probs": 2e-4, "gradient": 1e-3}


def role(dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {
        "fsdp_config": {"dtype": dtype},
        "optim": {"lr": 1e-3, "weight_decay": 0.01},
        "grad_clip": 1.0,
        "ppo_max_token_len_per_gpu": 512,
    } | more


def local(path: str, device: Any, dtype: str = "float32") -> Any:
    from verl.engine.training.fsdp.engine import FSDPEngine

    return FSDPEngine(path, role_cfg=role(dtype), device=device)


def total() -> int:
    return sum(size for _, sizes in GROUPS for size in sizes)


def learn(engine: Any, rows: Any, **options: Any) -> Any:
    return engine.step(rows, simple_loss(total(), 0.1), BOTH, temperature=0.8, **options)


def relative(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, of all tensors together."""
    a = torch.cat([t.float().flatten().cpu() for t in ours.values()])
    b = torch.cat([theirs[n].float().flatten().cpu() for n in ours])
    return float((a - b).norm() / b.norm())


def test_float32_is_that_of_the_processor(platform: Any, model_path: str, record_property: Any) -> None:
    rows = rows_of(GROUPS)
    here, there = local(model_path, platform), local(model_path, "cpu")
    stats = [e.forward(rows, BOTH, temperature=0.8) for e in (here, there)]
    for column in ("log_probs", "entropy"):
        difference = np.abs(stats[0][column] - stats[1][column]).max()
        record_property(column, float(difference))
        assert difference < KIND_LIMITS["log_probs"]
    for engine in (here, there):
        assert not learn(engine, rows).refused
    found = relative(gradients(here), gradients(there))
    record_property("gradient", found)
    assert found < KIND_LIMITS["gradient"]


def test_bfloat16_stays_near_float32(platform: Any, model_path: str, record_property: Any) -> None:
    """On an H100: log-probs 0.018 apart on average, 0.08 at most; gradients 1.7 %."""
    rows = rows_of(GROUPS)
    half, full = local(model_path, platform, "bfloat16"), local(model_path, platform)
    a, b = (e.forward(rows, temperature=0.8)["log_probs"] for e in (half, full))
    record_property("log_probs_max", float(np.abs(a - b).max()))
    record_property("log_probs_mean", float(np.abs(a - b).mean()))
    assert np.abs(a - b).max() < 0.3 and np.abs(a - b).mean() < 0.03
    for engine in (half, full):
        assert not learn(engine, rows).refused
    found = relative(gradients(half), gradients(full))
    record_property("gradient", found)
    assert found < 0.1


def test_heads_that_flash_attention_does_not_know(platform: Any, tmp_path: Path) -> None:
    """20 elements, no multiple of 8: the blocks take them, in bfloat16 too."""
    from tests.tiny import tiny_model

    path = str(tiny_model(tmp_path / "qwen3", "qwen3", head_dim=20, scale=2.0))
    rows = rows_of(GROUPS)
    half, full = local(path, platform, "bfloat16"), local(path, platform)
    a, b = (e.forward(rows, temperature=0.8)["log_probs"] for e in (half, full))
    assert np.abs(a - b).mean() < 0.05
    assert not learn(half, rows).refused


def test_batching_changes_nothing(platform: Any, model_path: str, record_property: Any) -> None:
    from verl.engine.training.fsdp.engine import FSDPEngine

    rows = rows_of(GROUPS)
    found = []
    for cfg in ({"ppo_max_token_len_per_gpu": 4096}, {"ppo_micro_batch_size_per_gpu": 1}):
        engine = FSDPEngine(model_path, role_cfg=role(**cfg), device=platform)
        learn(engine, rows)
        found.append(gradients(engine))
    record_property("gradient", relative(*found))
    assert relative(*found) < 1e-4


@pytest.mark.needs_cuda
def test_activations_are_measured(platform: Any, model_path: str, record_property: Any) -> None:
    """What a pack keeps is what two small passes said it would, and it is not recomputed while it fits."""
    rows, engine, kept = rows_of(GROUPS), local(model_path, platform, "bfloat16"), []
    compute, recomputed = engine._outputs, []

    def watched(batch: Any, *more: Any) -> Any:
        before = platform.allocated()
        outputs = compute(batch, *more)
        kept.append((platform.allocated() - before, batch.size))
        recomputed.append(any(layer.training for layer in engine._layers))
        return outputs

    engine._outputs = watched
    assert not learn(engine, rows).refused
    assert kept and not any(recomputed)
    for size, tokens in kept:
        expected = engine._activations.fixed + engine._activations.token * tokens
        record_property(f"{tokens}_tokens", size / expected)
        assert 0.8 * expected < size < 1.2 * expected


def test_a_resumed_optimizer_goes_on(platform: Any, model_path: str, tmp_path: Path, record_property: Any) -> None:
    """State of the fused AdamW as it was, to the bit; the step after it as near as the device repeats itself."""
    rows = rows_of(GROUPS)
    whole = local(model_path, platform)
    for _ in range(2):
        learn(whole, rows)
    whole.save_weights(tmp_path / "actor")
    whole.save_optimizer(tmp_path / "optim")
    resumed = local(model_path, platform)
    resumed.load_weights(tmp_path / "actor")
    resumed.load_optimizer(tmp_path / "optim")
    mine, theirs = (_state(e) for e in (resumed, whole))
    assert mine.keys() == theirs.keys() and mine
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name
        assert mine[name].device == value.device, name
    for engine in (whole, resumed):
        learn(engine, rows)
    ours, other = ({n: t.clone() for n, t in e.named_weights()} for e in (resumed, whole))
    found = relative(ours, other)
    record_property("weights_after", found)
    assert found < 1e-5


def _state(engine: Any) -> dict[str, torch.Tensor]:
    optimizer = engine._optimizer
    names = {p: n for n, p in engine.module.named_parameters()}
    return {
        f"{names[p]}/{key}": value
        for p, entries in optimizer.state.items()
        for key, value in entries.items()
        if isinstance(value, torch.Tensor)
    }


@contextmanager
def one_rank(platform: Any) -> Iterator[None]:
    """In this block the process is the only rank of a group: engines built here are sharded."""
    import torch.distributed as dist

    from verl.engine.training.process_group import init_process_group

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_process_group(0, 1, "127.0.0.1", port, platform, 60.0)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_the_sharded_engine_on_one_device(platform: Any, model_path: str, record_property: Any) -> None:
    """FSDP2 over the device's own collectives against the engine of one process."""
    from verl.engine.training.fsdp.engine import FSDPEngine
    from verl.engine.training.process_group import whole

    def driven() -> tuple[Any, ...]:
        engine, rows = FSDPEngine(model_path, role_cfg=role(), device=platform), rows_of(GROUPS)
        log_probs = engine.forward(rows, temperature=0.8)["log_probs"]
        norm = learn(engine, rows).grad_norm
        grads = {n: whole(p.grad) for n, p in engine.module.named_parameters() if p.grad is not None}
        return log_probs, norm, grads, {n: t.clone() for n, t in engine.named_weights()}

    plain = driven()
    with one_rank(platform):
        sharded = driven()
    record_property("log_probs", float(np.abs(sharded[0] - plain[0]).max()))
    assert np.abs(sharded[0] - plain[0]).max() < 1e-4
    assert abs(sharded[1] - plain[1]) < 1e-3 * plain[1]
    record_property("gradient", relative(sharded[2], plain[2]))
    assert relative(sharded[2], plain[2]) < 1e-4 and relative(sharded[3], plain[3]) < 1e-4


@pytest.mark.parametrize("kind", ["local", "sharded"])
def test_offload_frees_the_device(platform: Any, model_path: str, record_property: Any, kind: str) -> None:
    with one_rank(platform) if kind == "sharded" else nullcontext():
        offload(platform, model_path, record_property)


def offload(platform: Any, model_path: str, record_property: Any) -> None:
    from tests.gpu.test_sampler import taken
    from verl.engine.training.fsdp.engine import FSDPEngine

    rows = rows_of(GROUPS)
    cfg = role()
    cfg["fsdp_config"] |= {"param_offload": True, "optimizer_offload": True}
    engine = FSDPEngine(model_path, role_cfg=cfg, device=platform)
    learn(engine, rows)
    before = engine.forward(rows, temperature=0.8)["log_probs"]
    loaded = taken(platform)
    engine.offload()
    away = taken(platform)
    engine.onload()
    without = taken(platform)
    record_property("loaded_mib", round(loaded / 2**20, 1))
    record_property("offloaded_mib", round(away / 2**20, 1))
    np.testing.assert_array_equal(engine.forward(rows, temperature=0.8)["log_probs"], before)
    engine.onload(optimizer=True)
    learn(engine, rows)
    if platform.name != "cpu":
        assert away < 0.5 * loaded
        assert away < without < loaded
