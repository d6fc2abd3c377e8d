"""The whole loop as a user starts it, on a device: trains, agrees with itself, resumes; a step of each feature."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("hydra", reason="hydra-core is not installed")
pytest.importorskip("math_verify", reason="math-verify is not installed")

from tests.gpu.conftest import KIND
from tests.integration.test_vision_runs import VisionRun
from tests.runs import TinyRun


def train(*words: str) -> None:
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=os.environ)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def metrics(out: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "actor/pg_loss" in record:
            found[record["step"]] = record
    return found


@pytest.mark.timeout(230)  # two runs
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_trains_and_goes_on(tmp_path: Path, dtype: str, record_property: Any) -> None:
    tiny, out = TinyRun(tmp_path / "tiny"), tmp_path / "out"
    words = [f"trainer.device={KIND}", f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}"]
    words += ["actor_rollout_ref.actor.use_kl_loss=True", "trainer.test_freq=-1"]
    train(*tiny.overrides(out, *words, "trainer.total_training_steps=2"))
    train(*tiny.overrides(out, *words, "trainer.total_training_steps=3"))
    found = metrics(out)
    assert sorted(found) == [1, 2, 3]
    apart = max(m["training/rollout_logprob_abs_diff/max"] for m in found.values())
    record_property("sampler_against_trainer_max", apart)
    assert apart < (1e-3 if dtype == "float32" else 0.3)
    for name in ("timing_s/gen", "timing_s/update_actor", "perf/max_memory_allocated_gb"):
        if name in found[3]:
            record_property(name, found[3][name])


FEATURES = {
    "critic, determinism": [
        *("algorithm.adv_estimator=gae", "critic.model.path={model}", "critic.optim.lr=1e-3"),
        "actor_rollout_ref.actor.fsdp_config.full_determinism=True",
    ],
    "LoRA, top-p": [
        *("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"),
        "actor_rollout_ref.rollout.top_p=0.9",
    ],
    "images, reference, offload": [
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    ],
}


@pytest.mark.parametrize("features", FEATURES)
def test_a_step_of(features: str, tiny: TinyRun, tmp_path: Path) -> None:
    from verl.trainer.main_ppo import main

    run, out = VisionRun(tmp_path / "vision") if "images" in features else tiny, tmp_path / "out"
    words = [word.format(model=run.model) for word in FEATURES[features]]
    words += [f"trainer.device={KIND}", "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16", "trainer.test_freq=-1"]
    try:
        assert main(run.overrides(out, "trainer.total_training_steps=1", *words)) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert metrics(out)[1]["training/rollout_logprob_abs_diff/max"] < 0.3
