"""Tests that run on the pretend device (`test_pretend.py` starts them): counts of the device path, and whole steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.test_vision_runs import VisionRun
from tests.pretend.device import Counts, counting
from tests.runs import TinyRun
from tests.tiny import tiny_model
from tests.unit.engine.training.engine_cases import rows_of, simple_loss
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.trainer.main_ppo import main


def trained(folder: Path, layers: int, sizes: list[int], *, step: bool) -> Counts:
    """Counts of one update after the first (or of a forward pass) with layers of Qwen3-0.6B's shape."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, "num_attention_heads": 16}
    path = str(tiny_model(folder / f"{layers}", "qwen3", num_hidden_layers=layers, num_key_value_heads=8, **shape))
    role = {"fsdp_config": {"dtype": "bfloat16"}, "optim": {"lr": 1e-6}, "ppo_max_token_len_per_gpu": 100000}
    engine, rows = FSDPEngine(path, role_cfg=role, device="cuda"), rows_of([(64, sizes)])
    for _ in range(2):  # the first step makes the optimizer's state
        with counting() as counts:
            if step:
                engine.step(rows, simple_loss(sum(sizes)), ("log_probs",), temperature=1.0)
            else:
                engine.forward(rows, temperature=1.0)
    return counts


def test_launches_and_bytes_of_training(tmp_path: Path) -> None:
    few, many = [50] * 2, [50] * 6
    for step, most, most_outside in ((False, 28, 45), (True, 69, 84)):
        one, two = (trained(tmp_path, n, many, step=step) for n in (1, 2))
        layer = two.launches.total() - one.launches.total()
        outside = one.launches.total() - layer
        print(f"step {step}: launches a layer {layer}, outside {outside}")
        assert layer <= most and outside <= most_outside
    less = [trained(tmp_path, n, few, step=True).bytes for n in (1, 2)]
    grown = (two.bytes - one.bytes - (less[1] - less[0])) / (49 * 4)
    print(f"KB a token and layer {grown / 1000:.0f}")
    assert grown <= 489e3


FEATURES = {
    "reference, offload, top-p": [
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
        "actor_rollout_ref.rollout.top_p=0.9",
    ],
    "critic": ["algorithm.adv_estimator=gae", "critic.model.path={model}", "critic.optim.lr=1e-3"],
    "LoRA": ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"],
    "images": [],
    "determinism": ["actor_rollout_ref.actor.fsdp_config.full_determinism=True"],
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_step_of(feature: str, tiny: TinyRun, tmp_path: Path) -> None:
    tiny = VisionRun(tmp_path / "vision") if feature == "images" else tiny
    words = [word.format(model=tiny.model) for word in FEATURES[feature]]
    words += ["trainer.device=cuda", "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16", "trainer.test_freq=-1"]
    try:
        assert main(tiny.overrides(tmp_path / "out", "trainer.total_training_steps=1", *words)) == 0
    finally:
        torch.use_deterministic_algorithms(False)
