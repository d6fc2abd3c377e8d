"""What we ship to be typed works: every example's command, and the code in examples/reward and examples/plugin."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.chaos.fork_server import ForkServer
from tests.runs import TinyRun, records
from tests.tiny import tiny_model
from verl.reward.user_function import calling_style, load_function

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
EVALUATION = EXAMPLES / "evaluation"
SCRIPTS = sorted(s for s in EXAMPLES.rglob("*.sh") if s.name != "ray_start.sh" and s.parent != EVALUATION)
PREPARE = sorted((EXAMPLES / "data_preprocess").glob("*.py"))


def shell_in(home: Path, fork_server: ForkServer):
    """Runs commands with the fork server's python3 and `home` as home; gives the finished process."""
    folder = home / "bin"
    folder.mkdir(exist_ok=True)
    fork_server.make_python(folder / "python3")

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "RAY_", "VERL_"))}
        env |= {"PATH": f"{folder}:{env['PATH']}", "HOME": str(home), "PYTHONPATH": str(ROOT)}
        command = [str(word) for word in words]
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=home, check=False)

    return run


@pytest.fixture
def shell(tmp_path, fork_server):
    return shell_in(tmp_path, fork_server)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, fork_server) -> Path:
    """A home with a model directory, and the data as the script that the comments name makes it."""
    home = tmp_path_factory.mktemp("home")
    gsm8k_files(home)
    prepare = EXAMPLES / "data_preprocess/gsm8k.py"
    made = shell_in(home, fork_server)("python3", prepare, "--local_dataset_path", home / "raw")
    assert made.returncode == 0, made.stderr
    model_directory(home / "model")
    classifier = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    model_directory(home / "scorer", **classifier)
    return home


def gsm8k_files(home: Path) -> None:
    """Raw rows of the GSM8K form under home/raw."""
    (home / "raw").mkdir()
    for split in ("train", "test"):
        lines = [json.dumps({"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"}) for i in range(130)]
        (home / f"raw/{split}.jsonl").write_text("\n".join(lines))


def model_directory(folder: Path, **more: object) -> Path:
    """What --check looks at of a model: a config and the name of a weight file."""
    folder.mkdir()
    shape = {"model_type": "qwen3", "max_position_embeddings": 4096, "num_attention_heads": 4} | more
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_there_are_examples() -> None:
    assert {"run_qwen3_gsm8k.sh", "run_drgrpo.sh", "run_gsm8k_sft.sh"} <= {s.name for s in SCRIPTS}
    assert len(PREPARE) == 5


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_a_command_resolves_and_passes_on_its_arguments(script, shell) -> None:
    done = shell("bash", script, "trainer.total_training_steps=7", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "total_training_steps: 7" in done.stdout
    assert "Qwen/Qwen3-0.6B" in done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_a_command_is_right_after_its_own_preparation(script, prepared, fork_server) -> None:
    """Only the model is another."""
    key = "model.path" if "sft" in script.name else "actor_rollout_ref.model.path"
    words = [f"{key}={prepared}/model", "trainer.device=cpu", "trainer.n_gpus_per_node=1", "--check"]
    if script.parent.name == "reward_model":
        words.append(f"reward_model.model.path={prepared}/scorer")
    if script.parent.name == "distillation":
        words.append(f"distillation.teacher_models.teacher_model.model_path={prepared}/model")
    done = shell_in(prepared, fork_server)("bash", script, *words)
    assert done.returncode == 0, done.stderr
    assert "check: ok" in done.stdout and "130 rows" in done.stdout
    assert "no effect" not in done.stderr and "not in this release" not in done.stderr


@pytest.mark.slow
def test_generation_then_evaluation(shell, tmp_path) -> None:
    """Both commands as they are, on a model of a few thousand weights and short responses."""
    gsm8k_files(tmp_path)
    shell("python3", EXAMPLES / "data_preprocess/gsm8k.py", "--local_dataset_path", tmp_path / "raw")
    small = ["data.n_samples=2", "rollout.response_length=4", "trainer.device=cpu"]
    words = [f"model.path={tiny_model(tmp_path / 'model')}", *small]
    generate = ["bash", EVALUATION / "generate_gsm8k.sh", *words]
    plan = shell(*generate, "--check")
    assert plan.returncode == 0 and "130 prompts × 2 responses" in plan.stdout, plan.stderr
    made = shell(*generate)
    assert made.returncode == 0, made.stderr
    done = shell("bash", EVALUATION / "evaluate_gsm8k.sh")
    assert done.returncode == 0, done.stderr
    assert "openai/gsm8k: 130 prompts, 260 responses" in done.stdout
    assert (tmp_path / "data/gsm8k/responses_evaluation/report.html").exists()


def test_dr_grpo_is_grpo_with_three_keys_changed(shell) -> None:
    outputs = [
        shell("bash", EXAMPLES / "grpo_trainer" / name, "--cfg", "job").stdout.splitlines()
        for name in ("run_qwen3_gsm8k.sh", "run_drgrpo.sh")
    ]
    changed = {line.strip() for line in outputs[1]} - {line.strip() for line in outputs[0]}
    assert "loss_agg_mode: seq-mean-token-sum-norm" in changed
    assert "norm_adv_by_std_in_grpo: false" in changed and "use_kl_loss: false" in changed


@pytest.mark.parametrize("script", PREPARE, ids=lambda s: s.stem)
def test_a_prepare_script_shows_its_flags(script, shell) -> None:
    done = shell("python3", script, "--help")
    assert done.returncode == 0 and "--local_save_dir" in done.stdout, done.stderr


# ------------------------------------------------------------------------------------------------ the reward


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("so\n#### 72", 1.0),
        ("#### 1,072", 0.1),
        ("#### $72.0", 1.0),
        ("72", 0.0),
        ("", 0.0),
        ("#### 72 #### 72", 0.0),
    ],
)
def test_the_reward_example(answer, score) -> None:
    function = load_function(str(EXAMPLES / "reward/custom_reward.py"), "compute_score")
    result = function(data_source="x", solution_str=answer, ground_truth="72", extra_info={})
    assert result["score"] == pytest.approx(score)
    assert result["acc"] == (score == 1.0) and result["format"] == (score > 0)


def test_the_reward_example_takes_its_option() -> None:
    function = load_function(str(EXAMPLES / "reward/custom_reward.py"), "compute_score")
    assert calling_style(function, {"format_score": 0.2}, batch=False, positional=0) == 0
    assert function("x", "#### 1", "2", format_score=0.2)["score"] == pytest.approx(0.2)


# ------------------------------------------------------------------------------------------------ the plug-in


@pytest.fixture
def plugin(monkeypatch):
    """The example module; its names leave the registries afterwards."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    monkeypatch.syspath_prepend(EXAMPLES / "plugin")
    monkeypatch.delitem(sys.modules, "my_algorithms", raising=False)
    for table, name in ((ADV_ESTIMATOR_REGISTRY, "median_baseline"), (POLICY_LOSS_REGISTRY, "soft_clip")):
        monkeypatch.delitem(table, name, raising=False)
    yield importlib.import_module("my_algorithms")
    sys.modules.pop("my_algorithms")
    ADV_ESTIMATOR_REGISTRY.pop("median_baseline")
    POLICY_LOSS_REGISTRY.pop("soft_clip")


def test_the_estimator_example(plugin) -> None:
    rewards = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 9.0], [5.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0]], dtype=torch.bool)
    advantages, returns = plugin.median_baseline(rewards, mask, ["a", "a", "a", "b"])
    assert advantages.tolist() == [[-1.0, -1.0], [0.0, 0.0], [7.0, 7.0], [0.0, 0.0]]
    assert torch.equal(advantages, returns)


def test_the_loss_example_equals_the_policy_gradient_near_the_old_policy(plugin) -> None:
    """At d = 0 the gradient of −A·tanh(d/ε)·ε is −A; far away it vanishes."""
    old = torch.zeros(2, 3)
    new = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 4.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, -2.0, 3.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])

    counts = {"dp_size": 1, "batch_num_tokens": 5, "global_batch_size": 2}
    config = SimpleNamespace(clip_ratio=0.2, global_batch_info=counts)
    loss, metrics = plugin.soft_clip(old, new, advantages, mask, "token-mean", config)
    loss.backward()
    expected = torch.tensor([[-1.0, 2.0, 0.0], [-1.0, -1.0, 0.0]]) / 5
    assert torch.allclose(new.grad, expected, atol=1e-6)
    assert float(metrics["actor/faded"]) == pytest.approx(1 / 5)


@pytest.mark.slow
def test_the_plugin_and_the_reward_train(fork_server, tmp_path) -> None:
    """As docs/algorithms.md says it, on a tiny model."""
    run = TinyRun(tmp_path)
    out = tmp_path / "out"
    words = [
        "actor_rollout_ref.model.external_lib=my_algorithms",
        "algorithm.adv_estimator=median_baseline",
        "actor_rollout_ref.actor.policy_loss.loss_mode=soft_clip",
        "trainer.total_training_steps=1",
        "trainer.save_freq=-1",
    ]
    path = os.pathsep.join([str(EXAMPLES / "plugin"), str(ROOT)])
    done = fork_server.run(run.overrides(out, *words), PYTHONPATH=path)
    assert done.status == 0, done.stderr[-3000:]
    step = records(out, ["actor/faded"])[1]
    assert "actor/faded" in step and step["actor/grad_norm"] > 0
