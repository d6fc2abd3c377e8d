"""Configurations in YAML files: names, defaults lists, interpolation, errors; paths for workers."""

from __future__ import annotations

import pytest

from verl.compat.spellings import load
from verl.config import ConfigError, Map
from verl.config.schema.base import select
from verl.config.schema.fields import for_elsewhere, leaves

MODEL = "actor_rollout_ref.model"


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
    roles = (cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.ref, cfg.critic)
    assert {role.strategy for role in roles} == {"megatron"}
    assert load(["--config-name", "ppo_trainer"]) == load([])
    assert load(["--config-path=config", "--config-name=ppo_megatron_trainer.yaml"]) == cfg
    with pytest.raises(ConfigError, match="no such directory: cnf"):
        load(["--config-path=cnf", "--config-name=ppo_trainer"])
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
        ("trainer: {seed: x}\n", r"mine\.yaml"),
        ("data: [1]\n", "group of keys"),
        ("data: {\n", "cannot be read as YAML"),
        ("- a\n", "expected a mapping"),
        ("a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 9}]\n" for i in range(1, 9)), "aliases"),
        ("a: &a [*a]\n", "aliases"),
        ("defaults: [nothing]\n", "no built-in one"),
        ("defaults: [mine]\n", "includes itself"),
        ("defaults: [{a: b, c: d}]\n", "neither a name nor"),
        ("trainer: {seed: '${nothing.there}'}\n", "cannot be resolved"),
        ("data: {seed: '${trainer.seed}'}\ntrainer: {seed: '${data.seed}'}\n", "cannot be resolved"),
    ],
)
def test_errors(tmp_path, text, expected):
    with pytest.raises(ConfigError, match=expected):
        from_yaml(tmp_path, text)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--config-name=nothing"], "nothing.yaml"),
        (["--config-name=sft_trainer"], "belongs to another program"),
        (["--config-name"], "expected one argument"),
        (["--nothing"], "no such option"),
        (["-m", "trainer.seed=1"], "sweeps"),
        (["--cfg=no"], "--cfg.*choose from"),
        (["trainer.experiment_name='${a'"], r"trainer.experiment_name: .* cannot be resolved"),
    ],
)
def test_options(argv, expected):
    with pytest.raises(ConfigError, match=expected):
        load(argv)


def test_null_and_empty(tmp_path):
    text = "actor_rollout_ref: {actor: {profiler: null}}\ndata: {val_files: null, apply_chat_template_kwargs: null}\n"
    cfg = from_yaml(tmp_path, text + "critic:\n")
    assert cfg.data.val_files is None and cfg.data.apply_chat_template_kwargs == {}
    assert from_yaml(tmp_path, "") == load([])


# ---- paths that workers get: they may start in another folder than the driver ----


def test_what_exists_here_is_absolute_for_every_key(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("t.parquet", "template.jinja"):
        (tmp_path / name).touch()
    words = [f"{MODEL}.path=./model", "data.train_files=[t.parquet,other.parquet]", "data.val_files=null"]
    words += [f"{MODEL}.custom_chat_template=template.jinja"]
    config = load(words)
    plain = for_elsewhere(config)
    absolute = str(tmp_path / "model")
    model = plain["actor_rollout_ref"]["model"]
    assert model["path"] == model["hf_config_path"] == model["tokenizer_path"] == absolute
    assert plain["data"]["tokenizer"] == absolute
    assert plain["actor_rollout_ref"]["ref"]["model"]["path"] is None
    assert model["custom_chat_template"] == str(tmp_path / "template.jinja")
    assert plain["data"]["train_files"] == [str(tmp_path / "t.parquet"), "other.parquet"]
    assert plain["data"]["val_files"] is None
    assert plain["global_profiler"]["save_path"] == str(tmp_path / "outputs/profile"), "workers make it"
    # Nothing else is changed, and no relative path of something that is here is left.
    there, here = Map.of(plain), config.to_dict()
    for path, known in leaves(type(config)).items():
        if not known.is_path:
            assert select(there, path) == select(Map.of(here), path), path


def test_names_and_texts_that_are_no_files_stay(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    template = "{{ messages }}" + "x" * 5000
    words = [f"{MODEL}.path=Qwen/Qwen3-0.6B", f"{MODEL}.custom_chat_template='{template}'"]
    model = for_elsewhere(load(words))["actor_rollout_ref"]["model"]
    assert model["path"] == model["hf_config_path"] == "Qwen/Qwen3-0.6B"
    assert model["custom_chat_template"] == template


@pytest.mark.parametrize(
    "word",
    [
        f"trainer.total_training_steps={'9' * 400}",
        f"data.seed={'9' * 5000}",
        f"+data.apply_chat_template_kwargs.x={'[' * 500}{']' * 500}",
    ],
    ids=["400 digits", "5000 digits", "500 brackets"],
)
def test_values_beyond_measure_are_refused(word):
    with pytest.raises(ConfigError):
        load([word])


def test_a_file_of_hundreds_of_levels_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        from_yaml(tmp_path, "".join(f"{' ' * depth}a:\n" for depth in range(900)))


def test_the_reference_has_the_stages_of_the_actor_unless_it_has_its_own():
    of_actor, of_ref = (f"+actor_rollout_ref.{role}.megatron.override_transformer_config" for role in ("actor", "ref"))
    words = [f"{of_actor}.num_layers_in_first_pipeline_stage=1"]
    assert load(words).actor_rollout_ref.ref.megatron.override_transformer_config == {
        "num_layers_in_first_pipeline_stage": 1
    }
    own = load([*words, f"{of_ref}.moe_router_dtype=fp32"]).actor_rollout_ref.ref.megatron
    assert own.override_transformer_config == {"moe_router_dtype": "fp32"}
