"""LoRA over two ranks and two samplers: the adapter alone moves, the run is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray_cluster import cluster_of
from tests.runs import TinyRun, main_ppo, records

pytest.importorskip("ray")
pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORDS = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "trainer.verify_weight_sync=True",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
)


def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    tiny = TinyRun(tmp_path / "tiny")
    done = main_ppo(tiny.overrides(tmp_path / "alone", *WORDS), timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    two = tiny.overrides(tmp_path / "two", *WORDS, "trainer.nnodes=2", "trainer.n_gpus_per_node=1")
    with cluster_of(2, num_cpus=1) as cluster:
        for steps in (1, 2):
            words = [*two, f"trainer.total_training_steps={steps}"]
            done = main_ppo(words, timeout=400, RAY_ADDRESS=cluster.address)
            assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "resuming from" in done.stderr and "global_step_1" in done.stderr
    one, both = records(tmp_path / "alone"), records(tmp_path / "two")
    for step in (1, 2):
        assert both[step]["training/rollout_logprob_abs_diff/max"] < 1e-4
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean"):
            assert both[step][name] == pytest.approx(one[step][name], rel=2e-3, abs=2e-4), (step, name)
    assert (tmp_path / "two/global_step_2/actor/lora_adapter/adapter_model.safetensors").is_file()
