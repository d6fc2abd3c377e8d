"""Engines that a user registers train, are checked and are shown as those of this package are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import TinyRun
from verl.trainer.main_ppo import main

MODULE = "tests.contract.engines_of_a_user"
ARR = "actor_rollout_ref"
WORDS = (
    f"{ARR}.model.external_lib={MODULE}",
    f"{ARR}.rollout.name=users_sampler",
    f"+{ARR}.rollout.engine_kwargs.users_sampler.speed=2",
    f"{ARR}.actor.strategy=users_trainer",
    f"+{ARR}.actor.users_trainer.depth=3",
    "trainer.total_training_steps=2",
    "trainer.test_freq=0",
    "trainer.save_freq=-1",
)


def test_they_train_with_a_weight_sync_between_them(tmp_path: Path) -> None:
    words = TinyRun(tmp_path).overrides(tmp_path / "out", *WORDS)
    assert main(words) == 0
    from tests.contract.engines_of_a_user import BUILT

    assert BUILT == ["trainer 3", "sampler {'speed': 2}"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["training/rollout_logprob_abs_diff/max"] for line in lines if line.get("step")) < 1e-4


def test_their_own_rules_are_part_of_a_check(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = [f"{ARR}.rollout.engine_kwargs.users_sampler.speed=0", f"{ARR}.actor.users_trainer.depth=4"]
    words = TinyRun(tmp_path).overrides(tmp_path / "out", *WORDS, *wrong, f"{ARR}.rollout.dtype=bfloat16")
    assert main(["--check", *words]) == 2
    text = "".join(capfd.readouterr())
    for part in (
        "users_sampler.speed=0",
        "users_trainer.depth=4",
        "users_sampler engine computes in float32",
    ):
        assert part in text


def test_the_doctor_shows_them() -> None:
    command = [sys.executable, "-m", "verl.cli.main", "doctor", "--json", "--external-lib", MODULE]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    names = {finding["name"] for finding in json.loads(shown)["findings"]}
    assert {"rollout.name=users_sampler", "strategy=users_trainer", "rollout.name=vllm"} <= names
