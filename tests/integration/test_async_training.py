"""Asynchronous training through the command line: a process that samples, one that trains, answers that may lag."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import TinyRun, main_ppo, records

POOLS = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"]


def trained(run: Path, step: int) -> list[str]:
    """Prompts of a step, in the order they were drawn."""
    rows = map(json.loads, (run / f"trajectories/{step}.jsonl").read_text().splitlines())
    return list(dict.fromkeys(row["uid"] for row in rows))


def test_in_one_process_it_is_refused_with_what_to_do(tmp_path: Path) -> None:
    tiny = TinyRun(tmp_path / "tiny")
    done = main_ppo(tiny.overrides(tmp_path / "out", "trainer.max_staleness=1"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "share one model here" in done.stderr and "rollout.nnodes=1" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_step_off_trains_on_the_same_prompts_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    tiny = TinyRun(tmp_path / "tiny")
    plain, ahead = tmp_path / "plain", tmp_path / "ahead"
    steady = ["trainer.test_freq=-1", "trainer.val_before_train=False"]
    done = main_ppo(tiny.overrides(plain, *steady, "trainer.total_training_steps=5"))
    assert done.returncode == 0, done.stderr[-3000:]
    words = [*POOLS, *steady, "trainer.max_staleness=2", "algorithm.rollout_correction.rollout_is=token"]
    for steps in (3, 5):
        done = main_ppo(tiny.overrides(ahead, *words, f"trainer.total_training_steps={steps}"), timeout=420)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming from" in done.stderr and "global_step_3" in done.stderr
    found = records(ahead)
    assert sorted(found) == [1, 2, 3, 4, 5]
    worst = "training/off_policy/trajectory_staleness_worst/max"
    assert [found[s][worst] for s in (1, 2, 3)] == [0, 1, 2], "each step's answers begin as early as they may"
    assert [found[s][worst] for s in (4, 5)] == [0, 1], (
        "what was in flight was sampled again after the resume"
    )
    for step in found:
        assert trained(ahead, step) == trained(plain, step), "the same prompts in the same order"
        assert found[step]["training/off_policy/evicted_samples"] == 0
        assert found[step]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.2)
    timeline = [json.loads(line) for line in (ahead / "timeline.jsonl").read_text().splitlines()]
    assert [record["step"] for record in timeline] == [1, 2, 3, 4, 5]
    assert all(record["begin"] < record["end"] for record in timeline)
