"""What the configuration becomes on its way into the roles of one process."""

from __future__ import annotations

import pytest

from tests.tiny import tiny_model, tiny_tokenizer
from verl.config import load
from verl.engine.registry import sampler_dtype
from verl.errors import UserError
from verl.platform import detect
from verl.workers import build
from verl.workers.launch import start_here


@pytest.mark.parametrize(
    ("words", "max_response_length"), [([], 12), (["actor_rollout_ref.actor.loss_scale_factor=0.5"], 0.5)]
)
def test_h_of_the_loss_is_the_number_that_was_given(tmp_path, words, max_response_length):
    config = load(
        [
            "algorithm.adv_estimator=grpo",
            "data.max_prompt_length=16",
            "data.max_response_length=12",
            f"actor_rollout_ref.model.path={tiny_model(tmp_path / 'model')}",
            "actor_rollout_ref.rollout.name=native",
            "trainer.device=cpu",
            *words,
        ]
    )
    workers = start_here(config, tiny_tokenizer(), total_steps=1)
    assert workers.policy.group.plan.max_response_length == max_response_length


@pytest.mark.parametrize(
    ("wanted", "trainer", "expected"),
    [
        (None, "torch.bfloat16", "bfloat16"),
        ("fp32", "torch.bfloat16", "float32"),
        ("bfloat16", "torch.float32", "bfloat16"),
    ],
)
def test_the_samplers_data_type_is_its_own_or_the_trainers(wanted, trainer, expected) -> None:
    assert sampler_dtype("native", wanted, trainer) == expected


def test_a_data_type_the_sampler_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match=r"rollout\.dtype=float16: .*or leave it null for the trainer's"):
        sampler_dtype("native", "float16", "torch.float32")
    with pytest.raises(UserError, match=r"set .*rollout\.dtype=float32 or bfloat16 \(null is .*, float16\)"):
        sampler_dtype("native", None, "torch.float16")


def test_a_reference_of_its_own_has_its_own_configuration(tmp_path) -> None:
    paths = [tiny_model(tmp_path / str(layers), num_hidden_layers=layers) for layers in (2, 1)]
    words = [f"actor_rollout_ref.{key}.path={path}" for key, path in zip(("model", "ref.model"), paths, strict=True)]
    config = load([*words, "algorithm.use_kl_in_reward=True", "trainer.device=cpu"])
    engines = build.engines_of(config, ["actor", "ref"], 1, detect("cpu"))
    for role, layers in (("actor", 2), ("ref", 1)):
        names = [name for name, _ in engines[role].named_weights() if ".layers." in name]
        assert {name.split(".")[2] for name in names} == set("01"[:layers])
