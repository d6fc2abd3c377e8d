"""Runs on images with vLLM through the command line, with the arguments that the public commands give it.

In `make test` the engine with images is in test_vllm_vision.py, the command with vLLM in test_vllm_train.py.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.integration.test_vision_runs import VisionRun
from tests.runs import main_ppo, records
from tests.tiny import tiny_vision_model
from tests.vllm_cases import require_vllm

require_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
BESIDE = Path(sys.prefix) / "torchvision"
THERE = importlib.util.find_spec("torchvision") is not None or BESIDE.is_dir()
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.skipif(not THERE, reason=f"vLLM reads models that see images with torchvision; none in {BESIDE}")
@pytest.mark.parametrize(("ranks", "more"), [(1, ()), (2, ("+ray_kwargs.ray_init.address=local",))])
def test_steps_on_images(tmp_path: Path, ranks: int, more: tuple[str, ...]) -> None:
    """Sampler and trainer agree before and after an update, images with and without in one batch."""
    run, out = VisionRun(tmp_path), tmp_path / "out"
    run.model = tiny_vision_model(tmp_path / "heads", "qwen2_5_vl", head=32)
    words = (
        f"trainer.n_gpus_per_node={ranks}",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.dtype=float32",
        f"+{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache=True",
        f"{ROLLOUT}.limit_images=2",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.verify_weight_sync=True",
        *more,
    )
    path = f"{BESIDE}:{Path(__file__).parents[2]}"
    done = main_ppo(run.overrides(out, *words), timeout=800, PYTHONPATH=path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = records(out)
    assert sorted(found) == [1, 2] and found[2]["actor/grad_norm"] > 0
    for record in found.values():
        assert record["training/rollout_logprob_abs_diff/max"] < 1e-3
