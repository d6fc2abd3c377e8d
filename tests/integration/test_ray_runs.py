"""Whole runs over two ranks on two nodes: the same as one process, the same again, the same after a resume."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from tests.ray_cluster import cluster_of
from tests.runs import TinyRun, main_ppo, records, weights
from tests.tiny import tiny_model

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FSDP = "actor_rollout_ref.actor.fsdp_config"
TWO = (
    "trainer.nnodes=2",
    "trainer.n_gpus_per_node=1",
    "trainer.verify_weight_sync=True",
    f"{FSDP}.param_offload=True",
    f"{FSDP}.optimizer_offload=True",
)
SHORT = ("trainer.total_training_steps=3", "trainer.test_freq=3", "actor_rollout_ref.actor.use_kl_loss=True")


@pytest.fixture(scope="module")
def address():
    with cluster_of(2, num_cpus=1) as cluster:
        yield cluster.address


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyRun:
    return TinyRun(tmp_path_factory.mktemp("tiny"))


def train(tiny: TinyRun, out: Path, *words: str, address: str = "") -> Path:
    more = {"RAY_ADDRESS": address} if address else {}
    done = main_ppo(tiny.overrides(out, *SHORT, *words), timeout=400, **more)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return out


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory) -> Path:
    return train(tiny, tmp_path_factory.mktemp("runs") / "alone")


@pytest.fixture(scope="module")
def two(tiny, address, tmp_path_factory) -> Path:
    return train(tiny, tmp_path_factory.mktemp("runs") / "two", *TWO, address=address)


def assert_close(one: dict[int, dict], other: dict[int, dict], steps: list[int]) -> None:
    """The same metrics up to float32's rounding, which three steps of training spread a little."""
    for step in steps:
        assert one[step].keys() == other[step].keys()
        for name, value in one[step].items():
            if isinstance(value, float) and not math.isnan(value):
                assert other[step][name] == pytest.approx(value, rel=2e-3, abs=2e-4), (step, name)


def from_step(run: Path, step: int, to: Path) -> Path:
    """A copy of a run as it was when that step was saved."""
    to.mkdir()
    shutil.copytree(run / f"global_step_{step}", to / f"global_step_{step}")
    (to / "latest_checkpointed_iteration.txt").write_text(str(step))
    return to


def test_two_ranks_train_as_one_process(alone, two) -> None:
    assert_close(records(alone), records(two), [0, 1, 2, 3])
    last = records(two)[3]
    assert last["training/rollout_logprob_abs_diff/max"] < 1e-4, "the samplers hold what the ranks trained"
    assert last["actor/kl_loss"] > 0
    steps = [json.loads(line) for line in (two / "metrics.jsonl").read_text().splitlines()]
    last = next(record for record in steps if record.get("step") == 3)
    assert last["timing_s/reshard"] == last["timing_s/update_weights"] > 0
    moved = last["perf/weight_sync_gb_per_s"] * last["timing_s/update_weights"] * 1e9
    assert moved == pytest.approx(sum(map(len, weights(two, 3).values())), rel=1e-3), (
        "each weight counts once, whatever the number of nodes"
    )
    plan = next(
        e
        for e in map(json.loads, (two / "events.jsonl").read_text().splitlines())
        if e.get("event") == "plan"
    )
    assert "2 ranks on 2 nodes" in plan["device"] and "2 samplers" in plan["device"]


def test_samplers_on_a_node_of_their_own_get_the_weights_by_relay(tiny, address, alone, tmp_path) -> None:
    pool = ("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1")
    apart = train(tiny, tmp_path / "apart", *pool, "trainer.verify_weight_sync=True", address=address)
    assert_close(records(alone), records(apart), [0, 1, 2, 3])


def test_a_critic_on_two_ranks_learns_as_in_one_process(tiny, address, tmp_path) -> None:
    words = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-4", "critic.ppo_mini_batch_size=4")
    offload = "critic.model.fsdp_config.param_offload=True"
    alone = train(tiny, tmp_path / "alone", *words)
    two = train(tiny, tmp_path / "two", *words, *TWO, offload, address=address)
    assert_close(records(alone), records(two), [0, 1, 2, 3])
    assert records(two)[3]["critic/vf_loss"] > 0 and (two / "global_step_3/critic/config.json").is_file()


def test_two_ranks_are_taught_as_one_process(tiny, address, tmp_path) -> None:
    """Two teachers, of which some steps' rows of a rank may need only one."""
    teachers = [tiny_model(tmp_path / name, seed=seed, scale=4.0) for seed, name in enumerate("ab", 3)]
    words = (
        "distillation.enabled=True",
        "distillation.distillation_loss.loss_mode=forward_kl_topk",
        "distillation.distillation_loss.topk=8",
        "distillation.teacher_key=ability",
        f"+distillation.teacher_models={{a:{{key:math,model_path:{teachers[0]}}},b:{{model_path:{teachers[1]}}}}}",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.optim.lr=1e-3",
    )
    alone = train(tiny, tmp_path / "alone", *words)
    two = train(tiny, tmp_path / "two", *words, *TWO, address=address)
    assert_close(records(alone), records(two), [0, 1, 2, 3])


def test_a_resumed_run_is_the_same_bit_for_bit(tiny, address, two, tmp_path) -> None:
    again = train(tiny, from_step(two, 1, tmp_path / "again"), *TWO, address=address)
    later, first = records(again), records(two)
    assert {s: later[s] for s in (2, 3)} == {s: first[s] for s in (2, 3)}
    assert weights(again, 3) == weights(two, 3)


def test_a_checkpoint_of_two_ranks_goes_on_in_one_process_and_back(
    tiny, address, alone, two, tmp_path
) -> None:
    assert sorted(weights(two, 3)) == sorted(weights(alone, 3))
    down = train(tiny, from_step(two, 1, tmp_path / "down"))
    assert_close(records(two), records(down), [2, 3])
    up = train(tiny, from_step(alone, 1, tmp_path / "up"), *TWO, address=address)
    assert_close(records(alone), records(up), [2, 3])
