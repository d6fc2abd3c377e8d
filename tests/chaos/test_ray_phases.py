"""A training worker killed in the middle of an update and of a save, and a sampler that stands still for a while."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.chaos import ray_plans
from tests.chaos.killing import sealed_steps
from tests.chaos.ray_runs import (
    LIMIT_S,
    events,
    last_word,
    log_of,
    pid_of,
    reports,
    started,
    until,
)
from tests.ray_cluster import cluster_of
from tests.runs import TinyRun, records, weights

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHORT = "data.max_response_length=12"


@pytest.fixture(scope="module")
def cluster():
    with cluster_of(2) as running:
        yield running


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyRun:
    return TinyRun(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def whole(tiny, cluster, tmp_path_factory) -> Path:
    """Two steps in one go."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with started(tiny, out, cluster.address, SHORT) as run:
        assert run.wait(200) == 0, log_of(out)[-3000:]
    return out


def test_a_training_worker_killed_in_an_update_and_in_a_save(tiny, cluster, whole, tmp_path) -> None:
    """Both times from the checkpoint of step 1, which stays the newest; what comes in the end is bit for bit the same."""
    out = tmp_path / "run"
    out.mkdir()
    shutil.copytree(whole / "global_step_1", out / "global_step_1")
    (out / "latest_checkpointed_iteration.txt").write_text("1")
    # Two mini-batches a step: in the middle of an update is before its second one.
    for where, call, phase in (("update", 2, "update_actor"), ("save", 1, "save_checkpoint")):
        mark = tmp_path / where
        dying = ray_plans.plan(
            tmp_path / "plug",
            f"dying_in_{where}",
            ray_plans.DYING_RANK,
            rank=1,
            where=where,
            call=call,
            mark=mark,
        )
        with started(tiny, out, cluster.address, SHORT, **dying) as run:
            until(mark.exists, run, out)
            pid = pid_of(out, "training worker 1")
            assert run.wait(LIMIT_S) == 1
        last = last_word(out)
        assert (
            f"training worker 1 (node {cluster.address.partition(':')[0]}, process {pid}) died in {phase}: "
            in last
        )
        assert "killed by a signal" in last and f"to go on from {out / 'global_step_1'}" in last
        assert sealed_steps(out) == [1] and (out / "latest_checkpointed_iteration.txt").read_text() == "1"
    with started(tiny, out, cluster.address, SHORT) as run:
        assert run.wait(200) == 0, log_of(out)[-3000:]
    assert f"resuming from {out}/global_step_1, step 1" in log_of(out)
    assert records(out)[2] == records(whole)[2] and weights(out, 2) == weights(whole, 2)
    assert sealed_steps(out) == [1, 2] and not list(out.glob("*.tmp"))


def test_a_sampler_that_stands_still_is_named_and_may_go_on(tiny, cluster, whole, tmp_path) -> None:
    """One of the samplers stops itself in the middle of its responses; how busy the machine is does not matter."""
    out, mark = tmp_path / "run", tmp_path / "stopped"
    plan = ray_plans.plan(tmp_path / "plug", "standing_still", ray_plans.STANDING_STILL, call=5, mark=mark)
    with started(tiny, out, cluster.address, SHORT, "trainer.watchdog_timeout=6", **plan) as run:
        until(lambda: mark.exists() and mark.read_text().endswith("\n"), run, out)
        pid = int(mark.read_text())
        try:
            until(lambda: _called_stopped(out, pid), run, out)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert run.wait(200) == 0, log_of(out)[-3000:]
    assert not events(out, "sampler_died"), "it was slow, not dead"
    assert records(out) == records(whole), "and nothing is lost or doubled"


def _called_stopped(out: Path, pid: int) -> bool:
    """Whether the watchdog has said of a process, while the run waits for responses, that it is stopped."""
    lines = [line for report in reports(out, "gen") for line in report["extra"].splitlines()]
    return any(f"process {pid})" in line and "does not answer: it is stopped" in line for line in lines)
