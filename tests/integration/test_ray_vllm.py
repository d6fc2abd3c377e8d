"""vLLM in a sampler host of its own, fed by training ranks through shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import TinyRun, main_ppo, records
from tests.vllm_cases import require_vllm, vllm_model

require_vllm()
pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

ROLLOUT = "actor_rollout_ref.rollout"


def test_two_steps_over_ray(tmp_path: Path) -> None:
    """A Ray of the run's own: two ranks, and one vLLM over two devices of the node, in half precision that is made
    where the weights are sent from. Each part is in `make test`: vLLM on a cluster in test_ray_kill.py, two devices in
    test_vllm_weights.py, a Ray of one's own in test_ray_ports.py, the data type in test_weight_sync_buckets.py. Those
    sent are those that arrive; the first step compares the log-probs of both."""
    run, out = TinyRun(tmp_path), tmp_path / "out"
    run.model = vllm_model(tmp_path / "heads", "qwen2", tied=True)
    words = (
        "trainer.n_gpus_per_node=2",
        "+ray_kwargs.ray_init.address=local",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.dtype=bfloat16",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.verify_weight_sync=True",
    )
    done = main_ppo(run.overrides(out, *words), timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = records(out)
    assert sorted(found) == [1, 2]
    assert found[2]["actor/grad_norm"] > 0
    assert found[2]["training/rollout_logprob_abs_diff/mean"] < 0.1
