"""Workers on a cluster that die, hang or stand still: what goes on, what ends, and what is said."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

import pytest

from tests import vllm_processes
from tests.chaos import ray_plans
from tests.chaos.fork_server import Run
from tests.chaos.fork_server import until as waited_for
from tests.chaos.killing import sealed_steps
from tests.chaos.ray_runs import (
    LIMIT_S,
    events,
    last_word,
    log_of,
    nothing_lost,
    pid_of,
    replaced_once,
    reports,
    responses,
    slow_sampling,
    started,
    steps_logged,
    until,
)
from tests.runs import from_step, records, weights
from tests.vllm_cases import require_vllm, vllm_model

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Begin = Callable[..., AbstractContextManager[Run]]


@pytest.fixture(scope="module")
def begin(fork_server, tiny, ray_address) -> Begin:
    """`with begin(out, *words, **environment) as run`: a short run of two ranks on the shared cluster."""
    return partial(started, fork_server, tiny, ray_address)


@pytest.fixture(scope="module")
def whole(begin, tmp_path_factory) -> Path:
    """Two steps in one go."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with begin(out) as run:
        assert run.wait(200) == 0, log_of(out)[-3000:]
    return out


def test_a_sampler_killed_in_a_step_is_replaced_and_nothing_is_lost_or_doubled(begin, tmp_path) -> None:
    out, mark = tmp_path / "out", tmp_path / "sampling"
    with begin(out, **slow_sampling(tmp_path, mark)) as run:
        until(lambda: steps_logged(out) >= 1, run, out)
        mark.unlink()
        until(mark.exists, run, out)
        time.sleep(0.5)  # step 2 is being sampled
        os.kill(pid_of(out, "sampler 1"), signal.SIGKILL)
        assert run.wait(300) == 0, log_of(out)[-3000:]
    assert "sampler 1" in replaced_once(out)["sampler"]
    assert sorted(records(out)) == [1, 2]
    nothing_lost(out, [1, 2])


# Two mini-batches a step: in the middle of an update is before its second one.
KILLS = [("update", 2, "update_actor"), ("save", 1, "save_checkpoint")]


@pytest.mark.parametrize(
    "kills", [KILLS, pytest.param([("gen", 0, "gen")], marks=pytest.mark.long)], ids=["two", "gen"]
)
def test_a_training_worker_killed_ends_the_run_and_a_restart_is_exact(
    begin, whole, ray_address, tmp_path, kills
) -> None:
    """In an update and in a save, or while responses are sampled, each time from the checkpoint of step 1, which stays
    the newest; what comes in the end is bit for bit the same."""
    out = from_step(whole, 1, tmp_path / "run")
    for where, call, phase in kills:
        mark = tmp_path / where
        if where == "gen":
            plug = slow_sampling(tmp_path, mark)
        else:
            values = {"rank": 1, "where": where, "call": call, "mark": mark}
            plug = ray_plans.plan(tmp_path / "plug", f"dying_in_{where}", ray_plans.DYING_RANK, **values)
        with begin(out, **plug) as run:
            until(mark.exists, run, out)
            pid = pid_of(out, "training worker 1")
            if where == "gen":
                os.kill(pid, signal.SIGKILL)
            assert run.wait(LIMIT_S) == 1
        last, node = last_word(out), ray_address.partition(":")[0]
        assert f"training worker 1 (node {node}, process {pid}) died in {phase}: " in last
        assert "killed by a signal" in last and f"to go on from {out / 'global_step_1'}" in last
        # The watching thread may name the pause after the phase in which the call failed.
        assert f"training worker 1 (node {node}, process {pid}) died in" in events(out, "worker_died")[-1]["error"]
        assert sealed_steps(out) == [1] and (out / "latest_checkpointed_iteration.txt").read_text() == "1"
    with begin(out) as run:
        assert run.wait(200) == 0, log_of(out)[-3000:]
    assert f"resuming from {out}/global_step_1, step 1" in log_of(out)
    assert records(out)[2] == records(whole)[2] and weights(out, 2) == weights(whole, 2)
    assert sealed_steps(out) == [1, 2] and not list(out.glob("*.tmp"))


@pytest.mark.long
def test_any_worker_killed_at_any_moment_is_named_or_replaced(begin, tmp_path) -> None:
    """CHAOS_KILLS runs, in each a worker at a random moment: the run goes on, or ends within LIMIT_S and names it."""
    rng = random.Random(seed := int(os.environ.get("CHAOS_SEED") or random.randrange(10**6)))
    for number in range(int(os.environ.get("CHAOS_KILLS", "2"))):
        out = tmp_path / f"run{number}"
        victim = rng.choice(["sampler 0", "sampler 1", "training worker 0", "training worker 1"])
        story = f"CHAOS_SEED={seed}, kill {number}: {victim}"
        with begin(out) as run:
            until(lambda out=out: events(out, "workers"), run, out)
            time.sleep(rng.uniform(0, 6))
            with suppress(ProcessLookupError):
                os.kill(pid_of(out, victim), signal.SIGKILL)
            killed = time.monotonic()
            if run.wait(300):
                assert time.monotonic() - killed < LIMIT_S and victim in last_word(out), story
        with begin(out) as run:
            assert run.wait(200) == 0, f"{story}\n{log_of(out)[-3000:]}"
        assert sorted(records(out)) == [1, 2], story


@pytest.mark.long
def test_a_sampler_that_stands_still_is_named_and_may_go_on(begin, whole, tmp_path) -> None:
    """One of the samplers stops itself in the middle of its responses; how busy the machine is does not matter."""
    out, mark = tmp_path / "run", tmp_path / "stopped"
    plan = ray_plans.plan(tmp_path / "plug", "standing_still", ray_plans.STANDING_STILL, call=5, mark=mark)
    with begin(out, "trainer.watchdog_timeout=6", **plan) as run:
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


def test_sigterm_stops_a_run_on_a_cluster_at_a_safe_point(begin, tmp_path) -> None:
    out = tmp_path / "out"
    with begin(out, "trainer.total_training_steps=500") as run:
        until(lambda: steps_logged(out) >= 1, run, out)
        run.kill(signal.SIGTERM)
        assert run.wait(LIMIT_S) == 130, log_of(out)[-3000:]
    assert "SIGTERM: stopping after what is in progress" in log_of(out)
    assert "interrupted. Run the same command again" in last_word(out)
    assert events(out, "run_end")[-1]["status"] == "interrupted"


def test_the_watchdog_names_the_rank_that_hangs_and_where(begin, tmp_path) -> None:
    out = tmp_path / "out"
    hang = ray_plans.plan(tmp_path / "plug", "hanging_rank", ray_plans.HANGING_RANK, rank=1, call=1)
    with begin(out, "trainer.watchdog_timeout=6", **hang) as run:
        report = until(lambda: reports(out, "update_actor"), run, out)[0]
        pids = [w["pid"] for w in events(out, "workers")[0]["workers"]]
    lines = report["extra"].splitlines()
    assert any("training worker 1" in line and "hang_here" in line for line in lines), report["extra"][:3000]
    assert any("training worker 0" in line and "waits for other ranks" in line for line in lines), lines[:5]
    # Workers go when their driver is killed.
    waited_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), pause=0.2)


@pytest.mark.long
def test_the_watchdog_names_the_sampler_that_does_not_start(begin, tmp_path) -> None:
    out = tmp_path / "out"
    hang = ray_plans.plan(tmp_path / "plug", "hanging_start", ray_plans.HANGING_START, number=1)
    with begin(out, "trainer.watchdog_timeout=6", **hang) as run:
        stuck = lambda: [e for e in reports(out, "start-up") if "hang_in_start" in e["extra"]]  # noqa: E731
        found = until(stuck, run, out)
    first, *lines = found[0]["extra"].splitlines()
    assert first.startswith("starting the samplers: waiting for sampler 1 (node ")
    assert any("sampler 1" in line and "hang_in_start" in line for line in lines), lines
    assert not any(line.startswith("sampler 0") for line in lines), lines


@pytest.mark.long
def test_pushes_go_on_while_the_only_sampler_is_started_again(begin, tmp_path) -> None:
    """It dies while the trainer computes, and so does the first that takes its place. The push of the update finds no
    sampler to send to; the fresh one then asks for what is current."""
    out, marks = tmp_path / "out", tmp_path / "marks"
    marks.mkdir()
    plug = ray_plans.plan(tmp_path / "plug", "slow_restart", ray_plans.SLOW_RESTART, marks=marks, seconds=5)
    words = (
        "trainer.nnodes=1",
        "trainer.max_staleness=2",
        "trainer.total_training_steps=4",
        "trainer.save_freq=-1",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
    )
    with begin(out, *words, **plug) as run:
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


@pytest.mark.long
def test_vllm_that_dies_in_a_living_host_is_replaced_and_nothing_is_lost_or_doubled(begin, tmp_path) -> None:
    require_vllm()
    out, mark = tmp_path / "out", tmp_path / "killed"
    words = (
        f"actor_rollout_ref.model.path={vllm_model(tmp_path / 'heads', 'qwen2', tied=True)}",
        "trainer.nnodes=1",
        "actor_rollout_ref.rollout.name=vllm",
        "trainer.save_freq=-1",
    )
    forked = vllm_processes.variables()
    # 12 responses a step: the 20th is asked for while others of the second step are under way.
    plug = ray_plans.plan(tmp_path / "plug", "dying_vllm", ray_plans.DYING_VLLM, call=20, mark=mark)
    plugins = ",".join(one["VERL_USE_EXTERNAL_MODULES"] for one in (forked, plug))
    with begin(out, *words, **(forked | plug | {"VERL_USE_EXTERNAL_MODULES": plugins})) as run:
        assert run.wait(600) == 0, log_of(out)[-4000:]
    assert mark.exists()
    replaced_once(out)
    assert sorted(records(out)) == [1, 2]
    nothing_lost(out, [1, 2])
