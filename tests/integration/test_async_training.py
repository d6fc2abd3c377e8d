"""Asynchronous training through the command line: a process that samples, one that trains, responses that may lag."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import records
from tests.vllm_cases import require_vllm, vllm_model

POOLS = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"]


def trained(run: Path, step: int) -> list[str]:
    """Prompts of a step, in the order they were drawn."""
    rows = map(json.loads, (run / f"trajectories/{step}.jsonl").read_text().splitlines())
    return list(dict.fromkeys(row["uid"] for row in rows))


def test_in_one_process_it_is_refused_with_what_to_do(fork_server, tiny, tmp_path: Path) -> None:
    done = fork_server.run(tiny.overrides(tmp_path / "out", "trainer.max_staleness=1"))
    assert done.status == 2 and "Traceback" not in done.stderr
    assert "share one model here" in done.stderr and "rollout.nnodes=1" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_step_off_trains_on_the_same_prompts_and_resumes(fork_server, tiny, ray_address, tmp_path: Path) -> None:
    plain, ahead = tmp_path / "plain", tmp_path / "ahead"
    steady = ["trainer.test_freq=-1", "trainer.val_before_train=False"]
    done = fork_server.run(tiny.overrides(plain, *steady, "trainer.total_training_steps=5"))
    assert done.status == 0, done.stderr[-3000:]
    words = [*POOLS, *steady, "trainer.max_staleness=2", "algorithm.rollout_correction.rollout_is=token"]
    for steps in (3, 5):
        argv = tiny.overrides(ahead, *words, f"trainer.total_training_steps={steps}")
        done = fork_server.run(argv, timeout=400, RAY_ADDRESS=ray_address)
        assert done.status == 0, done.stderr[-3000:]
    assert "resuming from" in done.stderr and "global_step_3" in done.stderr
    found = records(ahead)
    assert sorted(found) == [1, 2, 3, 4, 5]
    worst = "training/off_policy/trajectory_staleness_worst/max"
    assert [found[s][worst] for s in (1, 2, 3)] == [0, 1, 2], "each step's answers begin as early as they may"
    assert [found[s][worst] for s in (4, 5)] == [0, 1], "what was in flight was sampled again after the resume"
    for step in found:
        assert trained(ahead, step) == trained(plain, step), "the same prompts in the same order"
        assert found[step]["training/off_policy/evicted_samples"] == 0
        assert found[step]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.2)
    timeline = [json.loads(line) for line in (ahead / "timeline.jsonl").read_text().splitlines()]
    assert [record["step"] for record in timeline] == [1, 2, 3, 4, 5]
    assert all(record["begin"] < record["end"] for record in timeline)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["native", pytest.param("vllm", marks=pytest.mark.long)])
def test_responses_that_a_push_interrupts_are_continued(
    fork_server, tiny, ray_address, tmp_path: Path, engine: str
) -> None:
    """Samplers are the bottleneck, so every push finds responses half written. The learning rate is 0: whatever version
    wrote a token, sampler and trainer must agree on it, so what is lost or shifted at a seam is seen."""
    model, at_once = tiny.model, 8
    if engine == "vllm":
        require_vllm()
        at_once = 2  # a batch of eight at once is sampled in less than a training step
        model = vllm_model(tmp_path / "heads", "qwen2", tied=True)
    out = tmp_path / "out"
    words = [
        *POOLS,
        "trainer.max_staleness=1",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.rollout.name={engine}",
        f"actor_rollout_ref.rollout.max_num_seqs={at_once}",
        "data.max_response_length=96",
        "actor_rollout_ref.actor.optim.lr=0",
        "trainer.total_training_steps=3",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.val_before_train=False",
        "trainer.verify_weight_sync=True",
        "trainer.logprob_diff_limit=1e-4",
    ]
    done = fork_server.run(tiny.overrides(out, *words), timeout=600, RAY_ADDRESS=ray_address)
    assert done.status == 0, (done.stdout + done.stderr)[-4000:]
    found = records(out)
    assert sorted(found) == [1, 2, 3]
    seams = []
    for step, record in found.items():
        rows = [json.loads(line) for line in (out / f"trajectories/{step}.jsonl").read_text().splitlines()]
        assert len(rows) == 12
        for row in rows:
            assert step - 2 <= min(row["versions"]) <= max(row["versions"]) <= step - 1, "staleness is bounded"
        two = [row for row in rows if len(row["versions"]) == 2]
        assert record["training/off_policy/continued_samples"] >= len(two)
        seams += two
    assert seams, "no answer was in flight at any push"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["one process", pytest.param("ahead", marks=pytest.mark.long)])
def test_a_sampler_that_computes_another_model_ends_the_run_after_its_first_step(
    fork_server, tiny, tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """No checksum of a weight sync finds it: what arrived is right. The first batch's log-probs do, of a resumed run
    too."""
    out = tmp_path / "out"
    words = tiny.overrides(out, "trainer.test_freq=-1", "trainer.val_before_train=False")
    more = {}
    if kind == "ahead":
        words += [*POOLS, "trainer.max_staleness=1"]
        more["RAY_ADDRESS"] = request.getfixturevalue("ray_address")
    spoiled = "actor_rollout_ref.model.external_lib=tests.integration.plug_in_spoiled"
    runs = [[f"trainer.default_local_dir={tmp_path / 'new'}", spoiled]]
    if kind == "one process":
        assert fork_server.run([*words, "trainer.total_training_steps=2"]).status == 0
        runs.append([spoiled])
    for run in runs:
        done = fork_server.run([*words, *run], timeout=400, **more)
        assert done.status == 1 and "do not compute the same model" in done.stderr, done.stderr[-3000:]
    assert sorted(records(tmp_path / "new")) == [1]
    if kind == "one process":
        assert sorted(records(out)) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trainers_that_wait_sample_too(tiny, ray_address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler on the trainer's device beside one of its own: what it has begun when the trainer computes goes on in
    the other, and both hold the weights."""
    import ray

    from verl.rollout.resumable import ResumableGeneration
    from verl.trainer.main_ppo import main
    from verl.workers.ray.replicas import ReplicaPool

    begun, moved, sleep, ask = [], [], ReplicaPool.sleep, ResumableGeneration._ask

    def slept(pool: ReplicaPool) -> None:
        own, guest = pool.replicas
        assert guest.guest and not own.guest
        begun.append(len(guest.requests))
        sleep(pool)
        assert guest.resting and not guest.requests and not own.resting

    async def asked(self: ResumableGeneration, *args, **more):
        part = await ask(self, *args, **more)
        if part.finish_reason == "moved":
            moved.append(len(part.token_ids))
        return part

    monkeypatch.setattr(ReplicaPool, "sleep", slept)
    monkeypatch.setattr(ResumableGeneration, "_ask", asked)
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    words = [*POOLS, "trainer.max_staleness=1", "trainer.test_freq=-1", "trainer.total_training_steps=4"]
    words += ["async_training.use_dynamic_resource_scheduling=True", "trainer.verify_weight_sync=True"]
    words += ["data.max_response_length=64", "actor_rollout_ref.rollout.ignore_eos=True", "trainer.save_freq=-1"]
    words += ["actor_rollout_ref.actor.optim.lr=0", "trainer.val_before_train=False"]  # what is lost at a seam is seen
    try:
        assert main(tiny.overrides(tmp_path / "out", *words)) == 0
    finally:
        ray.shutdown()
    found = records(tmp_path / "out")
    assert [found[s]["training/rollout_logprob_abs_diff/max"] < 1e-4 for s in (1, 2, 3, 4)] == [True] * 4
    assert len(begun) == 5 and 0 < len(moved) <= sum(begun) and max(moved) > 0
