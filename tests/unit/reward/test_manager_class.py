"""Managers of the user's own: made in a scoring process, called with a view of the answers, failing like a function."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.tiny import tiny_model, tiny_tokenizer
from verl.compat.spellings import load
from verl.preflight.check import check
from verl.reward.outcome import RewardLoadError
from verl.reward.runner import RewardRunner
from verl.trajectory import Prompt, Trajectory

MANAGERS = """
import torch

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase


class Async(RewardManagerBase):
    async def run_single(self, data):
        item = data[0]
        ids = item.batch["responses"][item.batch["response_mask"].bool()]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        if text == "raise":
            raise KeyError("no such thing")
        truth = item.non_tensor_batch["reward_model"]["ground_truth"]
        extra = {"acc": text == truth, "level": item.non_tensor_batch["level"], "steps": self.config.trainer.save_freq}
        extra |= item.non_tensor_batch["reward_scores"]
        base = self.compute_score("openai/gsm8k", text, "72")
        return {"reward_score": float(text == truth) + base, "reward_extra_info": extra}


class Sync:
    def __init__(self, tokenizer, num_examine, compute_score=None, penalty=0.5):
        self.penalty = penalty

    def run_single(self, data):
        return {"reward_score": -self.penalty * int(data.batch["response_mask"].sum())}


class Whole:
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source"):
        self.key = reward_fn_key

    def __call__(self, data, return_dict=False):
        rewards = torch.zeros(data.batch["responses"].shape)
        for i, item in enumerate(data):
            rewards[i, int(item.batch["response_mask"].sum()) - 1] = len(data) + i
        extra = {"source": [item.non_tensor_batch[self.key] for item in data], "n": [len(data)] * len(data)}
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards


class Plain:
    def __call__(self, data):
        return data.batch["responses"].sum(-1).float()


class Asks:
    def __init__(self, compute_score, reward_router_address, reward_model_tokenizer):
        assert reward_model_tokenizer.eos_token == "<|im_end|>"
        self.compute_score, self.address = compute_score, reward_router_address

    def run_single(self, data):
        return {"reward_score": 1.0, "reward_extra_info": {"asked": [self.address, self.compute_score()]}}


def named(reward_router_address):
    return reward_router_address


class Greedy:
    def __init__(self, tokenizer, dragons):
        pass

    def run_single(self, data):
        return 1.0


class Nothing:
    pass


not_a_class = 3
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def config(model, tmp_path):
    (tmp_path / "managers.py").write_text(MANAGERS)

    def make(name: str) -> Any:
        manager = f"reward_manager={{source:importlib,name:{name},module:{{path:{tmp_path}/managers.py}}}}"
        run = ["algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={model}", "trainer.device=cpu"]
        return load([*run, manager, "reward_model.num_workers=1", "trainer.save_freq=17"])

    return make


def trajectory_of(text: str, index: int = 0, truth: str = "72") -> Trajectory:
    ids = np.array(tiny_tokenizer().encode(text), np.int64)
    messages = [{"role": "user", "content": "q"}]
    prompt = Prompt("0:0@0", np.arange(4), messages, "src", truth, columns={"level": 3})
    t = Trajectory(prompt, index, ids, np.ones(len(ids), bool))
    t.text = text
    return t


def score(config: Any, answers: list[Trajectory], judge: Any = None) -> Any:
    """Score the answers; the outcome of a text that is tried as before a run, for managers of single answers."""
    runner = RewardRunner(config, judge=judge)
    try:
        for t in answers:
            asyncio.run(runner.score(t))
        asyncio.run(runner.score_batch(answers))
        return asyncio.run(runner.try_function(answers[0].prompt, "72")) if runner.per_response else None
    finally:
        runner.close()


def test_a_class_that_a_plugin_registers_is_one_by_its_name(config, model, tmp_path, monkeypatch) -> None:
    config("Async")
    source = (tmp_path / "managers.py").read_text()
    register = "from verl.workers.reward_manager import register"
    (tmp_path / "my_plugin.py").write_text(f"{register}\n{source}\nregister('mine')(Sync)\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = (
        f"actor_rollout_ref.model.path={model}",
        "reward.reward_manager.name=mine",
        "reward_model.num_workers=1",
    )
    named = load([*words, "actor_rollout_ref.model.external_lib=my_plugin", "trainer.device=cpu"])
    assert not [p for p in check(named).problems if "reward_manager" in str(p)]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    row = trajectory_of("72")
    score(named, [row])
    assert row.score == -0.5 * row.length
    refused = check(load([*words, "reward.reward_manager.name=other"])).problems
    assert any("register your own with verl.workers.reward_manager.register" in str(p) for p in refused)


def test_an_async_manager_scores_responses_one_by_one(config) -> None:
    good, bad, raising = trajectory_of("72"), trajectory_of("#### 72", truth="7"), trajectory_of("raise")
    good.extra["reward_scores"] = {"turns_earned": 2.5}
    tried = score(config("Async"), [good, bad, raising])
    assert (tried.score, tried.parts["acc"]) == (1.0, True), "a text that is tried is tokenised"
    assert good.score == 1.0 and good.score_parts == {
        "acc": True,
        "level": 3,
        "steps": 17,
        "turns_earned": 2.5,
    }
    assert bad.score == 1.0 and bad.score_parts["acc"] is False, "the built-in function it was given"
    assert raising.score is None and "no such thing" in raising.score_error


@pytest.mark.long
def test_a_manager_may_be_plain_and_gets_the_arguments_it_names(config) -> None:
    t = trajectory_of("abcd")
    score(config("Sync"), [t])
    assert t.score == -2.0


@pytest.mark.long
def test_a_manager_and_the_function_it_is_handed_get_the_runs_judge(config, model, tmp_path) -> None:
    run, t = config("Asks"), trajectory_of("72")
    run.custom_reward_function.path, run.custom_reward_function.name = f"{tmp_path}/managers.py", "named"
    offered = {"reward_router_address": "http://judge/v1", "reward_model_tokenizer": [str(model), False]}
    score(run, [t], judge=SimpleNamespace(offered=offered, close=lambda: None))
    assert t.score_parts == {"asked": ["http://judge/v1"] * 2}, t.score_error


def test_a_manager_of_whole_batches(config) -> None:
    answers = [trajectory_of("ab", 0), trajectory_of("abcd", 1)]
    score(config("Whole"), answers)
    assert [t.score for t in answers] == [2.0, 3.0]
    assert [t.score_parts for t in answers] == [{"source": "src", "n": 2}] * 2
    plain = [trajectory_of("a"), trajectory_of("b")]
    score(config("Plain"), plain)
    assert [t.score for t in plain] == [float(t.response_ids.sum()) for t in plain]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nobody", "it defines no 'Nobody'"),
        ("Nothing", "without run_single .* and without __call__"),
        ("not_a_class", "this is a int, not a class"),
    ],
)
def test_what_cannot_be_a_manager_is_refused_before_the_run(config, name, message) -> None:
    with pytest.raises(RewardLoadError, match=message):
        RewardRunner(config(name))


@pytest.mark.long
def test_a_manager_that_asks_for_what_nobody_has_says_so(config) -> None:
    t = trajectory_of("a")
    with pytest.raises(RewardLoadError):
        score(config("Greedy"), [t])
    assert t.score is None and "'dragons'; a manager gets" in t.score_error
