"""The only sampler of an asynchronous run dies while the trainer computes, and so does the first that takes its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.chaos import ray_plans
from tests.chaos.ray_runs import events, log_of, pid_of, responses, started, until
from tests.ray_cluster import cluster_of
from tests.runs import TinyRun, records

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WORDS = (
    "trainer.nnodes=1",
    "trainer.max_staleness=2",
    "trainer.total_training_steps=4",
    "trainer.save_freq=-1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
)


def test_pushes_go_on_while_the_sampler_is_started_again(tmp_path: Path) -> None:
    """The push of the update finds no sampler to send to; the fresh one then asks for what is current."""
    tiny, out, marks = TinyRun(tmp_path / "tiny"), tmp_path / "out", tmp_path / "marks"
    marks.mkdir()
    plug = ray_plans.plan(tmp_path / "plug", "slow_restart", ray_plans.SLOW_RESTART, marks=marks, seconds=5)
    with cluster_of(1) as cluster, started(tiny, out, cluster.address, *WORDS, **plug) as run:
        until(lambda: (marks / "updating").exists(), run, out)
        os.kill(pid_of(out, "sampler 0"), signal.SIGKILL)
        (marks / "killed").touch()
        assert run.wait(300) == 0, log_of(out)[-4000:]
    died, again = events(out, "sampler_died"), events(out, "sampler_restarted")
    assert len(died) == 2 and "starting a sampler again" in died[1]["reason"]
    assert len(again) == 1 and not events(out, "rollout_failure")
    found = records(out)
    assert sorted(found) == [1, 2, 3, 4]
    for step in found:
        rows = responses(out, step)
        assert len(rows) == len(set(rows)) == 12, "every response of every group, once"
        assert found[step]["training/off_policy/trajectory_staleness_worst/max"] <= 2
