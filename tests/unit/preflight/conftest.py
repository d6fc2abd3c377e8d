"""A machine without anything, and a run that is right, for the tests of the check."""

from __future__ import annotations

import pytest

from tests.unit.preflight.cases import ARR, write_model, write_rows


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine without accelerators, cluster, hub cache or trackers' logins."""
    others = ("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE")
    for name in ("RAY_ADDRESS", "VERL_USE_EXTERNAL_MODULES", *others):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub" / "hub"))
    monkeypatch.setattr("verl.config.devices._nodes", lambda name: [])
    monkeypatch.setattr("verl.config.devices._proc_gpus", list)
    monkeypatch.setattr("verl.preflight.machine.version", lambda name: None)


@pytest.fixture
def base(tmp_path):
    """Arguments of a run that is right."""
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={write_rows(tmp_path / 'train.parquet')}",
        f"data.val_files={write_rows(tmp_path / 'test.parquet', 4)}",
        "data.train_batch_size=8",
        f"{ARR}.actor.ppo_mini_batch_size=4",
        f"{ARR}.model.path={write_model(tmp_path / 'model')}",
        f"{ARR}.rollout.n=4",
        "trainer.device=cpu",
    ]
