"""Every estimator and every policy loss trains a tiny model by its key, with nothing refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.runs import TinyRun, records
from tests.tiny import tiny_model
from verl.config.release import built_in
from verl.trainer.main_ppo import main

ACTOR = "actor_rollout_ref.actor"
ESTIMATORS = built_in("ESTIMATORS")
LOSSES = built_in("LOSSES")
MORE = {
    "mo_grpo": ["algorithm.gdpo_reward_keys=[score,length]"],
    "rlcsd": [
        "distillation.enabled=True",
        "distillation.distillation_loss.distillation_loss_coef=0",
        "distillation.teacher_models.teacher_model.prompt='{prompt} Read this: {solution}'",
        "distillation.teacher_models.teacher_model.solution_score=0.15",
        "distillation.teacher_models.teacher_model.contrast=2",
    ],
    "gdpo": ["algorithm.gdpo_reward_keys=[score,length]"],
    "gigpo": ["data.sampler={class_path:pkg://verl.data.curriculum,class_name:Frontier}", "algorithm.gamma=0.95"],
    "grpo_passk": ["algorithm.passk_k=2"],
    "dro": [f"{ACTOR}.policy_loss.dro_beta=0.1"],
    "gspo": [f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4"],
    "dppo_tv": ["algorithm.rollout_correction.bypass_mode=True", f"{ACTOR}.ppo_epochs=2"],
}
PAIRS = [(ESTIMATORS[i % len(ESTIMATORS)], LOSSES[i % len(LOSSES)]) for i in range(max(len(ESTIMATORS), len(LOSSES)))]


LOSS = "distillation.distillation_loss"
DISTILLED = {
    "a term beside the rewards": [f"{LOSS}.loss_mode=low_var_kl", f"{LOSS}.distillation_loss_coef=0.5"],
    "the most likely tokens alone": [
        f"{LOSS}.loss_mode=forward_kl_topk",
        f"{LOSS}.topk=8",
        f"{LOSS}.use_task_rewards=False",
    ],
    "the policy's most likely tokens": [f"{LOSS}.loss_mode=reverse_kl_topk", f"{LOSS}.topk=8"],
    "the most likely tokens of both": [
        f"{LOSS}.loss_mode=reverse_kl_topk",
        f"{LOSS}.token_set=union",
        f"{LOSS}.topk=8",
    ],
    "a policy gradient": [
        f"{LOSS}.loss_mode=k1",
        f"{LOSS}.use_policy_gradient=True",
        f"{LOSS}.loss_max_clamp=5.0",
        f"{LOSS}.log_prob_min_clamp=-20.0",
    ],
}


@pytest.mark.parametrize(("estimator", "loss"), PAIRS)
def test_it_trains_by_its_key(tiny: TinyRun, tmp_path: Path, estimator: str, loss: str) -> None:
    own = [f"algorithm.adv_estimator={estimator}", f"{ACTOR}.policy_loss.loss_mode={loss}"]
    train(tiny, tmp_path, 2, *own, *MORE.get(estimator, []), *MORE.get(loss, []))


@pytest.mark.parametrize("how", DISTILLED)
def test_distillation_trains_by_its_keys(tiny: TinyRun, tmp_path: Path, how: str) -> None:
    teacher = tiny_model(tmp_path / "teacher", seed=3, scale=4.0, hidden_size=64)
    model = f"distillation.teacher_models.teacher_model.model_path={teacher}"
    steps = 10 if "alone" in how else 2
    found = train(tiny, tmp_path, steps, "distillation.enabled=True", model, *DISTILLED[how])
    first, last = found[1], found[steps]
    names = ("loss", "abs_loss", "loss_min", "loss_max")
    assert {f"distillation/{name}" for name in names} <= set(last)
    assert last["distillation/loss_min"] <= last["distillation/loss"] <= last["distillation/loss_max"]
    if "alone" in how:
        assert last["distillation/loss"] < first["distillation/loss"]
        assert last["actor/loss"] == pytest.approx(last["distillation/loss"], rel=1e-5)
        assert {"distillation/overlap_ratio", "distillation/teacher_mass_min"} <= set(last)


def train(tiny: TinyRun, tmp_path: Path, steps: int, *own: str) -> dict[int, dict]:
    """The records of a run with nothing refused."""
    words = [
        f"{ACTOR}.optim.lr=1e-3",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        *own,
    ]
    assert main(tiny.overrides(tmp_path / "out", *words)) == 0
    found = records(tmp_path / "out")
    assert sorted(found) == list(range(1, steps + 1))
    for record in found.values():
        assert math.isfinite(record["actor/loss"]) and record.get("training/refused_steps", 0) == 0
        assert record["actor/grad_norm"] > 0
        assert "critic/advantages/mean" in record
        assert (f"{LOSS}.use_task_rewards=False" in own) != ({"actor/pg_loss", "actor/ppo_kl"} <= set(record))
    return found


def test_the_entropy_coefficient_moves_from_step_to_step(tiny: TinyRun, tmp_path: Path) -> None:
    control = ["target=9", "coeff=0.1", "delta=0.02"]
    found = train(tiny, tmp_path, 2, "algorithm.adv_estimator=grpo", *(f"algorithm.entropy_ctrl.{c}" for c in control))
    assert [found[step]["actor/entropy_coeff"] for step in (1, 2)] == pytest.approx([0.1, 0.12])


def test_a_run_says_that_rejected_responses_stay_in_the_baseline(tiny: TinyRun, tmp_path: Path) -> None:
    rejection = "algorithm.rollout_correction.rollout_rs"
    words = [f"{rejection}=seq_sum_k2", f"{rejection}_threshold=1e-30", "trainer.total_training_steps=2"]
    words += [
        "algorithm.adv_estimator=grpo",
        "trainer.save_freq=-1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
    ]
    assert main(tiny.overrides(tmp_path / "out", *words)) == 0
    lines = (tmp_path / "out" / "events.jsonl").read_text().splitlines()
    said = [event for event in map(json.loads, lines) if event["event"] == "rejected_in_baseline"]
    assert [event["step"] for event in said] == [1, 2]
    assert [bool(event.get("message")) for event in said] == [True, False]
