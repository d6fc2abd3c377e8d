"""Samplers on a node of their own: weights come by broadcast and relay, and both sides hold the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ray_cluster import cluster_of
from tests.runs import TinyRun, records

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_samplers_on_nodes_that_do_not_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is this process, to see which nodes got a broadcast; the workers are Ray's as ever."""
    import ray

    from verl.trainer.main_ppo import main
    from verl.workers.ray.remote_weight_sync import RemoteWeightSync

    tiny, relays, seen = TinyRun(tmp_path / "run"), RemoteWeightSync._relays, []

    def watched(self: RemoteWeightSync, routes: Any, *rest: Any) -> list[Any]:
        refs = relays(self, routes, *rest)
        seen.append((len(routes.relayed), len(set(self._nodes)), rest[-1][0][-1]["timeout"]))
        return refs

    monkeypatch.setattr(RemoteWeightSync, "_relays", watched)
    with cluster_of(3) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        try:
            status = main(
                tiny.overrides(
                    tmp_path / "out", "trainer.nnodes=1", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=2",
                    "actor_rollout_ref.rollout.nnodes=2", "actor_rollout_ref.rollout.n_gpus_per_node=1",
                    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
                    "actor_rollout_ref.nccl_timeout=123", "trainer.save_freq=-1", "data.val_files=null", "trainer.verify_weight_sync=True",
                )
            )  # fmt: skip
        finally:
            ray.shutdown()
    assert status == 0
    assert len(seen) == 3 and all(far >= 1 and nodes == 1 and limit == 123 for far, nodes, limit in seen)
    found = records(tmp_path / "out")
    assert sorted(found) == [1, 2]
    assert all(found[step]["training/rollout_logprob_abs_diff/max"] < 1e-4 for step in found)
