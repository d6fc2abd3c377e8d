"""Model FLOPs utilisation: counts by loops, parameters by hand, devices by name."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from tests import ranks
from tests.tiny import tiny_config, tiny_model
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.models.layers import ModelCost, model_cost, product_weights
from verl.platform import detect
from verl.platform.device import half_precision_peak
from verl.tracking.step_metrics import mfu, step_mfu
from verl.trajectory import Prompt, Trajectory


class Known:
    """A platform whose peak is known."""

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        return 1e12 if dtype == torch.bfloat16 else None


@pytest.mark.parametrize(("arch", "tied"), [("qwen3", False), ("qwen3", True), ("qwen2", False), ("llama", True)])
def test_a_forward_pass_costs_what_torch_counts(arch: str, tied: bool) -> None:
    """torch counts the products it dispatches: all pairs of a sequence, where a causal pass needs half of them."""
    model = AutoModelForCausalLM.from_config(tiny_config(arch, tied=tied), attn_implementation="eager").eval()
    length = 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long))
    cost = model_cost(model, Known(), torch.bfloat16)
    ours = cost.per_token * length + cost.per_pair * length * length
    rotary = 2 * 8 * length  # the angles: one product of half a head with the positions
    assert counter.get_total_flops() == pytest.approx(ours + rotary, rel=1e-3)


def test_pairs_cost_what_each_layer_has() -> None:
    """Two products of a head and pair: as wide as a key (of 16 here) and as a value."""

    def per_pair(arch: str, **more: object) -> float:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config(arch, **more))
        cost = model_cost(model, Known(), torch.bfloat16)
        assert cost is not None
        return cost.per_pair

    ranks_of = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    assert per_pair("deepseek_v3", v_head_dim=12, **ranks_of) == 2 * 2 * 4 * (16 + 12)
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
    assert per_pair("gemma4_text", global_head_dim=32, **sliding) == 2 * 4 * (16 + 16 + 32 + 32)


def test_of_the_experts_those_that_are_chosen_count() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    config = model.config  # 4 experts, 2 of them chosen; 2 layers of width 32
    attention = 32 * 64 * 2 + 32 * 32 * 2
    experts = 2 * 3 * 32 * 32
    assert product_weights(model, config) == 2 * (attention + experts + 32 * 4) + 264 * 32


def test_causal_sequences_by_a_loop() -> None:
    cost = ModelCost(per_token=7.0, per_pair=3.0, peak=1.0)
    expected = 0.0
    for length in (1, 4, 9):
        for position in range(length):
            expected += 7.0 + 3.0 * (position + 1)
    assert cost.forward([1, 4, 9]) == expected


def trajectory_of(prompt: int, length: int, trained: bool) -> Trajectory:
    mask = np.ones(length, bool)
    return Trajectory(
        Prompt("u", np.arange(prompt), "q"), 0, np.arange(length), mask, loss_mask=mask if trained else ~mask
    )


def test_updates_and_passes_of_a_step() -> None:
    cost = ModelCost(per_token=10.0, per_pair=0.0, peak=1000.0)
    batch = [trajectory_of(3, 5, True), trajectory_of(2, 2, False)]
    found = step_mfu("actor", cost, batch, {"update_actor": 2.0, "old_log_prob": 1.0}, epochs=2, computed=0.5)
    assert found == {
        "perf/mfu/actor": pytest.approx(8 * 10 * 3 * 2 * 0.5 / (2.0 * 1000)),
        "perf/mfu/actor_infer": pytest.approx(12 * 10 * 0.5 / (1.0 * 1000)),
    }
    assert set(step_mfu("actor", cost, batch, {"update_actor": 2.0})) == {"perf/mfu/actor"}
    assert step_mfu("actor", None, batch, {"update_actor": 2.0}) == {}
    assert math.isnan(mfu(cost, [3], 0.0, passes=1.0))


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("AMD Instinct MI300X", 1307),
        ("Ascend910B2", 354),
    ],
)
def test_peaks_by_name(name: str, tera: float) -> None:
    assert half_precision_peak(name) == tera * 1e12


def test_a_device_without_a_known_peak_has_no_such_metric(tmp_path) -> None:
    assert half_precision_peak("Some New Thing") is None
    assert detect("cpu").peak_flops(torch.bfloat16) is None
    dtype = {"fsdp_config": {"dtype": "float32"}}
    engine = FSDPEngine(tiny_model(tmp_path / "m"), role_cfg=dtype, device="cpu")
    assert engine.cost() is None


def cost_of_a_rank(path: str) -> tuple[float, float, float]:
    from verl.engine.training.fsdp.engine import FSDPEngine
    from verl.platform.cpu import CpuPlatform

    platform = CpuPlatform()
    platform.peak_flops = Known().peak_flops  # type: ignore[method-assign]
    engine = FSDPEngine(path, role_cfg={"fsdp_config": {"dtype": "bfloat16"}}, device=platform)
    cost = engine.cost()
    return cost.per_token, cost.per_pair, cost.peak


def test_shards_cost_what_the_whole_does_on_so_many_devices(tmp_path) -> None:
    path = tiny_model(tmp_path / "m", tied=True)
    whole = model_cost(AutoModelForCausalLM.from_pretrained(path), Known(), torch.bfloat16)
    assert ranks.run(cost_of_a_rank, 2, str(path)) == [(whole.per_token, whole.per_pair, 2e12)] * 2
