"""What the configuration says of sampling, in training and in validation."""

from __future__ import annotations

from typing import Any

import pytest

from verl.config import load
from verl.trainer.parts import rollout_settings, validation_sampling

ROLLOUT = "actor_rollout_ref.rollout"


def config(*words: str) -> Any:
    return load(["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=/m", *words])


def test_validation_has_settings_of_its_own() -> None:
    train = ("temperature=0.7", "repetition_penalty=1.3", "min_p=0.1", "stop=[end]", "stop_token_ids=[5]")
    val = ("temperature=0.5", "top_k=9", "repetition_penalty=1.1", "min_p=0.02", "stop_token_ids=[7]")
    words = [*train, *(f"val_kwargs.{word}" for word in val)]
    one = config(*(f"{ROLLOUT}.{word}" for word in words))
    train, val = rollout_settings(one).sampling, validation_sampling(one)
    assert (train.temperature, train.repetition_penalty, train.min_p) == (0.7, 1.3, 0.1)
    assert (val.temperature, val.top_k, val.repetition_penalty, val.min_p) == (0.5, 9, 1.1, 0.02)
    assert (train.stop, train.stop_token_ids) == (("end",), (5,))
    assert (val.stop, val.stop_token_ids) == (("end",), (7,)), "what is not set is as in training"


def test_validation_is_greedy_and_plain_unless_asked() -> None:
    val = validation_sampling(config(f"{ROLLOUT}.repetition_penalty=1.3", f"{ROLLOUT}.min_p=0.1"))
    assert (val.temperature, val.top_p, val.top_k) == (0.0, 1.0, -1)
    assert (val.min_p, val.repetition_penalty) == (0.0, 1.0)


@pytest.mark.parametrize(("words", "temperature"), [(["do_sample=False"], 0.0), ([], 0.8), (["do_sample=True"], 0.8)])
def test_do_sample(words: list[str], temperature: float) -> None:
    given = [f"{ROLLOUT}.val_kwargs.{word}" for word in ("temperature=0.8", *words)]
    assert validation_sampling(config(*given)).temperature == temperature
