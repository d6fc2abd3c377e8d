"""Every users' command passes --check up to what the machine lacks, and fully when shrunk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = ROOT.parent / "shared" / "commands"
SCRIPTS = sorted(COMMANDS.glob("*.sh"))

if not SCRIPTS:
    pytest.skip("shared/commands is not beside the repository", allow_module_level=True)


@pytest.fixture
def shell(tmp_path):
    """Runs a script with this interpreter as python3 and an empty home; returns (status, stdout, stderr)."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python3").chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()

    def run(script, *argv):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "RAY_", "VERL_"))}
        env |= {"PATH": f"{folder}:{env['PATH']}", "HOME": str(home), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(["bash", str(script), *argv], capture_output=True, text=True, env=env, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_as_written(script, shell):
    """Only this machine's lacks: no key is unknown, no combination refused."""
    status, out, err = shell(script, "--check")
    assert status == 3, err
    assert "the configuration (" not in err and "this machine lacks (" in err
    assert "the configuration is right" in out and "trajectories" in out


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_shrunk(script, shell, tmp_path):
    """With a tiny model, one cpu and the embedded engine nothing is left to say."""
    row = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1+1?"}]}
    row["reward_model"] = {"style": "rule", "ground_truth": "2"}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 16))
    model = tmp_path / "model"
    model.mkdir()
    shape = {"model_type": "qwen3", "max_position_embeddings": 512, "num_attention_heads": 4}
    (model / "config.json").write_text(json.dumps(shape))
    (model / "model.safetensors").write_bytes(b"")
    status, out, err = shell(
        script,
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={tmp_path}/rows.jsonl",
        f"data.val_files={tmp_path}/rows.jsonl",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.name=native",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.total_training_steps=2",
        "--check",
    )
    assert status == 0, err
    assert "check: ok" in out and "4 prompts × 5 responses = 20 trajectories" in out


def test_a_later_key_wins_over_the_scripts(shell):
    script = COMMANDS / "qwen3_8b_gsm8k_drgrpo.sh"
    status, out, _ = shell(script, "trainer.total_epochs=2", "--cfg", "job")
    assert status == 0
    assert "loss_agg_mode: seq-mean-token-sum-norm" in out and "total_epochs: 2" in out
    assert "norm_adv_by_std_in_grpo: false" in out and "use_kl_loss: false" in out
