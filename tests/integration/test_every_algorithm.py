"""Every estimator and every policy loss trains ten steps of a tiny model by its key, with nothing refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.runs import TinyRun, records
from verl.config.names import built_in
from verl.trainer.main_ppo import main

ACTOR = "actor_rollout_ref.actor"
ESTIMATORS = built_in("ESTIMATORS")
LOSSES = built_in("LOSSES")
MORE = {
    "gdpo": ["algorithm.gdpo_reward_keys=[score,length]"],
    "dro": [f"{ACTOR}.policy_loss.dro_beta=0.1"],
    "gspo": [f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4"],
    "dppo_tv": ["algorithm.rollout_correction.bypass_mode=True", f"{ACTOR}.ppo_epochs=2"],
}
PAIRS = [
    (ESTIMATORS[i % len(ESTIMATORS)], LOSSES[i % len(LOSSES)])
    for i in range(max(len(ESTIMATORS), len(LOSSES)))
]


@pytest.mark.parametrize(("estimator", "loss"), PAIRS)
def test_it_trains_by_its_key(tiny: TinyRun, tmp_path: Path, estimator: str, loss: str) -> None:
    words = [
        f"algorithm.adv_estimator={estimator}",
        f"{ACTOR}.policy_loss.loss_mode={loss}",
        f"{ACTOR}.optim.lr=1e-3",
        "trainer.total_training_steps=10",
        "trainer.save_freq=-1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        *MORE.get(estimator, []),
        *MORE.get(loss, []),
    ]
    assert main(tiny.overrides(tmp_path / "out", *words)) == 0
    found = records(tmp_path / "out")
    assert sorted(found) == list(range(1, 11))
    for record in found.values():
        assert math.isfinite(record["actor/pg_loss"]) and record.get("training/refused_steps", 0) == 0
        assert record["actor/grad_norm"] > 0
        assert {"actor/ppo_kl", "critic/advantages/mean"} <= set(record)
