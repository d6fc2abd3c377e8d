"""strategy=megatron from the command line: ranks behind Ray, checkpoints and resume, a critic, supervised training, an
asynchronous run, vLLM as the sampler, a rank that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ranks
from tests.chaos.ray_runs import LIMIT_S, events, last_word, pid_of, steps_logged
from tests.megatron.cases import NEEDS_MEGATRON
from tests.runs import TinyRun, environment, main_ppo, records
from tests.tiny import tiny_model
from tests.unit.reward.test_reward_model import classifier
from tests.unit.trainer import test_sft_trainer as sft
from tests.vllm_cases import require_vllm, vllm_model

pytestmark = [NEEDS_MEGATRON, pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = str(Path(__file__).parents[2])
ACTOR = "actor_rollout_ref.actor.megatron"
WORDS = (
    "actor_rollout_ref.model.external_lib=tests.megatron_on_cpu",
    f"{ACTOR}.dtype=float32",
    "trainer.n_gpus_per_node=2",
    "trainer.test_freq=0",
    "trainer.save_freq=2",
    "trainer.total_training_steps=2",
)


def train(tiny: TinyRun, out: Path, *words: str) -> dict[int, dict]:
    run = main_ppo(
        ["--config-name=ppo_megatron_trainer", *tiny.overrides(out, *WORDS, *words)], timeout=300, PYTHONPATH=ROOT
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    return {step: record for step, record in records(out).items() if step}


def test_a_run_goes_on_at_another_layout(tiny: TinyRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    loss = ("actor_rollout_ref.actor.use_kl_loss=True", f"{ACTOR}.param_offload=True")
    loss += ("actor_rollout_ref.ref.megatron.dtype=float32",)
    seen = train(tiny, out, *loss, f"{ACTOR}.tensor_model_parallel_size=2")
    seen |= train(tiny, out, *loss, f"{ACTOR}.pipeline_model_parallel_size=2", "trainer.total_training_steps=3")
    assert sorted(seen) == [1, 2, 3]
    assert all(seen[step]["training/rollout_logprob_abs_diff/max"] < 1e-4 for step in seen)
    assert all(seen[step]["actor/grad_norm"] > 0 for step in seen) and seen[3]["actor/kl_loss"] > 0


@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_two_copies(tiny: TinyRun, tmp_path: Path, distributed: bool) -> None:
    seen = train(tiny, tmp_path / "out", f"{ACTOR}.use_distributed_optimizer={distributed}")
    assert all(seen[step]["training/rollout_logprob_abs_diff/max"] < 1e-4 for step in (1, 2))
    assert all(seen[step]["actor/grad_norm"] > 0 for step in (1, 2))


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_adapters_and_the_base_as_reference(tiny: TinyRun, tmp_path: Path, size: int) -> None:
    pytest.importorskip("peft")
    words = [
        "actor_rollout_ref.model.lora.rank=4",
        "actor_rollout_ref.model.lora.target_modules=[linear_qkv,linear_fc2]",
    ]
    words += ["actor_rollout_ref.actor.use_kl_loss=True", "trainer.verify_weight_sync=True"]
    words += [f"{ACTOR}.tensor_model_parallel_size={size}", f"trainer.n_gpus_per_node={size}"]
    seen = train(tiny, tmp_path / "out", *words)
    assert all(seen[step]["training/rollout_logprob_abs_diff/max"] < 1e-4 for step in (1, 2))
    assert seen[2]["actor/kl_loss"] > 0
    assert (tmp_path / "out/global_step_2/actor/lora_adapter/adapter_model.safetensors").is_file()


@pytest.mark.parametrize("parallel", ["expert", pytest.param("pipeline", marks=pytest.mark.long)])
def test_experts_on_two_ranks_replay_their_routes(tmp_path: Path, parallel: str) -> None:
    """Those of the sampler, and those of the pass before the update."""
    words = [f"{ACTOR}.{parallel}_model_parallel_size=2", "actor_rollout_ref.actor.ppo_epochs=2"]
    if parallel == "expert":
        words += [f"{ACTOR}.router_replay.mode=R3", "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"]
    else:
        words += [f"{ACTOR}.router_replay.mode=R2"]
    seen = train(TinyRun(tmp_path / "moe", "qwen3_moe"), tmp_path / "out", *words)
    assert all(seen[step]["training/rollout_logprob_abs_diff/max"] < 1e-4 for step in (1, 2))
    assert all(0 <= seen[step]["actor/router_replay/changed_frac"] <= 1 for step in (1, 2))


def test_a_critic_on_two_stages(tiny: TinyRun, tmp_path: Path) -> None:
    words = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-2", "critic.megatron.dtype=float32")
    words += ("critic.model.external_lib=tests.megatron_on_cpu", f"{ACTOR}.pipeline_model_parallel_size=2")
    seen = train(tiny, tmp_path / "out", *words, "critic.megatron.pipeline_model_parallel_size=2")
    assert seen[2]["critic/vf_loss"] > 0 and seen[2]["critic/grad_norm"] > 0


def test_a_teacher_and_a_reward_model_have_the_layout_of_the_policy(tiny: TinyRun, tmp_path: Path) -> None:
    teacher, scorer = tiny_model(tmp_path / "teacher", seed=5, scale=4.0), classifier(tmp_path / "scorer")
    words = ["distillation.enabled=True", "distillation.distillation_loss.loss_mode=k2"]
    words += [f"distillation.teacher_models.teacher_model.model_path={teacher}", "trainer.total_training_steps=1"]
    words += ["reward_model.enable=True", f"reward_model.model.path={scorer}", "custom_reward_function.path=null"]
    words += ["reward_model.rollout.dtype=float32", "trainer.save_freq=-1"]
    ref = ("actor_rollout_ref.ref.megatron.dtype=float32",)
    seen = train(tiny, tmp_path / "out", *words, *ref, f"{ACTOR}.pipeline_model_parallel_size=2")[1]
    plain = main_ppo(tiny.overrides(tmp_path / "plain", *words, "trainer.test_freq=0"))
    assert plain.returncode == 0, plain.stderr[-4000:]
    expected = records(tmp_path / "plain")[1]
    for name in ("distillation/loss", "reward/model/mean", "critic/score/mean", "actor/grad_norm"):
        assert seen[name] == pytest.approx(expected[name], rel=1e-3), name


def test_vllm_samples_with_the_weights_of_two_ranks(tmp_path: Path) -> None:
    require_vllm()
    tiny = TinyRun(tmp_path / "tiny")
    tiny.model = vllm_model(tmp_path / "heads", tied=True)
    words = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    words += [f"{ACTOR}.tensor_model_parallel_size=2", "trainer.verify_weight_sync=True", "trainer.save_freq=-1"]
    seen = train(tiny, tmp_path / "out", *words)
    assert all(seen[step]["training/rollout_logprob_abs_diff/max"] < 1e-4 for step in (1, 2))


def test_an_asynchronous_run(tiny: TinyRun, tmp_path: Path) -> None:
    """A rank trains, and a sampler on a device of its own is a step ahead; the learning rate is 0, so they agree."""
    words = ["actor_rollout_ref.actor.optim.lr=0", "trainer.max_staleness=1", "trainer.n_gpus_per_node=1"]
    words += ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"]
    seen = train(tiny, tmp_path / "out", *words, "trainer.verify_weight_sync=True")
    assert all(seen[step]["training/rollout_logprob_abs_diff/max"] < 1e-4 for step in (1, 2))
    assert seen[2]["training/off_policy/trajectory_staleness_worst/max"] == 1


def test_a_killed_rank_ends_the_run_and_is_named(tiny: TinyRun, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = tiny.overrides(out, *WORDS, f"{ACTOR}.pipeline_model_parallel_size=2", "trainer.total_training_steps=99")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-name=ppo_megatron_trainer", *words]
    with (
        (tmp_path / "run.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment(PYTHONPATH=ROOT)) as run,
    ):
        try:
            until = time.monotonic() + 240
            while steps_logged(out) < 1 and run.poll() is None and time.monotonic() < until:
                time.sleep(0.2)
            os.kill(pid := pid_of(out, "training worker 1"), signal.SIGKILL)
            assert run.wait(LIMIT_S) == 1
        finally:
            run.kill()
    assert "training worker 1 " in last_word(out) and f"process {pid}) died in" in last_word(out)
    assert "training worker 1 " in events(out, "worker_died")[-1]["error"]


def supervised(argv: list[str]) -> int:
    import multiprocessing

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    from verl.trainer.sft_trainer import main

    return main(argv)


@pytest.mark.parametrize("sizes", [{}, {"pipeline": 2}], ids=str)
def test_supervised_training(tmp_path: Path, sizes: dict[str, int]) -> None:
    model, data = tiny_model(tmp_path / "m", seed=3), tmp_path / "train.jsonl"
    data.write_text("\n".join(sft.json.dumps(row) for row in sft.ROWS))
    words = ["model.external_lib=tests.megatron_on_cpu", "engine.strategy=megatron"]
    words += ["trainer.total_training_steps=4", "trainer.save_freq=4"]
    words += [f"engine.{name}_model_parallel_size={size}" for name, size in sizes.items()]
    size = 2 if sizes else 1
    argv = sft.arguments(model, data, tmp_path / "run", *words, f"trainer.n_gpus_per_node={size}")
    assert ranks.run(supervised, size, argv, join=False, timeout=150.0) == [0] * size
    plain = sft.arguments(model, data, tmp_path / "plain", "trainer.total_training_steps=4")
    assert sft.main(plain) == 0
    for ours, theirs in zip(sft.records(tmp_path / "run"), sft.records(tmp_path / "plain"), strict=True):
        for name in {"train/loss", "val/loss", "train/grad_norm"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3), name
