"""The users' commands, shrunk by overrides alone, train two steps on GSM8K or a step on Geometry3K.

The data come from `$HOME/data`, where the scripts look for them, made by our own prepare scripts; HOME is a
temporary folder. What a script hands to python3 is caught with a stand-in of that name, so that the fork_server can
start it; one script runs as a user runs it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.runs import environment, records, weights
from tests.tiny import tiny_model, tiny_vision_model

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
TEXT = (
    "qwen3_8b_gsm8k_grpo",
    "qwen3_8b_gsm8k_drgrpo",
    "qwen3_8b_gsm8k_grpo_2x8",
    "qwen25_05b_gsm8k_grpo_npu",
)
VISION = (
    "qwen25_vl_7b_geo3k_grpo",
    "kimi_vl_geo3k_grpo",
    "qwen3_vl_8b_geo3k_grpo_npu",
    "qwen3_vl_30b_a3b_geo3k_grpo_npu",
)

if not (SHARED / "commands").is_dir() or not (SHARED / "data/gsm8k").is_dir():
    pytest.skip("shared/commands and shared/data/gsm8k are not beside the repository", allow_module_level=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A home folder with ~/data/gsm8k made by the prepare script, and tiny models of both families."""
    home = tmp_path_factory.mktemp("home")
    subprocess.run(
        [sys.executable, "examples/data_preprocess/gsm8k.py", f"--local_dataset_path={SHARED}/data/gsm8k"],
        check=True,
        cwd=ROOT,
        env=environment(HOME=str(home)),
        capture_output=True,
    )
    assert pq.read_metadata(home / "data/gsm8k/train.parquet").num_rows == 7473
    for arch in ("qwen2", "qwen3"):
        tiny_model(home / arch, arch=arch)
    return home


@pytest.fixture(scope="module")
def seeing_home(tmp_path_factory) -> Path:
    """A home folder with ~/data/geo3k made by the prepare script (its ten problems are all of the training split), and
    tiny models."""
    if not (SHARED / "data/geometry3k").is_dir():
        pytest.skip("shared/data/geometry3k is not beside the repository")
    home = tmp_path_factory.mktemp("seeing")
    subprocess.run(
        [
            sys.executable,
            "examples/data_preprocess/geo3k.py",
            f"--local_dataset_path={SHARED}/data/geometry3k",
        ],
        check=True,
        cwd=ROOT,
        env=environment(HOME=str(home)),
        capture_output=True,
    )
    data = home / "data/geo3k"
    (data / "test.parquet").write_bytes((data / "train.parquet").read_bytes())
    for arch in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "kimi_vl"):
        tiny_vision_model(home / arch, arch, patch=14)
    return home


def shrink(home: Path, out: Path, script: str) -> list[str]:
    """Overrides that a user adds to try a command of eight devices on a laptop."""
    return [
        f"actor_rollout_ref.model.path={home}/{'qwen2' if 'qwen25' in script else 'qwen3'}",
        "data.train_batch_size=4",
        "data.train_max_samples=16",
        "data.val_max_samples=3",
        "data.max_prompt_length=768",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.name=native",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={out}",
    ]


def arguments(script: str, more: list[str], home: Path, folder: Path) -> list[str]:
    """What the script gives to `python3`, after the shell: module and arguments."""
    fake = folder / "bin/python3"
    fake.parent.mkdir(parents=True, exist_ok=True)
    fake.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", str(SHARED / f"commands/{script}.sh"), *more],
        check=True,
        capture_output=True,
        text=True,
        env=environment(HOME=str(home), PATH=f"{fake.parent}:{os.environ['PATH']}"),
    )
    return json.loads(done.stdout)


def start(fork_server, words: list[str], home: Path, folder: Path):
    assert words[:2] == ["-m", "verl.trainer.main_ppo"]
    no_account = {"WANDB_API_KEY": None, "WANDB_MODE": None, "HF_HOME": None}
    return fork_server.run(words[2:], cwd=folder, HOME=str(home), **no_account)


def assert_trained(out: Path, stdout: str, script: str) -> None:
    found = records(out)
    assert {1, 2} <= set(found)
    last = found[2]
    assert last["training/global_step"] == 2 and math.isfinite(last["actor/grad_norm"])
    assert math.isfinite(last["actor/pg_loss"]) and last["response_length/max"] <= 8
    assert ("actor/kl_loss" in last) == ("drgrpo" not in script)
    assert "val-core/openai/gsm8k/reward/mean@1" in found[0] and "step:2 " in stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [TEXT[1], *(pytest.param(one, marks=pytest.mark.long) for one in TEXT if one != TEXT[1])]
)
def test_text_commands_pass_the_check_and_train(script, fork_server, home, tmp_path) -> None:
    out = tmp_path / "out"
    words = arguments(script, shrink(home, out, script), home, tmp_path)
    check = start(fork_server, [*words, "--check"], home, tmp_path)
    assert check.status == 0 and "check: ok" in check.stdout, check.stderr
    assert "4 prompts × 5 responses = 20 trajectories" in check.stdout
    assert not out.exists(), "--check writes nothing"
    run = start(fork_server, words, home, tmp_path)
    assert run.status == 0, run.stderr[-3000:]
    assert_trained(out, run.stdout, script)
    if "qwen3" in script:
        assert "tracker wandb: " in run.stderr, "asked for, absent, said, and no obstacle"
        assert weights(out, 2)
    left = {p.name for p in tmp_path.iterdir()} - {"out", "bin"}
    assert not left, f"written beside the run folder: {left}"


@pytest.mark.slow
def test_a_command_for_npus_trains_on_a_pretend_one(fork_server, home, tmp_path) -> None:
    script, out = "qwen25_05b_gsm8k_grpo_npu", tmp_path / "out"
    words = arguments(script, [*shrink(home, out, script), "trainer.device=npu"], home, tmp_path)
    run = fork_server.run(words[1:], module="tests.pretend_npu", cwd=tmp_path, HOME=str(home))
    assert run.status == 0, run.stderr[-3000:]
    assert_trained(out, run.stdout, script)
    assert "1 × Ascend" in (out / "events.jsonl").read_text()


@pytest.mark.slow
def test_a_command_as_a_user_runs_it(home, tmp_path) -> None:
    """bash, the real python3, W&B offline as the logger asks for it."""
    script, out = "qwen3_8b_gsm8k_drgrpo", tmp_path / "out"
    link = tmp_path / "bin/python3"
    link.parent.mkdir()
    link.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    link.chmod(0o755)
    path = f"{link.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(SHARED / f"commands/{script}.sh"), *shrink(home, out, script), "trainer.save_freq=-1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(HOME=str(home), PATH=path, PYTHONPATH=str(ROOT), WANDB_MODE="offline"),
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_trained(out, done.stdout, script)


@pytest.mark.parametrize("script", VISION)
def test_vision_commands_lack_only_the_machine(script, fork_server, home, tmp_path) -> None:
    """One device and the embedded engine; what is left to lack is the model and the data."""
    words = [word for word in shrink(home, tmp_path / "out", script) if "model.path" not in word]
    run = start(fork_server, [*arguments(script, words, home, tmp_path), "--check"], home, tmp_path)
    assert run.status == 3, run.stderr
    assert "check: the configuration is right; this machine lacks" in run.stdout, run.stdout + run.stderr
    assert "the configuration (" not in run.stderr
    lacks = [line for line in run.stderr.splitlines() if line.startswith("  - ")]
    assert lacks and all("model.path" in line or f"{home}/data/geo3k" in line for line in lacks), run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arch", "device"),
    [
        ("kimi_vl_geo3k_grpo", "kimi_vl", "cpu"),
        pytest.param("qwen3_vl_30b_a3b_geo3k_grpo_npu", "qwen3_vl_moe", "npu", marks=pytest.mark.long),
        pytest.param("qwen25_vl_7b_geo3k_grpo", "qwen2_5_vl", "cpu", marks=pytest.mark.long),
        pytest.param("qwen3_vl_8b_geo3k_grpo_npu", "qwen3_vl", "npu", marks=pytest.mark.long),
    ],
)
def test_vision_commands_train(script, arch, device, fork_server, seeing_home, tmp_path) -> None:
    """On real diagrams, those for NPUs on a pretend one; the first two scripts call the other two."""
    out = tmp_path / "out"
    more = [f"actor_rollout_ref.model.path={seeing_home}/{arch}", "trainer.total_training_steps=1"]
    more += ["data.max_prompt_length=1024", "data.train_max_samples=10"]
    more += ["trainer.device=npu"] * (device == "npu")
    words = arguments(script, [*shrink(seeing_home, out, script), *more], seeing_home, tmp_path)
    if device == "npu":
        run = fork_server.run(words[1:], module="tests.pretend_npu", cwd=tmp_path, HOME=str(seeing_home))
    else:
        run = start(fork_server, words, seeing_home, tmp_path)
    assert run.status == 0, run.stderr[-3000:]
    assert ("1 × Ascend" in (out / "events.jsonl").read_text()) == (device == "npu")
    assert "images are seen: blanked" in run.stdout + run.stderr
    step = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert step["perf/images/count"] == 4 and step["perf/images/encoded_per_image/sampler"] == 1
    most = 3 if "npu" in script else 1.2  # it asks for micro-batches of two of the five responses
    assert step["perf/images/encoded_per_image/trainer"] <= most and math.isfinite(step["actor/grad_norm"])
    assert step["training/rollout_logprob_abs_diff/max"] < 0.1
    assert "val-core/hiyouga/geometry3k/reward/mean@1" in records(out)[0]
