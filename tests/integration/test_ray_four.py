"""A run over four nodes: two ranks on two of them, samplers on the two others, which get the weights by relay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ray_cluster import cluster_of
from tests.runs import TinyRun, main_ppo, records

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
APART = (
    "trainer.nnodes=2",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.nnodes=2",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.verify_weight_sync=True",
)


def test_two_ranks_and_two_samplers_on_four_nodes(tmp_path: Path) -> None:
    """A node has one core, so that no two of them share one."""
    out = tmp_path / "out"
    with cluster_of(4, num_cpus=1, object_store_memory=80 << 20) as cluster:
        words = TinyRun(tmp_path / "tiny").overrides(out, *APART)
        done = main_ppo(words, timeout=400, RAY_ADDRESS=cluster.address)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    plan = next(e for e in events if e["event"] == "plan")
    assert "2 ranks on 2 nodes" in plan["device"] and "2 samplers" in plan["device"]
    found = records(out)
    assert sorted(found) == [1, 2] and (out / "global_step_2").is_dir()
    for record in found.values():
        assert record["training/rollout_logprob_abs_diff/max"] < 1e-4, (
            "the far samplers hold what the ranks trained"
        )
