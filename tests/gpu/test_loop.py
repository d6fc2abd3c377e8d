"""The whole loop as a user starts it, on a device: trains, agrees with itself, resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra", reason="hydra-core is not installed")
pytest.importorskip("math_verify", reason="math-verify is not installed")

from tests.gpu.conftest import KIND
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
