"""Old names, keys without effect, keys that are refused: each of them."""

from __future__ import annotations

import itertools
import re

import pytest

from verl.compat.spellings import PUBLIC, load
from verl.config import ConfigError
from verl.config.reference import written
from verl.config.schema.entries import ROOTS
from verl.config.schema.fields import locate

ARR = "actor_rollout_ref"
PREFIXES = (
    "",
    f"{ARR}.actor.",
    f"{ARR}.ref.",
    f"{ARR}.rollout.",
    f"{ARR}.",
    "critic.",
    "critic.model.",
    "data.",
)


def alternatives(glob):
    """Paths that a glob covers, without a prefix for `*.`."""
    if braces := re.search(r"\{([^{}]*)\}", glob):
        for word in braces[1].split(", "):
            yield from alternatives(glob[: braces.start()] + word + glob[braces.end() :])
    else:
        yield glob.replace("*.", "").replace("*", "x")


@pytest.mark.parametrize(("entry", "glob"), [(e, g) for e, table in PUBLIC.renames.items() for g in table])
def test_every_old_name_is_a_key_of_the_schema(entry, glob):
    root = ROOTS[entry]
    fits = 0
    for name, prefix in itertools.product(alternatives(glob), PREFIXES):
        new = PUBLIC.canonical(prefix + name, entry)
        place = locate(root, new)
        if new == prefix + name or place is None:
            continue
        fits += 1
        if place.field.group is None and not place.field.is_map:
            value = written(place.field.default())
            cfg = load([f"{prefix}{name}={value}"], entry)
            assert cfg.was_set(new) and f"{prefix}{name} is now called {new}" in cfg.notices
    assert fits or glob in PUBLIC.renames["ppo"]  # an entry point has those of all


# entry point, old name and value as written, the schema's key and value; ARR is actor_rollout_ref
ALIASES = """
ppo reward.reward_manager.name=dapo → reward_model.reward_manager=dapo
ppo reward_manager.name=dapo → reward_model.reward_manager=dapo
ppo reward.custom_reward_function.reward_kwargs.a=1 → custom_reward_function.reward_kwargs.a=1
ppo reward.reward_kwargs.overlong_buffer_cfg.len=3 → reward_model.reward_kwargs.overlong_buffer_cfg.len=3
ppo reward_model.overlong_buffer.len=3 → reward_model.reward_kwargs.overlong_buffer_cfg.len=3
ppo ARR.actor.checkpoint.contents=[model,extra] → ARR.actor.checkpoint.save_contents=[model,extra]
ppo trainer.val_generations_to_log_to_wandb=3 → trainer.log_val_generations=3
ppo reward.reward_model.rollout.n=2 → reward_model.rollout.n=2
ppo reward.max_rpm=3 → reward_model.max_rpm=3
ppo ARR.actor.policy_loss.loss_mode=bypass_mode → algorithm.rollout_correction.bypass_mode=True
ppo sandbox_fusion.max_concurrent=2 → reward_model.sandbox_fusion.max_concurrent=2
ppo critic.optim.clip_grad=2 → critic.grad_clip=2.0
ppo ARR.ref.log_prob_micro_batch_size=4 → ARR.ref.log_prob_micro_batch_size_per_gpu=4
ppo critic.forward_micro_batch_size=4 → critic.forward_micro_batch_size_per_gpu=4
ppo ARR.model.lora.exclude_modules=x → ARR.model.exclude_modules=[x]
ppo ARR.model.lora.target_modules=[linear_qkv,linear_proj] → ARR.model.target_modules=[q_proj,k_proj,v_proj,o_proj]
ppo ARR.actor.veomni.router_replay.mode=R3 → ARR.actor.router_replay.mode=R3
ppo ARR.ref.veomni.ulysses_parallel_size=2 → ARR.ref.ulysses_sequence_parallel_size=2
ppo ARR.actor.veomni.expert_parallel_size=2 → ARR.actor.fsdp_config.expert_parallel_size=2
sft engine.ep_size=2 → engine.expert_parallel_size=2
ppo critic.veomni.fsdp_size=4 → critic.model.fsdp_config.fsdp_size=4
ppo critic.veomni.ulysses_parallel_size=2 → critic.ulysses_sequence_parallel_size=2
ppo ARR.actor.torchtitan.activation_checkpoint=none → ARR.model.enable_gradient_checkpointing=False
ppo ARR.actor.torchtitan.activation_checkpoint=selective → ARR.model.enable_gradient_checkpointing=True
ppo ARR.actor.fsdp_config.turbo_config.distributed.fully_shard_parallel_size=8 → ARR.actor.fsdp_config.fsdp_size=8
ppo ARR.actor.fsdp_config.turbo_config.memory.recompute=False → ARR.model.enable_gradient_checkpointing=False
ppo ray_init.num_cpus=4 → ray_kwargs.ray_init.num_cpus=4
sft model.fsdp_config.cpu_offload=True → engine.param_offload=True
ppo ARR.actor.fsdp_config.recompute=False → ARR.model.enable_gradient_checkpointing=False
ppo critic.fsdp.turbo_config.memory.recompute=False → critic.model.enable_gradient_checkpointing=False
ppo ARR.actor.engine.tp=2 → ARR.actor.megatron.tensor_model_parallel_size=2
ppo ARR.ref.engine.vpp=2 → ARR.ref.megatron.virtual_pipeline_model_parallel_size=2
ppo ARR.actor.engine.attention_backend_override=flash → ARR.actor.megatron.override_transformer_config.attention_backend=flash
ppo ARR.actor.engine.recompute=full → ARR.model.enable_gradient_checkpointing=True
ppo ARR.rollout.enable_sleep_mode=False → ARR.rollout.free_cache_engine=False
ppo ARR.model.lora.fully_sharded_loras=True → ARR.rollout.engine_kwargs.vllm.fully_sharded_loras=True
ppo ARR.actor.optim.muon_num_ns_steps=4 → ARR.actor.optim.override_optimizer_config.ns_steps=4
ppo ARR.actor.optim.name=muon → ARR.actor.optim.optimizer=Muon
ppo ARR.actor.tau_pos=2.0 → ARR.actor.policy_loss.tau_pos=2.0
ppo skip.rollout_tq.enable=True → skip.rollout.enable=True
sft engine.tp=2 → engine.tensor_model_parallel_size=2
sft engine.etp=2 → engine.expert_tensor_parallel_size=2
sft data.micro_batch_size=4 → data.micro_batch_size_per_gpu=4
"""


@pytest.mark.parametrize("row", ALIASES.strip().splitlines())
def test_old_names(row):
    entry, given, _, expected = row.replace("ARR", ARR).split()
    (old, _), (new, value) = given.split("=", 1), expected.split("=", 1)
    cfg = load([given], entry=entry)
    assert str(cfg.select(new, "missing")).replace("'", "").replace(" ", "") == value
    if old != "reward_manager.name":
        assert any((old in notice and "now called" in notice) or "deprecated" in notice for notice in cfg.notices)


@pytest.mark.parametrize(
    ("key", "refused", "taken"),
    [
        (f"{ARR}.rollout.over_sample_rate", "0.1", "0"),
        ("trainer.seed", "x", "3"),
        ("algorithm.kl_ctrl", "{type: 1, kl_coef: x}", "{kl_coef: 0.1}"),
        ("model_engine", "nosuch", "dp"),
        (f"{ARR}.actor.optim.lr_warmup_steps", "some", "null"),
    ],
)
def test_the_last_value_of_a_key_counts_where_an_earlier_one_is_refused(key, refused, taken):
    load([f"{key}={refused}", f"{key}={taken}"])
    with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
        load([f"{key}={taken}", f"{key}={refused}"])


def test_the_later_spelling_of_the_manager_counts():
    cfg = load(["reward_model.reward_manager=prime", "reward_manager.name=dapo"])
    assert cfg.reward_model.reward_manager == "dapo"
    cfg = load(["reward_manager.name=dapo", "reward_model.reward_manager=prime"])
    assert cfg.reward_model.reward_manager == cfg.reward_manager.name == "prime"
    cfg = load(["reward_manager.source=importlib", "reward_manager.name=Mine"])
    assert cfg.reward_model.reward_manager == "naive" and cfg.reward_manager.name == "Mine"


@pytest.mark.parametrize(
    ("argv", "lag"),
    [
        (["trainer.v1.trainer_mode=sync"], 0),
        (["trainer.v1.trainer_mode=colocate_async", "trainer.v1.sampler.max_off_policy_threshold=3"], 2),
        (["trainer.v1.trainer_mode=separate_async", "trainer.v1.sampler.max_off_policy_threshold=2"], 1),
        (["trainer.v1={trainer_mode:separate_async,sampler:{max_off_policy_threshold:4}}"], 3),
        (["trainer.v1.trainer_mode=separate_async"], 1),
        (["trainer.v1.trainer_mode=separate_async", "trainer.max_staleness=3"], 3),
        (["trainer.v1.sampler.max_off_policy_threshold=4"], 0),
    ],
)
def test_modes_of_staleness(argv, lag):
    cfg = load(argv)
    assert cfg.trainer.max_staleness == lag
    assert cfg.trainer.weight_sync_every == (4 if any("separate_async" in word for word in argv) else 1)


ASYNC = "--config-name=fully_async_ppo_trainer"
MINI = f"{ARR}.actor.ppo_mini_batch_size=8"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            [ASYNC, MINI],
            "weight_sync_every=4 max_staleness=1 max_steps_per_version=5 total_training_steps=12",
        ),
        (
            [ASYNC, MINI, "async_training.staleness_threshold=0.5", "async_training.require_batches=2"],
            "max_staleness=1 max_steps_per_version=6 total_training_steps=6",
        ),
        ([ASYNC, "async_training.staleness_threshold=0"], "max_staleness=0 max_steps_per_version=None"),
        ([ASYNC, "async_training.staleness_threshold=2"], "max_staleness=2 max_steps_per_version=None"),
        ([ASYNC, "rollout.test_freq=5", "trainer.save_freq=6"], "test_freq=20 save_freq=8"),
        (
            [ASYNC, "trainer.weight_sync_every=2", "trainer.total_training_steps=7"],
            "weight_sync_every=2 total_training_steps=7",
        ),
        (["async_training.trigger_parameter_sync_step=2"], "weight_sync_every=2 max_staleness=1"),
        (["--config-name=one_step_off_ppo_trainer"], "max_staleness=1 weight_sync_every=1"),
        (
            ["trainer.v1={trainer_mode:separate_async,separate_async:{parameter_sync_step:2}}"],
            "weight_sync_every=2",
        ),
    ],
)
def test_asynchronous_entry_points_are_the_one_loop(argv, expected):
    cfg = load(argv)
    for pair in expected.split():
        key, value = pair.split("=")
        assert str(cfg.trainer[key]) == value, (key, cfg.notices)
    if ASYNC in argv:
        rollout, correction = cfg.actor_rollout_ref.rollout, cfg.algorithm.rollout_correction
        assert (rollout.nnodes, rollout.n, correction.bypass_mode) == (1, 4, True)
        batches = 2 if "async_training.require_batches=2" in argv else 1
        assert cfg.data.train_batch_size == batches * cfg.actor_rollout_ref.actor.ppo_mini_batch_size
        assert sum("async_training is now called" in notice for notice in cfg.notices) == 1


def test_what_a_built_in_configuration_sets_is_replaced_without_a_word():
    one = "rollout.n_gpus_per_node=1"
    cfg = load([ASYNC, one])
    assert cfg.actor_rollout_ref.rollout.n_gpus_per_node == 1
    assert not any("are one key" in notice for notice in cfg.notices), cfg.notices
    assert any("are one key" in notice for notice in load([f"{ARR}.{one[:-1]}2", one]).notices)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("async_training.staleness_threshold=-1", "no number of at least 0"),
        ("async_training.trigger_parameter_sync_step=0", "no whole number of at least 1"),
        (
            "trainer.v1={trainer_mode:separate_async,separate_async:{parameter_sync_step:0.5}}",
            "no whole number",
        ),
    ],
)
def test_asynchronous_keys_that_cannot_be(override, words):
    with pytest.raises(ConfigError, match=words) as error:
        load([override])
    assert len(error.value.problems) == 1


def test_merging_is_a_setting_of_vllm():
    for word, kwargs in (("True", {"enable_lora": False}), ("False", {})):
        rollout = load([f"{ARR}.model.lora.merge={word}", f"{ARR}.model.lora.rank=8"]).actor_rollout_ref.rollout
        assert rollout.engine_kwargs.vllm == kwargs


def test_memory_of_samplers_on_devices_of_their_own():
    key, own = f"{ARR}.rollout.standalone_gpu_memory_utilization", f"{ARR}.rollout.nnodes=1"
    for words, share in (([own], 0.8), ([], 0.5), ([own, f"{ARR}.rollout.gpu_memory_utilization=0.6"], 0.8)):
        assert load([f"{key}=0.8", *words]).actor_rollout_ref.rollout.gpu_memory_utilization == share
    with pytest.raises(ConfigError, match="at most 1"):
        load([f"{key}=3", own])


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (f"{ARR}.actor.fsdp_config.fsdp_plan.hook_modules", "[a]", "FSDP2's are used"),
        (f"{ARR}.actor.fsdp_config.turbo_config.module_patches", "[a]", "FSDP2's are used"),
        (f"{ARR}.ref.fsdp_config.ep_plan", "{a: 1}", "FSDP2's are used"),
        (f"{ARR}.actor.fsdp_config.recompute_plan", "[a]", "every layer"),
        (f"{ARR}.ref.fsdp_config.recompute", "True", "not trained"),
        (f"{ARR}.actor.engine.impl_cfg", "{a: 1}", "megatron-core's are used"),
        (f"{ARR}.actor.optim.use_layer_wise_distributed_optimizer", "True", "sharded by FSDP2"),
        (f"{ARR}.actor.profiler.save_path", "x", "one profiler"),
    ],
)
def test_keys_of_other_backends_change_nothing_and_say_so(key, value, reason):
    assert any(reason in notice for notice in load([f"{key}={value}"]).notices)


@pytest.mark.parametrize("name", ["veomni", "fsdp_turbo", "torchtitan", "automodel"])
def test_backends_that_are_fsdp2_under_another_name(name):
    cfg = load([f"model_engine={name}"])
    assert cfg.actor_rollout_ref.actor.strategy == cfg.actor_rollout_ref.ref.strategy == cfg.critic.strategy == "fsdp2"
    assert cfg.notices == [f"{name} is FSDP2 here: its sizes and offloading count, its kernels do not"]
    assert load([f"actor@{ARR}.actor={name}_actor"]).actor_rollout_ref.actor.strategy == "fsdp2"
    assert load([f"{ARR}.actor.strategy={name}"]).actor_rollout_ref.actor.strategy == "fsdp2"
    assert load([f"engine={name}", f"optim={name}"], entry="sft").engine.strategy == "fsdp2"
    own = load([f"+custom_reward_function.reward_kwargs.strategy={name}"]).custom_reward_function.reward_kwargs
    assert own["strategy"] == name, "a value of the user's own keeps its text"


def test_keys_of_a_group_that_is_not_there_are_one_line():
    with pytest.raises(ConfigError) as error:
        load(["topology.a=1", "topology.b.c=2", "topology.d=3", "algorithm.gama=1"])
    texts = [str(problem) for problem in error.value.problems]
    assert len(texts) == 2 and "no such group of keys; given in it: topology.a, topology.b.c, topology.d" in texts[0]
    assert "nearest: algorithm.gamma" in texts[1]


def test_small_spellings():
    assert load(["reward.custom_reward_function.name=null"]).custom_reward_function.name == "compute_score"
    given = "+ray_kwargs.ray_init.runtime_env.py_executable='uv run python'"
    cfg = load([given])
    assert ("py_executable" in cfg.ray_kwargs.ray_init.runtime_env) != any("uv is not" in n for n in cfg.notices)
    assert load(["trainer.save_freq=after_each_epoch"], entry="sft").trainer.save_freq == "after_each_epoch"


def test_an_unknown_mode_of_staleness():
    with pytest.raises(ConfigError, match="separate_async"):
        load(["trainer.v1.trainer_mode=fast"])
    for given in ("0", "1.5", "many", "True"):
        with pytest.raises(ConfigError, match="no whole number above 0"):
            load([f"trainer.v1={{trainer_mode:separate_async,sampler:{{max_off_policy_threshold:{given}}}}}"])


def test_modes_of_staleness_that_change_nothing_are_told():
    both = load(["trainer.v1.trainer_mode=separate_async", "trainer.max_staleness=3"])
    assert any("means trainer.max_staleness=1; trainer.max_staleness=3 is kept" in n for n in both.notices)
    alone = load(["trainer.v1.sampler.max_off_policy_threshold=4"])
    assert any("without trainer.v1.trainer_mode" in n for n in alone.notices)


def test_global_micro_batch_is_divided_by_the_ranks_and_rounded_up(monkeypatch):
    cfg = load([f"{ARR}.actor.ppo_micro_batch_size=20", "trainer.n_gpus_per_node=8"])
    assert cfg.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 3
    assert cfg.actor_rollout_ref.actor.use_dynamic_bsz is False
    split = f"{ARR}.actor={{ulysses_sequence_parallel_size:2,fsdp_config:{{tensor_parallel_size:2}}}}"
    cfg = load([f"{ARR}.actor.ppo_micro_batch_size=20", "trainer.n_gpus_per_node=8", split])
    assert cfg.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 10
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert load(["data.micro_batch_size=20"], entry="sft").data.micro_batch_size_per_gpu == 5
    cfg = load([f"{ARR}.actor.ppo_micro_batch_size=null"])
    assert cfg.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu is None


def test_global_and_local_micro_batch_that_differ():
    with pytest.raises(ConfigError, match="keep actor_rollout_ref"):
        load([f"{ARR}.actor.ppo_micro_batch_size=20", f"{ARR}.actor.ppo_micro_batch_size_per_gpu=3"])
    assert load([f"{ARR}.actor.ppo_micro_batch_size=3", f"{ARR}.actor.ppo_micro_batch_size_per_gpu=3"])


def test_yaml_groups_under_an_old_name(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "reward:\n  num_workers: 2\n  custom_reward_function: {path: x.py, name: f}\n"
        "  reward_manager: {name: dapo}\ncritic:\n  fsdp_config: {fsdp_size: 4}\n"
    )
    cfg = load([f"--config-path={tmp_path}", "--config-name=a"])
    assert (cfg.reward_model.num_workers, cfg.custom_reward_function.name) == (2, "f")
    assert cfg.reward_model.reward_manager == "dapo" and cfg.critic.model.fsdp_config.fsdp_size == 4


@pytest.mark.parametrize("glob", [*PUBLIC.no_effect, *PUBLIC.switches])
def test_keys_without_effect_say_why(glob):
    reason = {**PUBLIC.no_effect, **PUBLIC.switches}[glob]
    for path in alternatives(glob):
        cfg = load([f"+{path}=True"])
        told = [] if reason in PUBLIC.silent else [f"no effect: {path}: {reason}"]
        assert cfg.notices == told and cfg == load([])


def test_a_reason_is_said_once_for_all_its_keys():
    cfg = load(["data.return_raw_chat=True", "data.return_full_prompt=True", "data.return_raw_chat=False"])
    assert cfg.notices == [
        "no effect: data.return_raw_chat, data.return_full_prompt: all forms are available to plugins"
    ]


@pytest.mark.parametrize(
    "override",
    [f"+{ARR}.actor._target_=x.Y", "+_target_=x", "hydra.run.dir=x", "transfer_queue.enable=False"],
)
def test_keys_that_are_not_needed_say_nothing(override):
    assert load([override]).notices == []


@pytest.mark.parametrize("glob", PUBLIC.refused)
def test_missing_features_are_refused_unless_they_are_off(glob):
    for path in alternatives(glob):
        entry = "ppo" if locate(ROOTS["ppo"], path) is None else "generation"
        with pytest.raises(ConfigError, match="not in this release; closest: "):
            load([f"{path}=2"], entry)
        for off in PUBLIC.refused[glob].off:
            assert load([f"{path}={off}"], entry) == load([], entry)
    with pytest.raises(ConfigError, match="not in this release; closest: "):
        load([f"{ARR}.actor.qat={{enable:True}}"])


def test_value_synonyms():
    words = ["algorithm.adv_estimator=reinforce", "reward_model.reward_manager=limited"]
    cfg = load([*words, "trainer.logger=[tracking]"])
    assert cfg.algorithm.adv_estimator == "reinforce_plus_plus"
    assert cfg.reward_model.reward_manager == "rate_limited" and cfg.trainer.logger == ["wandb"]


OWN = "env_registry: {path: x.py, size: '${data.train_batch_size}'}\nfilter: {}\ndata: {train_batch_size: '${env_registry.n}'}\n"


@pytest.mark.parametrize(
    "code",
    [
        f"{ARR}.model.external_lib=my.plugin",
        f"{ARR}.rollout.agent.agent_loop_config_path=loops.yaml",
        f"{ARR}.rollout.agent.environment.path=env.py:Env",
        "data.custom_cls.path=${oc.env:HOME}/d.py",
        "custom_reward_function.path=r.py",
    ],
)
def test_keys_of_the_users_own_beside_the_groups(tmp_path, code):
    (tmp_path / "mine.yaml").write_text(OWN)
    words = [f"--config-path={tmp_path}", "--config-name=mine", "env_registry.n=48"]
    cfg = load([*words, code])
    assert cfg.to_dict()["env_registry"] == {"path": "x.py", "size": 48, "n": 48} and cfg.filter == {}
    assert [n for n in cfg.notices if "of your own" in n] == [
        "keys of your own, for your code in its config: env_registry, filter"
    ]
    with pytest.raises(ConfigError, match="filter: no key") as error:
        load(words)
    assert "env_registry" not in str(error.value), "other keys refer to it"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainr.save_freq=1", "trainr.x=2"], "nearest: trainer; given"),
        (["trainr.save_freq=1"], "nearest: trainer.save_freq"),
        (["model.path=x"], "nearest: .*actor_rollout_ref.model.path"),
        (["reward.nothing=1"], "reward.nothing"),
        (["lr=5"], "nearest: .*actor_rollout_ref.actor.optim.lr"),
        (["total_epochs=3"], "nearest: trainer.total_epochs"),
        (["dataset.train_batch_size=3"], "nearest: data.train_batch_size"),
        (["trainer.mine=1"], "trainer.mine"),
    ],
)
def test_keys_that_resemble_ours_are_not_the_users(words, message):
    with pytest.raises(ConfigError, match=message):
        load([*words, "custom_reward_function.path=r.py"])


def test_open_groups():
    """`data.*` with a class of one's own, any group with external_lib."""
    cfg = load(["data.my_key=3", "data.custom_cls.path=x.py"])
    assert cfg.data.my_key == 3
    cfg = load(["algorithm.mine=0.5", f"{ARR}.model.external_lib=my.plugin", "+trainer.deep.key=a"])
    assert cfg.algorithm.mine == 0.5 and cfg.trainer.deep.key == "a" and cfg.algorithm.get("mine") == 0.5
    with pytest.raises(ConfigError, match=r"trainer\.x"):
        load(["data.custom_cls.path=x.py", "trainer.x=1"])
    cfg = load(["reward_model.reward_kwargs.my_arg=1"])
    assert cfg.reward_model.reward_kwargs.my_arg == 1
