"""Memory and time by layout: relations that must hold, and the measured steps of another system."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import plan_errors
import pytest
from plan_models import QWEN3_8B, QWEN3_30B

from verl.engine.registry import Placement
from verl.errors import UserError
from verl.planning import devices, memory, timing
from verl.planning.model import model_size
from verl.planning.workload import Role, Sampler, Step

MEASURED = Path(__file__).parents[3].parent / "shared/data/planner/train_measurements.json"
ROLE = Role(model=model_size(QWEN3_8B), ranks=8, gathers=True)
SAMPLER = Sampler(model=ROLE.model, engines=8, sequences=64, longest=4096)


@pytest.mark.skipif(not MEASURED.is_file(), reason="shared/data/planner is not beside the repository")
def test_the_measured_steps_that_judge():
    rows = json.loads(MEASURED.read_text())["rows"][1::2]
    sizes, times = zip(*plan_errors.errors(rows, plan_errors.CALIBRATED, None), strict=True)
    assert plan_errors.median(sizes) < 0.1 and plan_errors.median(times) < 0.2


def test_our_own_steps_on_a_processor():
    assert plan_errors.median([planned / measured - 1 for _, planned, measured in plan_errors.host_rows()]) < 0.1


def peak(role: Role) -> float:
    return memory.total(memory.state(role)) + memory.total(memory.passing(role, role.micro_tokens, update=True))


def test_the_state_of_a_role():
    held = memory.state(ROLE)
    assert held["weights"] == pytest.approx(4 * 8.19e9 / 8, rel=2e-3)
    assert memory.total(held) == pytest.approx(16 * 8.19e9 / 8, rel=2e-3)
    adapter = memory.state(replace(ROLE, adapter=16))
    assert adapter["optimizer"] < 0.02 * held["optimizer"]
    assert memory.state(replace(ROLE, trained=False)).keys() == {"weights"}
    copies = memory.state(replace(ROLE, placement=Placement(shard=4)))
    assert memory.total(copies) == pytest.approx(2 * memory.total(held))
    split = replace(ROLE, megatron=True, gathers=False, placement=Placement(tensor=2, pipeline=2))
    assert memory.state(split)["optimizer"] == pytest.approx(12 * memory.state(split)["gradients"] / 4 / 2)


@pytest.mark.parametrize(
    "less",
    [
        {"micro_tokens": 8192},
        {"offload_activations": True},
        {"ranks": 16},
        {"placement": Placement(sequence=2)},
        {"placement": Placement(tensor=2)},
        {"adapter": 16},
        {"streams": True},
        {"value": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_saves_memory(less):
    assert peak(replace(ROLE, **less)) < peak(ROLE)


@pytest.mark.parametrize("more", [{"recompute": False}, {"full_logits": True}], ids=lambda c: next(iter(c)))
def test_what_costs_memory(more):
    assert peak(replace(ROLE, **more)) > peak(ROLE)


def seconds(role: Role, device: devices.Device, tokens: float = 2**19, length: float = 2048) -> float:
    return timing.training_seconds(role, timing.update_work(role), tokens, length, device)


def test_training_takes_longer_for_more_work():
    h100 = devices.named("NVIDIA H100 80GB HBM3")
    least = seconds(ROLE, h100)
    assert seconds(ROLE, h100, tokens=2**20) == pytest.approx(2 * least, rel=0.05)
    assert seconds(replace(ROLE, ranks=16), h100) == pytest.approx(least / 2, rel=0.05)
    assert seconds(ROLE, h100, length=16384) > least
    assert seconds(replace(ROLE, recompute=False), h100) < least
    assert seconds(replace(ROLE, placement=Placement(pipeline=4)), h100) > least
    assert seconds(ROLE, devices.named("A100")) > least


def test_decoding_reads_weights_and_cache():
    h100, step = devices.named("H100"), Step(prompts=64, responses=8, prompt=512, response=1024)
    room = 40e9
    base = timing.sampling_seconds(SAMPLER, step, h100, room)
    # 1024 steps that read 2 bytes a weight at 60 % of the bandwidth are the least that it can take
    assert base > 1024 * 2 * 7.5e9 / (0.6 * 3.35e12)
    assert timing.sampling_seconds(replace(SAMPLER, tensor=2), step, h100, room) < base
    assert timing.sampling_seconds(SAMPLER, step, h100, room / 40) > base
    sparse = replace(SAMPLER, model=model_size(QWEN3_30B))
    alone = timing.sampling_seconds(sparse, replace(step, prompts=1), h100, room)
    assert alone < timing.sampling_seconds(sparse, step, h100, room) / 3  # few experts are read


def test_the_sampler_and_the_push():
    held = memory.sampling(SAMPLER, 80 * devices.GIB, 0)
    assert memory.total(held) == pytest.approx(40 * devices.GIB)
    shares = replace(SAMPLER, shares=True, preallocates=False, width=4)
    assert memory.sampling(shares, 80 * devices.GIB, 0)["sampler weights"] == 0
    assert not memory.pushing(ROLE, shares) and timing.push_seconds(ROLE, shares, devices.named("H100"), 1) == 0
    assert memory.pushing(ROLE, SAMPLER)["sync buckets"] > 2 * SAMPLER.bucket
    assert timing.push_seconds(ROLE, SAMPLER, devices.named("H100"), 2) > 0


def test_the_measured_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "bench_file", lambda: tmp_path / "deep" / "bench.json")
    unknown = devices.named("cpu")
    assert unknown.flops != unknown.flops and unknown.memory > 0  # NaN: not measured
    devices.keep(4e11, 2e11, 1.5e10, 16e9)
    assert devices.named("cpu").full == 2e11 and devices.named("cpu").on_host
    assert devices.named("Ascend910B3").forecast and devices.named("NVIDIA H100 PCIe").flops == 756e12
    with pytest.raises(UserError, match="H100"):
        devices.named("Z80")


def test_what_layers_keep_on_a_device():
    """Qwen3-0.6B's shape in one process on an H100: 1,255,300 bytes a token, measured (docs/performance.md)."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    model = model_size(QWEN3_8B | sizes | {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True})
    alone = Role(model=model, recompute=False)
    assert 28 * memory.layer_bytes(alone) == pytest.approx(1_255_300, rel=0.02)
    kept, again = (memory.passing(replace(alone, recompute=r), 8192, update=True) for r in (False, True))
    assert kept["gathered"] == pytest.approx(2 * 596e6, rel=1e-2) and again["gathered"] == 0
    assert memory.layer_bytes(replace(alone, gathers=True)) > 1.5 * memory.layer_bytes(alone)
