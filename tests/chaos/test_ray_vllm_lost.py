"""vLLM's own process dies in the middle of a step, its host lives: the host leaves and a fresh one samples on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import ray_plans
from tests.chaos.ray_runs import log_of, nothing_lost, replaced_once, started
from tests.ray_cluster import cluster_of
from tests.runs import TinyRun, records
from tests.vllm_cases import require_vllm, vllm_model

require_vllm()
pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_dead_engine_core_is_replaced_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    tiny, out, mark = TinyRun(tmp_path / "tiny"), tmp_path / "out", tmp_path / "killed"
    tiny.model = vllm_model(tmp_path / "heads", "qwen2", tied=True)
    words = ("trainer.nnodes=1", "actor_rollout_ref.rollout.name=vllm", "trainer.save_freq=-1")
    # 12 responses a step: the 20th is asked for while others of the second step are under way.
    plug = ray_plans.plan(tmp_path / "plug", "dying_vllm", ray_plans.DYING_VLLM, call=20, mark=mark)
    with cluster_of(1) as cluster, started(tiny, out, cluster.address, *words, **plug) as run:
        assert run.wait(600) == 0, log_of(out)[-4000:]
    assert mark.exists()
    replaced_once(out)
    assert sorted(records(out)) == [1, 2]
    nothing_lost(out, [1, 2])
