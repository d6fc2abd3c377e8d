"""Configurations in YAML files: names, defaults lists, interpolation, errors."""

from __future__ import annotations

import pytest

from verl.config import ConfigError, load


def from_yaml(tmp_path, text, *argv, name="mine", entry="ppo"):
    (tmp_path / f"{name}.yaml").write_text(text)
    return load([f"--config-path={tmp_path}", f"--config-name={name}", *argv], entry=entry)


def test_a_file_on_top_of_the_defaults(tmp_path):
    cfg = from_yaml(
        tmp_path,
        "defaults: [ppo_trainer, _self_]\nhydra: {run: {dir: .}, searchpath: [x]}\n"
        "data: {train_batch_size: 8, train_files: ~/x.parquet}\nactor_rollout_ref: {actor: {optim: {lr: 1e-5}}}\n",
        "data.train_batch_size=16",
    )
    assert cfg.data.train_batch_size == 16 and cfg.actor_rollout_ref.actor.optim.lr == 1e-5
    assert cfg.was_set("actor_rollout_ref.actor.optim.lr") and not cfg.data.train_files[0].startswith("~")


def test_built_in_names():
    cfg = load(["--config-name=ppo_megatron_trainer"])
    assert {
        cfg.actor_rollout_ref.actor.strategy,
        cfg.actor_rollout_ref.ref.strategy,
        cfg.critic.strategy,
    } == {"megatron"}
    assert load(["--config-name", "ppo_trainer"]) == load([])
    assert (
        load(["--config-path=config", "--config-name=ppo_megatron_trainer.yaml"]).critic.strategy
        == "megatron"
    )
    assert load(["--config-name=sft_trainer"], entry="sft").trainer.total_epochs == 4


def test_defaults_of_defaults_and_order(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "defaults: [ppo_megatron_trainer, _self_]\ntrainer: {seed: 1, total_epochs: 5}\n"
    )
    cfg = from_yaml(tmp_path, "defaults: [base, _self_]\ntrainer: {seed: 2}\n")
    assert (cfg.trainer.seed, cfg.trainer.total_epochs, cfg.critic.strategy) == (2, 5, "megatron")
    cfg = from_yaml(tmp_path, "trainer: {seed: 2}\ndefaults: [_self_, base]\n")
    assert cfg.trainer.seed == 1


def test_groups_in_the_defaults_list(tmp_path):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "mine.yaml").write_text("ppo_epochs: 3\n_target_: x.Y\n")
    cfg = from_yaml(
        tmp_path,
        "defaults:\n  - actor@actor_rollout_ref.actor: mine\n  - override ref@actor_rollout_ref.ref: megatron_ref\n"
        "  - data@data: legacy_data\n  - override hydra/job_logging: none\n  - _self_\n",
    )
    assert cfg.actor_rollout_ref.actor.ppo_epochs == 3 and cfg.actor_rollout_ref.ref.strategy == "megatron"


def test_interpolation(tmp_path):
    cfg = from_yaml(
        tmp_path,
        "data: {train_batch_size: 12, seed: '${oc.select:trainer.absent,5}'}\n"
        "actor_rollout_ref:\n  actor:\n    ppo_mini_batch_size: ${data.train_batch_size}\n"
        "    optim: {override_optimizer_config: {a: '${.b}', b: 3}}\n"
        "critic:\n  ppo_mini_batch_size: ${oc.select:actor_rollout_ref.actor.ppo_mini_batch_size,1}\n"
        "trainer: {experiment_name: 'x-${trainer.seed}', default_local_dir: 'runs/${trainer.experiment_name}'}\n",
        "trainer.seed=9",
    )
    assert cfg.actor_rollout_ref.actor.ppo_mini_batch_size == cfg.critic.ppo_mini_batch_size == 12
    assert cfg.data.seed == 5 and cfg.trainer.default_local_dir == "runs/x-9"
    assert cfg.actor_rollout_ref.actor.optim.override_optimizer_config.b == 3


def test_interpolation_of_automatic_values_and_old_names(tmp_path):
    cfg = from_yaml(
        tmp_path,
        "data: {max_response_length: 77}\nmine_rollout_n: 3\n"
        "custom_reward_function: {reward_kwargs: {limit: '${reward_model.reward_kwargs.max_resp_len}'}}\n"
        "trainer: {total_epochs: '${data.val_batch_size}'}\n".replace("mine_rollout_n", "rollout_n"),
        "data.val_batch_size=6",
    )
    assert cfg.custom_reward_function.reward_kwargs.limit == 77 and cfg.trainer.total_epochs == 6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: {train_batch_sizes: 1}\n", "nearest: data.train_batch_size"),
        ("data: {seed: 1, seed: 2}\n", "duplicate key"),
        ("data: [1]\n", "group of keys"),
        ("data: {\n", "cannot be read as YAML"),
        ("- a\n", "expected a mapping"),
        ("defaults: [nothing]\n", "no built-in of that name"),
        ("defaults: [mine]\n", "includes itself"),
        ("defaults: [{a: b, c: d}]\n", "neither a name nor"),
        ("trainer: {seed: '${nothing.there}'}\n", "cannot be resolved"),
        (
            "trainer: {seed: '${trainer.total_epochs}', total_epochs: '${trainer.seed}'}\n",
            "cannot be resolved",
        ),
    ],
)
def test_errors(tmp_path, text, expected):
    with pytest.raises(ConfigError, match=expected):
        from_yaml(tmp_path, text)


def test_errors_name_the_file(tmp_path):
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        from_yaml(tmp_path, "trainer: {seed: x}\n")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--config-name=nothing"], "nothing.yaml"),
        (["--config-name=sft_trainer"], "belongs to another program"),
        (["--config-name"], "expected one argument"),
        (["--nothing"], "no such option"),
        (["-m", "trainer.seed=1"], "sweeps"),
        (["--cfg=no"], "--cfg.*choose from"),
    ],
)
def test_options(argv, expected):
    with pytest.raises(ConfigError, match=expected):
        load(argv)


def test_null_and_empty(tmp_path):
    cfg = from_yaml(
        tmp_path,
        "actor_rollout_ref: {actor: {profiler: null}}\ndata: {val_files: null, apply_chat_template_kwargs: null}\ncritic:\n",
    )
    assert cfg.data.val_files is None and cfg.data.apply_chat_template_kwargs == {}
    assert from_yaml(tmp_path, "") == load([])


def test_an_interpolation_that_does_not_end_is_a_problem():
    with pytest.raises(ConfigError, match=r"trainer.experiment_name: .* cannot be resolved"):
        load(["trainer.experiment_name='${a'"])
