"""vLLM's own process dies in the middle of a step, its host lives: the host leaves and a fresh one samples on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import ray_plans
from tests.chaos.ray_runs import answers, events, log_of, started
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
    # 12 answers a step: the 20th is asked for while others of the second step are under way.
    plug = ray_plans.plan(tmp_path / "plug", "dying_vllm", ray_plans.DYING_VLLM, call=20, mark=mark)
    with cluster_of(1) as cluster, started(tiny, out, cluster.address, *words, **plug) as run:
        assert run.wait(600) == 0, log_of(out)[-4000:]
    assert mark.exists()
    died, again = events(out, "sampler_died"), events(out, "sampler_restarted")
    assert len(died) == 1 and died[0]["unfinished"] > 0, died
    assert len(again) == 1 and again[0]["asked_again"] == died[0]["unfinished"]
    assert not events(out, "rollout_failure")
    found = records(out)
    assert sorted(found) == [1, 2]
    for step in (1, 2):
        rows = answers(out, step)
        assert len(rows) == len(set(rows)) == 12, "every answer of every group, once"
        assert found[step]["training/rollout_logprob_abs_diff/max"] < 1e-4, "sampled with the current weights"
