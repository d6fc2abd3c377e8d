"""What a user's module adds trains from the command line with no other edit: needs, losses, loops with several
segments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import TinyRun, from_step
from verl.trainer.main_ppo import main

PLUG_IN = "actor_rollout_ref.model.external_lib=tests.integration.plug_in_needs"


def records(out: Path) -> list[dict]:
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("step")]


def test_declared_needs_are_there_when_they_are_asked_for(tiny: TinyRun, tmp_path: Path) -> None:
    from tests.integration import plug_in_needs

    words = [
        PLUG_IN,
        "algorithm.adv_estimator=near_the_reference",
        "actor_rollout_ref.actor.policy_loss.loss_mode=against_the_sampler",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",  # one update a step: nothing else asks for old log-probs
        "trainer.total_training_steps=2",
        "trainer.test_freq=0",
    ]
    assert main(tiny.overrides(tmp_path / "out", *words)) == 0
    found = records(tmp_path / "out")
    assert plug_in_needs.SEEN["loss"] == ["entropy", "rollout_log_probs"]
    assert all({"timing_s/ref", "timing_s/old_log_prob", "actor/mine"} <= set(r) for r in found) and found


def test_demonstrations_are_learned_by_the_loss_of_observations(tiny: TinyRun, tmp_path: Path) -> None:
    """Here all rows are demonstrations: there is no policy term."""
    words = [
        "actor_rollout_ref.model.external_lib=tests.integration.plug_in_demonstrations",
        "actor_rollout_ref.rollout.agent.default_agent_loop=demonstration",
        "actor_rollout_ref.actor.observation_loss_coef=1.0",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.total_training_steps=3",
        "trainer.test_freq=0",
    ]
    assert main(tiny.overrides(tmp_path / "out", *words)) == 0
    losses = [record["actor/observation_loss"] for record in records(tmp_path / "out")]
    assert len(losses) == 3 and losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize(
    ("page", "metric"),
    [
        ("add-an-algorithm.md", "actor/weight"),
        ("add-an-engine.md", "training/rollout_logprob_abs_diff/max"),
    ],
)
def test_the_module_of_a_page_trains(
    tiny: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, metric: str
) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    code = text.split("```python\n")[1].split("```")[0]
    (tmp_path / code.split()[1]).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    overrides = text.split("main_ppo … \\\n")[1].split("```")[0].replace("\\\n", " ").split()
    words = [*overrides, "trainer.total_training_steps=2", "trainer.test_freq=0"]
    assert main(tiny.overrides(tmp_path / "out", *words)) == 0
    assert all(record[metric] > 0 and "actor/grad_norm" in record for record in records(tmp_path / "out"))


def test_an_estimator_that_needs_values_has_a_critic(
    tiny: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [
        PLUG_IN,
        "algorithm.adv_estimator=beyond_the_critic",
        "trainer.critic_warmup=2",
        "trainer.total_training_steps=2",
        "trainer.test_freq=0",
    ]
    assert main(tiny.overrides(tmp_path / "out", *words)) == 0
    assert "no critic" not in capfd.readouterr().err
    warm, then = records(tmp_path / "out")
    assert "critic/vf_loss" in warm and "actor/grad_norm" not in warm and "actor/grad_norm" in then
    assert main(tiny.overrides(tmp_path / "off", *words, "critic.enable=False")) == 2
    assert "beyond_the_critic needs values" in capfd.readouterr().err


def test_a_need_that_nothing_produces_is_refused(
    tiny: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

    register_adv_est("wants_a_teacher", needs={"teacher_log_probs"})(lambda token_level_rewards, **kwargs: None)
    try:
        words = [PLUG_IN, "algorithm.adv_estimator=wants_a_teacher"]
        assert main(tiny.overrides(tmp_path / "out", *words)) == 2
    finally:
        del ADV_ESTIMATOR_REGISTRY["wants_a_teacher"]
    assert "wants_a_teacher" in (text := capfd.readouterr().err) and "a teacher" in text


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", pytest.param("token-mean", marks=pytest.mark.long)])
def test_a_loop_with_several_segments_trains(tiny: TinyRun, tmp_path: Path, mode: str) -> None:
    reward = tmp_path / "metrics.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return {'score': len(solution_str) % 3, 'seen': extra_info['agent_metrics'].get('asked', 0)}\n"
    )
    words = [
        PLUG_IN,
        f"custom_reward_function.path={reward}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=forgetful",
        f"actor_rollout_ref.actor.loss_agg_mode={mode}",
        "trainer.total_training_steps=2",
        f"trainer.rollout_data_dir={tmp_path / 'dump'}",
    ]
    assert main(tiny.overrides(tmp_path / "out", *words)) == 0
    first = records(tmp_path / "out")[0]
    assert first["num_turns/max"] == 4 and first["response_length/max"] > 12, "lengths add up over segments"
    assert first["training/rollout_logprob_abs_diff/max"] < 1e-3, "every segment is scored in its own context"
    row = json.loads((tmp_path / "dump" / "1.jsonl").read_text().splitlines()[0])
    assert row["turns"] == 2 and row["agent_metrics"] == {"asked": 2, "tool_calls": 0.5} and row["seen"] == 2


def test_dynamic_sampling_trains_and_goes_on_exactly(tiny: TinyRun, tmp_path: Path) -> None:
    """Half of the groups have no signal; what goes on from the first step is the same."""
    reward = tmp_path / "half.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return {'score': len(solution_str) % 3 if int(ground_truth) % 2 else 1.0, 'acc': 1.0}\n"
    )
    words = [
        "algorithm.filter_groups.enable=True",
        f"custom_reward_function.path={reward}",
        "data.train_batch_size=3",
        "trainer.test_freq=0",
        "trainer.total_training_steps=3",
    ]
    assert main(tiny.overrides(tmp_path / "whole", *words)) == 0
    assert main(tiny.overrides(from_step(tmp_path / "whole", 1, tmp_path / "parts"), *words)) == 0
    whole, parts = ([r for r in records(tmp_path / name) if "actor/grad_norm" in r] for name in ("whole", "parts"))
    assert [r["step"] for r in parts] == [1, 2, 3]
    assert sum(r["training/filter_groups/evicted_samples"] for r in whole) > 2
    for one, other in zip(whole, parts, strict=True):
        for name in ("actor/grad_norm", "critic/score/mean", "training/filter_groups/evicted_samples"):
            assert one[name] == other[name], (one["step"], name)
        assert one["critic/score/min"] < one["critic/score/max"], "every group left has signal"
