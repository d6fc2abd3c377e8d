"""Commands of users of the public system, each through --check: what it asks for is known, or refused by name."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

import pytest

from verl.compat.paths import ENTRY_POINTS

TEXT = Path(__file__).with_name("public_commands.txt").read_text("utf-8")
[GRPO] = [line.removeprefix("GRPO=") for line in TEXT.splitlines() if line.startswith("GRPO=")]
PLUG_INS = """
from verl.experimental.dataset.sampler import AbstractSampler as Order
from verl.utils.dataset.rl_dataset import RLHFDataset as Rows
from verl.workers.reward_manager import NaiveRewardManager as Mine


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return 1.0
"""
COMMANDS = [text for text in TEXT.strip().split("\n\n") if not text.startswith("#")]


def test_there_are_enough() -> None:
    assert sum(not command.startswith("!") for command in COMMANDS) >= 60


@pytest.mark.parametrize("command", COMMANDS, ids=lambda text: text[-60:])
def test_a_command_is_checked(command: str, tmp_path: Path, monkeypatch, capsys) -> None:
    refusal, _, line = command[1:].partition("\n") if command.startswith("!") else ("", "", command)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.py").write_text(PLUG_INS)
    module, *words = shlex.split(line.replace("GRPO", GRPO).replace("ARR.", "actor_rollout_ref."))
    if "sft_trainer" in module:
        for name, value in (("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "8"), ("RANK", "0"), ("LOCAL_RANK", "0")):
            monkeypatch.setenv(name, value)  # of torchrun
    path, default = ENTRY_POINTS.get(f"verl.{module}", (f"verl.{module}", ""))
    first = [f"--config-name={default}"] if default else []
    status = importlib.import_module(path).main([*first, *words, "--check"])
    out, err = capsys.readouterr()
    if refusal:
        assert status == 2 and refusal in err, err
    else:
        assert status in (0, 3) and "check:" in out, err
