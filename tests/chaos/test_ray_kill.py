"""Workers on a cluster of two nodes that die, hang or lose their node: what goes on, what ends, and what is said."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.chaos import ray_plans
from tests.chaos.ray_runs import (
    LIMIT_S,
    events,
    last_word,
    nothing_lost,
    pid_of,
    replaced_once,
    reports,
    started,
    steps_logged,
    until,
)
from tests.ray_cluster import cluster_of
from tests.runs import TinyRun, records

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster():
    with cluster_of(2) as running:
        yield running


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyRun:
    return TinyRun(tmp_path_factory.mktemp("tiny"))


def test_a_sampler_killed_in_a_step_is_replaced_and_nothing_is_lost_or_doubled(
    tiny, cluster, tmp_path
) -> None:
    out = tmp_path / "out"
    slow = ray_plans.plan(tmp_path / "plug", "slow_sampling", ray_plans.SLOW_SAMPLING, seconds=0.12)
    with started(tiny, out, cluster.address, **slow) as run:
        until(lambda: steps_logged(out) >= 1, run, out)
        time.sleep(1.0)  # 24 tokens take 3 s: step 2 is being sampled
        os.kill(pid_of(out, "sampler 1"), signal.SIGKILL)
        assert run.wait(300) == 0, (tmp_path / "out.log").read_text()[-3000:]
    assert "sampler 1" in replaced_once(out)["sampler"]
    assert sorted(records(out)) == [1, 2]
    nothing_lost(out, [1, 2])


def test_a_training_worker_killed_while_sampling_ends_the_run_and_a_restart_is_exact(
    tiny, cluster, tmp_path
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    slow = ray_plans.plan(tmp_path / "plug", "slow_sampling", ray_plans.SLOW_SAMPLING, seconds=0.12)
    with started(tiny, out, cluster.address, **slow) as run:
        until(lambda: steps_logged(out) >= 1, run, out)
        time.sleep(1.0)  # step 2 is being sampled
        os.kill(pid_of(out, "training worker 1"), signal.SIGKILL)
        killed = time.monotonic()
        assert run.wait(LIMIT_S) == 1
        assert time.monotonic() - killed < LIMIT_S
    last = last_word(out)
    assert "training worker 1" in last and "died in gen: " in last and "killed by a signal" in last
    assert events(out, "worker_died")[0]["error"] in last
    for folder in (out, whole):
        with started(tiny, folder, cluster.address) as run:
            assert run.wait(300) == 0, (tmp_path / f"{folder.name}.log").read_text()[-3000:]
    assert records(out) == records(whole)


def test_sigterm_stops_a_run_on_a_cluster_at_a_safe_point(tiny, cluster, tmp_path) -> None:
    out = tmp_path / "out"
    with started(tiny, out, cluster.address, "trainer.total_training_steps=500") as run:
        until(lambda: steps_logged(out) >= 1, run, out)
        run.terminate()
        assert run.wait(LIMIT_S) == 130, (tmp_path / "out.log").read_text()[-3000:]
    assert "SIGTERM: stopping after what is in progress" in (tmp_path / "out.log").read_text()
    assert "interrupted. Run the same command again" in last_word(out)
    assert events(out, "run_end")[-1]["status"] == "interrupted"


def test_the_watchdog_names_the_rank_that_hangs_and_where(tiny, cluster, tmp_path) -> None:
    out = tmp_path / "out"
    hang = ray_plans.plan(tmp_path / "plug", "hanging_rank", ray_plans.HANGING_RANK, rank=1, call=2)
    with started(tiny, out, cluster.address, "trainer.watchdog_timeout=6", **hang) as run:
        report = until(lambda: reports(out, "update_actor"), run, out)[0]
        pids = [w["pid"] for w in events(out, "workers")[0]["workers"]]
    lines = report["extra"].splitlines()
    assert any("training worker 1" in line and "hang_here" in line for line in lines), report["extra"][:3000]
    assert any("training worker 0" in line and "waits for other ranks" in line for line in lines), lines[:5]
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.2)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "workers go when their driver is killed"


def test_the_watchdog_names_the_sampler_that_does_not_start(tiny, cluster, tmp_path) -> None:
    out = tmp_path / "out"
    hang = ray_plans.plan(tmp_path / "plug", "hanging_start", ray_plans.HANGING_START, number=1)
    with started(tiny, out, cluster.address, "trainer.watchdog_timeout=6", **hang) as run:
        stuck = lambda: [e for e in reports(out, "start-up") if "hang_in_start" in e["extra"]]  # noqa: E731
        found = until(stuck, run, out)
    first, *lines = found[0]["extra"].splitlines()
    assert first.startswith("starting the samplers: waiting for sampler 1 (node ")
    assert any("sampler 1" in line and "hang_in_start" in line for line in lines), lines
    assert not any(line.startswith("sampler 0") for line in lines), lines


def test_a_lost_node_ends_the_run_with_that_said(tiny, cluster, tmp_path) -> None:
    out = tmp_path / "out"
    slow = ray_plans.plan(tmp_path / "plug", "slow_sampling", ray_plans.SLOW_SAMPLING, seconds=0.12)
    with started(tiny, out, cluster.address, **slow) as run:
        until(lambda: steps_logged(out) >= 1, run, out)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        assert run.wait(LIMIT_S) == 1
    last = last_word(out)
    assert re.search(r"training worker [01] .* died in gen: its node is lost", last), last
