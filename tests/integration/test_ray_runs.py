"""Whole runs over ranks and samplers on nodes of the shared cluster: the same as one process, the same again, the same
after a resume."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.test_agent_runs import WORDS as TOOLS
from tests.integration.test_reward_models import ASKS
from tests.integration.test_vision_runs import VisionRun
from tests.runs import from_step, main_ppo, records, weights
from tests.tiny import tiny_model
from tests.unit.reward.test_reward_model import classifier
from tests.unit.rollout.test_session import _QWEN

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FSDP = "actor_rollout_ref.actor.fsdp_config"
VERIFIED = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.verify_weight_sync=True")
TWO = (*VERIFIED, f"{FSDP}.param_offload=True", f"{FSDP}.optimizer_offload=True")
SHORT = ("trainer.total_training_steps=3", "trainer.test_freq=3", "actor_rollout_ref.actor.use_kl_loss=True")
LORA = ("actor_rollout_ref.model.lora_rank=8", "trainer.total_training_steps=2", "trainer.test_freq=-1")
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(fork_server, tiny, ray_address) -> Train:
    """A run to its end, on the cluster if it asks for two nodes; returns its folder."""

    def start(out: Path, *words: str) -> Path:
        many = {"trainer.nnodes=2", "critic.nnodes=1", "reward_model.nnodes=1"} & {*words}
        more = {"RAY_ADDRESS": ray_address} if many else {}
        run = fork_server.run(tiny.overrides(out, *SHORT, *words), timeout=300, **more)
        assert run.status == 0, (run.stdout + run.stderr)[-4000:]
        return out

    return start


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "alone")


@pytest.fixture(scope="module")
def profiles(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def two(train, profiles, tmp_path_factory) -> Path:
    """Two of its steps are profiled, which changes nothing."""
    words = (
        "global_profiler.tool=torch",
        "global_profiler.steps=[2,3]",
        "global_profiler.profile_continuous_steps=True",
        f"global_profiler.save_path={profiles}",
        "actor_rollout_ref.actor.profiler.enable=True",
        "actor_rollout_ref.actor.profiler.ranks=[1]",
        "actor_rollout_ref.rollout.profiler.enable=True",
    )
    return train(tmp_path_factory.mktemp("runs") / "two", *TWO, *words)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in map(json.loads, (run / "events.jsonl").open()) if e["event"] == kind]


def assert_close(one: dict[int, dict], other: dict[int, dict], steps: list[int]) -> None:
    """The same metrics up to float32's rounding, which three steps of training spread a little."""
    for step in steps:
        ones, others = ({n for n in found[step] if "global_seqlen/" not in n} for found in (one, other))
        assert ones == others
        for name in ones:
            value = one[step][name]
            if isinstance(value, float) and not math.isnan(value):
                assert other[step][name] == pytest.approx(value, rel=2e-3, abs=2e-4), (step, name)


def test_two_ranks_train_as_one_process(alone, two) -> None:
    assert_close(records(alone), records(two), [0, 1, 2, 3])
    for name in ("rng.safetensors", "rng.json"):  # of the driver, where plug-ins draw from them
        ones, others = (run / "global_step_1/state/rng" / name for run in (alone, two))
        assert ones.read_bytes() == others.read_bytes(), "seeded by trainer.seed"
    last = records(two)[3]
    assert last["global_seqlen/min"] <= last["global_seqlen/balanced_min"] <= last["global_seqlen/balanced_max"]
    assert last["training/rollout_logprob_abs_diff/max"] < 1e-4, "the samplers hold what the ranks trained"
    assert last["actor/kl_loss"] > 0
    steps = [json.loads(line) for line in (two / "metrics.jsonl").read_text().splitlines()]
    last = next(record for record in steps if record.get("step") == 3)
    assert last["global_seqlen/mean"] * 2 == last["perf/total_num_tokens"]
    assert last["timing_s/reshard"] == last["timing_s/update_weights"] > 0
    moved = last["perf/weight_sync_gb_per_s"] * last["timing_s/update_weights"] * 1e9
    assert moved == pytest.approx(sum(map(len, weights(two, 3).values())), rel=1e-3), (
        "each weight counts once, whatever the number of nodes"
    )
    device = events(two, "plan")[0]["device"]
    assert "2 ranks on 2 nodes" in device and "2 samplers" in device


def test_workers_write_profiles_of_the_chosen_steps(two, profiles) -> None:
    """Those of the named rank and of the sampler, one for both steps."""
    found = sorted(p.name for p in profiles.glob("*.json.gz"))
    assert found == ["actor.rank1.step2-3.torch.json.gz", "rollout.rank0.step2-3.torch.json.gz"]
    for name in found:
        with gzip.open(profiles / name, "rt") as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {"aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise"} & names
        training = {"old_log_prob", "update_actor"} if name.startswith("actor") else set()
        assert training | {"update_weights"} <= names, "the phases of this worker are ranges"
    assert len(events(two, "profile")[0]["files"]) == 4


@pytest.mark.long
@pytest.mark.parametrize("backend", ["naive", "delta_sharded"])
def test_samplers_on_nodes_of_their_own_get_the_weights_by_relay(
    tiny, ray_address, alone, tmp_path, monkeypatch, backend
) -> None:
    """Two ranks and two samplers on four nodes. The driver is this process, to see which nodes got a broadcast."""
    import ray

    from verl.trainer.main_ppo import main
    from verl.workers.ray.remote_weight_sync import RemoteWeightSync

    relays, seen, out = RemoteWeightSync._relays, [], tmp_path / "apart"

    def watched(self: RemoteWeightSync, routes: Any, *rest: Any) -> list[Any]:
        refs = relays(self, routes, *rest)
        seen.append((len(routes.relayed), len(set(self._nodes)), rest[-1][0][-1]["timeout"]))
        return refs

    monkeypatch.setattr(RemoteWeightSync, "_relays", watched)
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    pool = (
        "actor_rollout_ref.rollout.nnodes=2",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
        "actor_rollout_ref.nccl_timeout=123",
        f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend}",
    )
    try:
        assert main(tiny.overrides(out, *SHORT, *VERIFIED, *pool)) == 0
    finally:
        ray.shutdown()
    assert len(seen) == 4 and set(seen) == {(2, 2, 123)}, "each push goes to both, with the time the user gave"
    assert_close(records(alone), records(out), [0, 1, 2, 3])
    device = events(out, "plan")[0]["device"]
    assert "2 ranks on 2 nodes" in device and "2 samplers" in device


@pytest.fixture(scope="module")
def roles(tmp_path_factory) -> tuple[str, ...]:
    """Words of runs with a critic, a teacher and a reward model."""
    models = tmp_path_factory.mktemp("roles")
    return (
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=1e-4",
        "critic.ppo_mini_batch_size=4",
        "distillation.enabled=True",
        f"distillation.teacher_models.teacher_model.model_path={tiny_model(models / 'teacher', seed=3)}",
        "reward_model.enable=True",
        f"reward_model.model.path={classifier(models / 'rm')}",
        "reward_model.weights={function: 1, model: 0.5}",
        "reward_model.rollout.dtype=float32",
        "trainer.total_training_steps=2",
    )


@pytest.fixture(scope="module")
def roles_alone(train, roles, tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "roles", *roles)


def test_a_critic_on_two_ranks_learns_as_in_one_process(train, roles, roles_alone, tmp_path) -> None:
    """Beside a teacher and a reward model."""
    two = train(tmp_path / "two", *roles, *TWO, "critic.model.fsdp_config.param_offload=True")
    assert_close(records(roles_alone), records(two), [0, 1, 2])
    assert records(two)[2]["critic/vf_loss"] > 0 and (two / "global_step_2/critic/config.json").is_file()


def test_roles_on_devices_of_their_own_compute_as_beside_the_policy(train, roles, roles_alone, tmp_path) -> None:
    """The critic, the teacher and the reward model, each on a node of its own."""
    pools = [
        f"{group}.{key}=1"
        for group in ("critic", "distillation", "reward_model")
        for key in ("nnodes", "n_gpus_per_node")
    ]
    apart = train(tmp_path / "apart", *roles, *pools, "reward_model.enable_resource_pool=True")
    assert_close(records(roles_alone), records(apart), [0, 1, 2])
    assert (apart / "global_step_2/critic/config.json").is_file()
    (plan,), (workers,) = events(apart, "plan"), events(apart, "workers")
    assert "1 rank of the critic; 1 rank of the teacher; 1 rank of the reward_model" in plan["device"]
    names = {one["name"] for one in workers["workers"]}
    ranks = {f"{what} worker 0" for what in ("training", "critic", "teacher", "reward model")}
    assert names == {*ranks, "sampler 0"} and len({one["pid"] for one in workers["workers"]}) == 5


@pytest.mark.long
def test_a_judge_on_a_device_of_its_own_is_asked(train, tmp_path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    words = (
        f"custom_reward_function.path={tmp_path / 'asks.py'}",
        "reward_model.enable=True",
        f"reward_model.model.path={tiny_model(tmp_path / 'judge', seed=5)}",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
    )
    pool = (
        "reward_model.enable_resource_pool=True",
        "reward_model.nnodes=1",
        "reward_model.n_gpus_per_node=1",
    )
    alone, apart = train(tmp_path / "alone", *words), train(tmp_path / "apart", *words, *pool)
    assert records(apart)[1]["reward/errors"] == 0
    assert records(apart)[1]["critic/score/mean"] == records(alone)[1]["critic/score/mean"]


@pytest.mark.long
def test_two_ranks_are_taught_as_one_process(train, tmp_path) -> None:
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
    alone, two = train(tmp_path / "alone", *words), train(tmp_path / "two", *words, *TWO)
    assert_close(records(alone), records(two), [0, 1, 2, 3])


@pytest.mark.long
def test_a_resumed_run_is_the_same_bit_for_bit(train, two, tmp_path) -> None:
    again = train(from_step(two, 1, tmp_path / "again"), *TWO)
    later, first = records(again), records(two)
    assert {s: later[s] for s in (2, 3)} == {s: first[s] for s in (2, 3)}
    assert weights(again, 3) == weights(two, 3)


@pytest.mark.long
def test_a_checkpoint_of_two_ranks_goes_on_in_one_process_and_back(train, alone, two, tmp_path) -> None:
    assert sorted(weights(two, 3)) == sorted(weights(alone, 3))
    down = train(from_step(two, 1, tmp_path / "down"))
    assert_close(records(two), records(down), [2, 3])
    up = train(from_step(alone, 1, tmp_path / "up"), *TWO)
    assert_close(records(alone), records(up), [2, 3])


@pytest.mark.long
def test_experts_on_two_ranks_train_as_in_one_process(train, tmp_path) -> None:
    """To 1e-5: Adam's epsilon is far above the rounding of gradients, of which it would make steps of the learning
    rate."""
    words = (
        f"actor_rollout_ref.model.path={tiny_model(tmp_path / 'moe', 'qwen3_moe')}",
        "actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-4",
        "trainer.test_freq=-1",
    )
    spread = (*words, *VERIFIED, f"{FSDP}.expert_parallel_size=2")
    alone, two = train(tmp_path / "alone", *words), train(tmp_path / "two", *spread)
    for step in (1, 2, 3):
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm"):
            assert records(two)[step][name] == pytest.approx(records(alone)[step][name], abs=1e-5), (step, name)
    ones, others = (
        AutoModelForCausalLM.from_pretrained(run / "global_step_3/actor").state_dict() for run in (alone, two)
    )
    for name, weight in ones.items():
        torch.testing.assert_close(others[name], weight, rtol=0, atol=1e-5)
    again = train(from_step(two, 1, tmp_path / "again"), *spread)
    assert weights(again, 3) == weights(two, 3)


@pytest.mark.long
def test_the_adapter_alone_moves_between_two_ranks_and_the_run_is_that_of_one_process(train, tmp_path) -> None:
    pytest.importorskip("peft")
    alone, two = records(train(tmp_path / "alone", *LORA)), tmp_path / "two"
    for steps in (1, 2):
        train(two, *LORA, *VERIFIED, f"trainer.total_training_steps={steps}")
    assert events(two, "resumed")[-1]["step"] == 1
    both = records(two)
    for step in (1, 2):
        assert both[step]["training/rollout_logprob_abs_diff/max"] < 1e-4
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean"):
            assert both[step][name] == pytest.approx(alone[step][name], rel=2e-3, abs=2e-4), (step, name)
    assert (two / "global_step_2/actor/lora_adapter/adapter_model.safetensors").is_file()


def test_nodes_that_do_not_fit_end_the_run_before_a_model_loads(tiny, ray_address, tmp_path, monkeypatch) -> None:
    """The driver's home has a hub model in its cache, those of the nodes do not. What else is compared:
    test_ray_nodes.py."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    cache = tmp_path / ".cache/huggingface/hub/models--somebody--tiny"
    tiny_model(cache / "snapshots" / ("a" * 40))
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("a" * 40)
    words = tiny.overrides(tmp_path / "out", *VERIFIED, "actor_rollout_ref.model.path=somebody/tiny")
    done = main_ppo(words, RAY_ADDRESS=ray_address, HOME=str(tmp_path))
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-3000:]
    (said,) = [line for line in done.stderr.splitlines() if "do not fit" in line]
    assert "somebody/tiny" in said and "HF_HUB_OFFLINE is set" in said, said
    assert not list((tmp_path / "out").glob("global_step_*")) and not list((tmp_path / "out").glob(".seen*"))


@pytest.mark.long
def test_tools_over_two_ranks_and_two_samplers(train: Train, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(_QWEN.replace("%THINK%", ""))
    template = f"actor_rollout_ref.model.custom_chat_template={tmp_path / 'template.jinja'}"
    rows = []
    for name, more in (("one", ()), ("two", TWO)):
        dump = f"trainer.rollout_data_dir={tmp_path / name / 'dump'}"
        out = train(tmp_path / name, *TOOLS, template, dump, "trainer.total_training_steps=1", *more)
        lines = (tmp_path / name / "dump/1.jsonl").read_text().splitlines()
        rows.append([(row["uid"], row["output"], row["score"]) for row in map(json.loads, lines)])
        record = records(out)[1]
        assert record["training/rollout_logprob_abs_diff/max"] < 1e-4
        assert record["tool_call_counts/mean"] > 1 and record["agent/prefix_reuse_ratio"] == 1.0
    assert rows[0] == rows[1]


@pytest.mark.long
def test_two_ranks_see_images_as_one_process(fork_server, ray_address, tmp_path) -> None:
    seeing, found = VisionRun(tmp_path), {}
    for name, words, more in (("one", (), {}), ("two", VERIFIED, {"RAY_ADDRESS": ray_address})):
        words = seeing.overrides(tmp_path / name, "trainer.total_training_steps=2", *words)
        run = fork_server.run(words, timeout=300, **more)
        assert run.status == 0, (run.stdout + run.stderr)[-4000:]
        found[name] = records(tmp_path / name)
    assert_close(found["one"], found["two"], [1, 2])
    assert found["two"][2]["training/rollout_logprob_abs_diff/max"] < 1e-4
    lines = map(json.loads, (tmp_path / "two" / "metrics.jsonl").read_text().splitlines())
    sent = [line["perf/images/sent_per_node"] for line in lines if "perf/images/count" in line]
    assert sent == [1, 1], "to samplers and ranks of the node together, for all passes"
