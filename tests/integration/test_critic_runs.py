"""PPO with a critic from the command line: what it logs and saves, warm-up, exact resume, refusals; ReMax's greedy
responses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from tests.runs import UNSTABLE, TinyRun, from_step
from tests.tiny import SPECIAL, tiny_model, tiny_tokenizer
from verl.trainer.main_ppo import main

GAE = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-2", "trainer.test_freq=0")


def train(tiny: TinyRun, out: Path, *words: str) -> dict[int, dict]:
    assert main(tiny.overrides(out, *GAE, *words)) == 0
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if "critic/vf_loss" in line or "actor/pg_loss" in line}


def stable(record: dict) -> dict:
    return {name: value for name, value in record.items() if not name.startswith((*UNSTABLE, "time"))}


def test_it_learns_values_and_goes_on_exactly(tiny: TinyRun, tmp_path: Path) -> None:
    words = ("critic.ppo_mini_batch_size=4", "algorithm.lam=0.9", "algorithm.gamma=0.99")
    whole = train(tiny, tmp_path / "whole", *words, "trainer.total_training_steps=4")
    later = from_step(tmp_path / "whole", 2, tmp_path / "parts")
    parts = train(tiny, later, *words, "trainer.total_training_steps=4")
    for step in (3, 4):
        assert stable(whole[step]) == stable(parts[step])
    first, last = whole[1], whole[4]
    assert first["critic/values/max"] == 0.0, "a fresh head knows nothing"
    assert last["critic/vf_loss"] < first["critic/vf_loss"] and last["critic/values/mean"] > 0.01
    names = ("vf_loss", "vf_clipfrac", "vpred_mean", "vf_explained_var", "grad_norm", "lr")
    assert {f"critic/{name}" for name in names} <= set(last)
    assert {"timing_s/values", "timing_s/update_critic", "timing_s/update_actor"} <= set(last)
    saved = tmp_path / "whole" / "global_step_4"
    critic = AutoModelForTokenClassification.from_pretrained(saved / "critic")
    assert critic.config.num_labels == 1 and critic.score.weight.abs().sum() > 0
    assert (saved / "state" / "critic_optim").is_dir()


def test_while_the_critic_warms_up_the_policy_stays(tiny: TinyRun, tmp_path: Path) -> None:
    words = ("trainer.critic_warmup=3", "trainer.total_training_steps=3", "data.train_batch_size=2")
    found = train(tiny, tmp_path / "out", *words, "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    assert ["actor/pg_loss" in found[step] for step in (1, 2, 3)] == [False, False, True]
    assert all("critic/vf_loss" in found[step] and "actor/entropy" in found[step] for step in (1, 2, 3))
    start = load_file(tiny.model / "model.safetensors")
    saved, end = (load_file(tmp_path / f"out/global_step_{n}/actor/model.safetensors") for n in (2, 3))
    assert all(torch.equal(start[name], saved[name]) for name in saved)
    assert not all(torch.equal(start[name], end[name]) for name in end)


@pytest.mark.parametrize("modules", [pytest.param("all-linear", marks=pytest.mark.long), "q_proj"])
def test_a_critic_with_an_adapter_learns_values(tiny: TinyRun, tmp_path: Path, modules: str) -> None:
    words = ("critic.model.lora_rank=4", f"critic.model.target_modules=[{modules}]", "trainer.save_freq=-1")
    found = train(tiny, tmp_path / "out", *words, "trainer.total_training_steps=2")
    assert found[1]["critic/grad_norm"] > 0 and found[2]["critic/values/mean"] != 0


def test_a_critic_of_another_vocabulary_or_no_model_is_refused(
    tiny: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = tiny_model(tmp_path / "other", vocab_size=300)
    assert main(tiny.overrides(tmp_path / "a", *GAE, f"critic.model.path={other}")) == 2
    assert "vocabulary has 300 tokens" in capfd.readouterr().err
    renamed = tiny_model(tmp_path / "renamed")
    tiny_tokenizer(renamed, special=(*SPECIAL[:-1], "<|renamed|>"))
    assert main(tiny.overrides(tmp_path / "c", *GAE, f"critic.model.path={renamed}")) == 2
    assert "critic.model.path: " in (said := capfd.readouterr().err) and "absent there" in said
    (tmp_path / "nothing").mkdir()
    assert main(tiny.overrides(tmp_path / "b", *GAE, f"critic.model.path={tmp_path / 'nothing'}")) == 2
    assert "critic.model.path" in capfd.readouterr().err


def test_pf_ppo_and_kl_in_the_reward_train_with_a_critic(tiny: TinyRun, tmp_path: Path) -> None:
    words = (
        "algorithm.use_pf_ppo=True",
        "algorithm.pf_ppo.weight_pow=1.0",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
    )
    found = train(tiny, tmp_path / "out", *words, "trainer.total_training_steps=3", "trainer.save_freq=-1")
    rates = [found[step]["actor/reward_kl_penalty_coeff"] for step in (1, 2, 3)]
    assert rates[0] == 0.001 and rates[2] != rates[0]
    assert all(0 < found[step]["training/pf_ppo/unique_ratio"] <= 1 for step in found)
    assert all("actor/entropy" in record and record["actor/grad_norm"] > 0 for record in found.values())


def test_remax_compares_with_a_greedy_response(tiny: TinyRun, tmp_path: Path) -> None:
    words = (
        "algorithm.adv_estimator=remax",
        "trainer.total_training_steps=2",
        f"trainer.rollout_data_dir={tmp_path / 'd'}",
    )
    found = train(tiny, tmp_path / "out", *words)
    assert all("critic/reward_baseline/mean" in found[step] and "critic/vf_loss" not in found[step] for step in (1, 2))
    rows = (tmp_path / "d" / "1.jsonl").read_text().splitlines()
    assert len(rows) == 4 * 3, "greedy responses are not trained on"
