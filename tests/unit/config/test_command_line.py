"""The command line: --help, --cfg job, --check, exit statuses, streams, and how fast it answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl.compat.spellings import PUBLIC
from verl.config import load
from verl.preflight.command import resolve
from verl.trainer.main_ppo import main

ROOT = Path(__file__).parents[3]


def left(argv, entry="ppo"):
    with pytest.raises(SystemExit) as caught:
        resolve(argv, entry, PUBLIC)
    return caught.value.code


def test_configuration_errors_go_to_stderr_with_2(capsys):
    assert left(["data.train_bach_size=1", "trainer.seed=x"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "2 problems" in err and "data.train_batch_size" in err and "--help KEY" in err


def test_machine_problems_end_with_3(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    argv = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=/no/such", "trainer.device=cpu"]
    assert left([*argv, "--check"]) == 3
    out, err = capsys.readouterr()
    assert "this machine lacks (3 problems)" in err and "configuration is right" in out and "plan:" in out
    assert left(argv) == 3
    assert left([*argv, "trainer.seed=1", "algorithm.gamma=2", "--check"]) == 2
    out, err = capsys.readouterr()
    assert "the configuration (1 problem)" in err and "this machine lacks" in err and "plan:" not in out


def test_main_returns_the_status(capsys):
    assert [main(argv) for argv in (["trainer.seed=x"], ["--help"], ["--cfg", "job"])] == [2, 0, 0]
    assert "trainer" in capsys.readouterr().out


def test_a_right_configuration_is_returned(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    row = {"data_source": "openai/gsm8k", "prompt": "1+1?", "reward_model": {"ground_truth": "2"}}
    file.write_text("\n".join([json.dumps(row)] * 8))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    data = ["train_batch_size=4", f"train_files={file}", "val_files=null"]
    argv = ["algorithm.adv_estimator=grpo", "trainer.device=cpu", *(f"data.{word}" for word in data)]
    argv += [f"actor_rollout_ref.model.path={tmp_path}/model", "actor_rollout_ref.rollout.n=2"]
    argv.append("+data.padding_mode=1")
    cfg = resolve(argv, "ppo", PUBLIC)
    out, err = capsys.readouterr()
    assert cfg.data.train_batch_size == 4 and out == "" and err.count("padding_mode") == 1
    assert left([*argv, "--check"]) == 0
    assert "check: ok" in capsys.readouterr().out


def test_cfg_job_prints_what_can_be_read_back(tmp_path, capsys):
    argv = ["trainer.experiment_name=1e5", "data.seed=3", "+data.apply_chat_template_kwargs.a='1e5'"]
    assert left([*argv, "--cfg", "job"]) == 0
    (tmp_path / "x.yaml").write_text(capsys.readouterr().out)
    assert load([f"--config-path={tmp_path}", "--config-name=x"]) == load(argv)


ACTOR = "actor_rollout_ref.actor"
HELP = [
    ("ppo", "trainer.seed", ["trainer.seed\n", "default  42 (ours)\n", "meaning  Everything random"]),
    ("ppo", "algorithm.kl_ctrl", ["algorithm.kl_ctrl.horizon (int, 10000)", "algorithm.kl_ctrl.type"]),
    ("ppo", "critic.optim.clip_grad", ["now called critic.grad_clip", "gradient norm"]),
    ("ppo", "optim.lr", [f"{ACTOR}.optim.lr", "critic.optim.lr"]),
    ("ppo", "data.val_batch_size", ["no effect", "one stream"]),
    ("ppo", "actor_rollout_ref.rollout.engine_kwargs.vllm.x", ["Passed to vLLM"]),
    ("ppo", "", ["usage: python3 -m verl.trainer", "--check", "actor_rollout_ref.rollout", "algorithm"]),
    ("ppo", "all", ["data.train_files", "trainer.verify_weight_sync"]),
    ("ppo", f"{ACTOR}.kl_loss_type", ["type     str\n", "default  low_var_kl\n", "kl, k1, abs, mse, k2"]),
    ("ppo", "checkpoint.save_contents", ["values   any of model, optimizer, extra, hf_model"]),
    ("ppo", "algorithm.gamma", ["values   0 to 1\n"]),
    ("ppo", "algorithm.adv_estimator", ["one's own through verl.trainer.ppo.core_algos.register_adv_est"]),
    ("ppo", "reward_model.timeout", ["type     float\n"]),
    ("ppo", "trainer.total_training_steps", ["type     int, or null\n"]),
    ("sft", "data.messages_key", ["data.messages_key"]),
    ("eval", "data.response_key", ["data.response_key"]),
    ("generation", "data.n_samples", ["data.n_samples"]),
]


@pytest.mark.parametrize(("entry", "key", "parts"), HELP)
def test_help(capsys, entry, key, parts):
    assert left(["--help", key] if key else ["--help"], entry) == 0
    out = capsys.readouterr().out
    for part in parts:
        assert part in out


def test_help_on_nothing(capsys):
    assert left(["--help", "trainer.sead"]) == 2
    assert "trainer.seed" in capsys.readouterr().err


def test_the_reference_page_is_current():
    # In a process of its own: tests register engines, which the page would name.
    code = "import runpy; s = runpy.run_path('docs/write_config_page.py'); print(s['render'](s['PAGE'].read_text('utf-8')))"
    rendered = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == rendered.removesuffix("\n"), "docs/config.md is out of date: make docs"


def test_answers_are_fast_load_no_torch_and_write_nothing(tmp_path):
    """Limits are an idle machine's, times two for a busy one; best of three counts."""
    code = "import sys; from verl.trainer.main_ppo import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    limits = {"--help": 2.0, "--check": 4.0, "--cfg job": 4.0, "trainer.sead=1": 2.0}
    for argv, limit in limits.items():
        took = []
        while len(took) < 3 and min(took, default=limit) >= limit:
            started = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", code, *argv],
                capture_output=True,
                text=True,
                env=environment,
                cwd=tmp_path,
            )
            took.append(time.perf_counter() - started)
        assert done.stdout.splitlines()[-1] == "False" and min(took) < limit, (argv, took)
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_is_not_there_is_told_by_the_check_or_by_the_run_not_twice(capsys, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "wandb" else found(n, *a))
    words = ["trainer.logger=[console,wandb]", "algorithm.adv_estimator=grpo"]
    left([*words, "--check"])
    assert capsys.readouterr().err.count("wandb is not installed") == 1
    left(words)
    assert "wandb is not installed" not in capsys.readouterr().err
