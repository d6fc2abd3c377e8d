"""vLLM in a sampler host of its own, fed by a training rank through shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import TinyRun, main_ppo, records
from tests.vllm_cases import require_vllm, vllm_model

require_vllm()
pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_two_steps_over_ray(tmp_path: Path) -> None:
    run, out = TinyRun(tmp_path), tmp_path / "out"
    run.model = vllm_model(tmp_path / "heads", "qwen2", tied=True)
    words = (
        "actor_rollout_ref.rollout.name=vllm",
        "+ray_kwargs.ray_init.address=local",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.verify_weight_sync=True",
        "trainer.logprob_diff_limit=1e-4",
    )
    done = main_ppo(run.overrides(out, *words), timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = records(out)
    assert sorted(found) == [1, 2]
    assert found[2]["actor/grad_norm"] > 0
