"""The schema itself: defaults, access, automatic values, round trips."""

from __future__ import annotations

import ast
import copy
import functools
import pickle
import re
import typing
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import verl
from verl.compat.spellings import load
from verl.config import release
from verl.config.matching import compiled
from verl.config.reference import help_of
from verl.config.schema.base import Map, select
from verl.config.schema.entries import ROOTS
from verl.config.schema.fields import fields_of, leaves
from verl.config.schema.training import MegatronConfig
from verl.config.yaml_files import dump_yaml
from verl.engine.registry import ROLLOUT_ENGINES
from verl.trainer.generation import training_config

# Group → defaults.
DEFAULTS = """
data: {train_batch_size: 1024, gen_batch_size: null, max_prompt_length: 512, filter_overlong_prompts: False,
  truncation: error, reward_fn_key: data_source, train_max_samples: -1, dataloader_num_workers: 8,
  max_bad_row_ratio: 0.01}
actor_rollout_ref.model: {lora_rank: 0, lora_alpha: 16, target_modules: [all-linear],
  enable_gradient_checkpointing: null}
actor_rollout_ref.model.tiled_mlp: {num_shards: 4}
actor_rollout_ref.model.fused_kernel_options: {impl_backend: torch}
actor_rollout_ref.actor: {strategy: fsdp, ppo_mini_batch_size: 256, ppo_epochs: 1, data_loader_seed: 42,
  ppo_max_token_len_per_gpu: 16384, clip_ratio: 0.2, clip_ratio_c: 3.0, loss_agg_mode: token-mean,
  entropy_coeff: 0.0, kl_loss_coef: 0.001, kl_loss_type: low_var_kl}
actor_rollout_ref.actor.policy_loss: {loss_mode: vanilla, clip_cov_ub: 5.0, tau_neg: 1.05}
actor_rollout_ref.actor.checkpoint: {save_contents: [model, optimizer, extra]}
actor_rollout_ref.actor.optim: {lr: 1.0e-6, betas: [0.9, 0.999], lr_warmup_steps: -1, num_cycles: 0.5}
actor_rollout_ref.actor.fsdp_config: {fsdp_size: -1, model_dtype: fp32, dtype: null}
actor_rollout_ref.ref: {log_prob_micro_batch_size_per_gpu: null}
actor_rollout_ref.rollout: {n: 1, top_k: -1, gpu_memory_utilization: 0.5, max_num_batched_tokens: 8192,
  max_num_seqs: 256, load_format: dummy}
actor_rollout_ref.rollout.val_kwargs: {temperature: 0.0}
actor_rollout_ref.rollout.checkpoint_engine: {update_weights_bucket_megabytes: 2048}
actor_rollout_ref.rollout.multi_turn: {max_tool_response_length: 256}
actor_rollout_ref.rollout.agent: {num_workers: 8, default_agent_loop: single_turn_agent}
actor_rollout_ref: {hybrid_engine: True, nccl_timeout: 600.0}
algorithm: {adv_estimator: gae, norm_adv_by_std_in_grpo: True}
algorithm.kl_ctrl: {horizon: 10000}
algorithm.filter_groups: {metric: reward}
algorithm.rollout_correction: {rollout_is_threshold: 2.0}
algorithm.pf_ppo: {weight_pow: 2.0}
critic.optim: {lr: 1.0e-5}
critic: {ppo_max_token_len_per_gpu: 32768, cliprange_value: 0.5}
custom_reward_function: {name: compute_score}
reward_model: {reward_manager: naive, num_workers: 8, timeout: 300.0, max_error_ratio: 0.1,
  n_gpus_per_node: 8}
reward_model.sandbox_fusion: {memory_limit_mb: 1024}
reward_model.rollout: {prompt_length: 2048, max_num_seqs: 1024, load_format: auto}
trainer: {total_epochs: 30, total_training_steps: null, project_name: verl_examples, experiment_name: gsm8k,
  logger: [console], save_freq: -1, val_before_train: True, resume_mode: auto, critic_warmup: 0, seed: 42,
  max_refused_steps: 3, watchdog_timeout: 600.0}
actor_rollout_ref.actor.megatron: {use_mbridge: True, sequence_parallel: True}
global_profiler: {save_path: outputs/profile}
ray_kwargs: {ray_init: {num_cpus: null}}
skip.rollout: {action: cache}
"""


def test_defaults():
    config = load([])
    for group, defaults in yaml.safe_load(DEFAULTS).items():
        for name, default in defaults.items():
            value = config.select(f"{group}.{name}", "missing")
            assert value == default, f"{group}.{name}"
            assert isinstance(value, type(default)), f"{group}.{name}"


def test_defaults_of_the_other_programs():
    cfg = load([], entry="sft")
    assert (cfg.trainer.project_name, cfg.trainer.total_epochs, cfg.trainer.seed) == ("gsm8k-sft", 4, 1)
    assert (cfg.optim.lr, cfg.data.train_batch_size, cfg.data.max_length) == (1e-5, 256, 1024)
    assert cfg.data.seed == 1 and cfg.engine.strategy == "fsdp"
    cfg = load(["data.n_samples=3"], entry="generation")
    assert cfg.rollout.n == 3 and cfg.data.batch_size == 128 and cfg.rollout.max_model_len == 2048


@pytest.mark.parametrize("entry", list(ROOTS))
def test_every_key_has_help_and_a_type_that_fits_its_default(entry):
    for path, known in leaves(ROOTS[entry]).items():
        assert help_of(known.owner, known.name), f"{path} has no help"
        default = known.default()
        if default is None:
            assert known.nullable or known.about.get("required"), path
        elif typing.get_origin(known.type) is list:
            assert isinstance(default, list), path


@pytest.mark.parametrize("entry", list(ROOTS))
def test_every_key_is_read_or_said_to_be_without_effect(entry):
    """By the last part of its name, in whatever module; of Megatron's keys and of a feature that is refused none is
    read."""
    globs = [glob.rpartition(".")[0] for glob in release.FEATURES if glob.count(".") > 2]
    globs += ["skip", *release.FEATURES, *(glob for table in release.UNREAD.values() for glob in table)]
    globs += [
        f"*.rollout.{key}" for engine in ROLLOUT_ENGINES.values() for keys in engine.unread for key in keys.split()
    ]
    keys = leaves(ROOTS[entry])
    read = _words() | {known.about.get("same_as", "").rpartition(".")[2] for known in keys.values()}
    for path in keys:
        name = path.rpartition(".")[2]
        spelled = {name, name.removeprefix("log_prob_"), name.removeprefix("forward_")}
        announced = any(compiled(glob).match(path) for glob in globs)
        assert announced or spelled & (read | fields_of(MegatronConfig).keys()), path


@functools.cache
def _words():
    """Names and words of plain strings in the package, without the schema and the tables of names."""
    found = set()
    for file in Path(verl.__file__).parent.rglob("*.py"):
        if file.parent.name != "schema" and file.name not in ("release.py", "spellings.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                text = getattr(node, "attr", "") or getattr(node, "id", "") or getattr(node, "value", "")
                found |= set(re.findall(r"\w+", text)) if isinstance(text, str) and "\n" not in text else set()
    return found


def test_automatic_values_follow_their_keys():
    actor = "actor_rollout_ref.actor={clip_ratio:0.3,clip_ratio_high:0.4,use_torch_compile:False}"
    words = ["data.max_prompt_length=100", "data.max_response_length=20", "trainer.seed=7", actor]
    cfg = load([*words, "actor_rollout_ref.model.path=/m"])
    rollout, actor = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.actor
    assert (rollout.prompt_length, rollout.response_length, rollout.max_model_len) == (100, 20, 120)
    assert cfg.data.seed == rollout.seed == actor.fsdp_config.seed == cfg.critic.megatron.seed == 7
    assert cfg.critic.model.path == cfg.data.tokenizer == cfg.critic.model.tokenizer_path == "/m"
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.3, 0.4)
    assert cfg.actor_rollout_ref.ref.use_torch_compile is False
    assert cfg.reward_model.reward_kwargs.max_resp_len == 20
    assert cfg.critic.loss_scale_factor == 20.0
    assert cfg.trainer.default_local_dir == "checkpoints/verl_examples/gsm8k"


@pytest.mark.parametrize(
    ("given", "actor", "ref"),
    [
        ([], True, True),
        (["actor.ppo_micro_batch_size_per_gpu=4"], False, True),
        (["ref.log_prob_micro_batch_size_per_gpu=4"], True, False),
        (["actor.use_dynamic_bsz=True", "actor.ppo_micro_batch_size_per_gpu=4"], True, True),
        (["actor.use_dynamic_bsz=False"], False, False),
    ],
)
def test_token_budget_unless_a_size_is_given(given, actor, ref):
    cfg = load([f"actor_rollout_ref.{g}" for g in given])
    assert cfg.actor_rollout_ref.actor.use_dynamic_bsz is actor
    assert cfg.actor_rollout_ref.ref.log_prob_use_dynamic_bsz is ref


def test_generation_keeps_the_agent_loop_that_was_named():
    words = ["rollout.multi_turn.enable=True", "rollout.agent.default_agent_loop=single_turn_agent"]
    for count, loop in ((2, "single_turn_agent"), (1, "tool_agent")):
        rollout = training_config(load(words[:count], entry="generation")).actor_rollout_ref.rollout
        assert rollout.agent.default_agent_loop == loop


def test_a_size_of_the_critics_other_pass_is_kept():
    cfg = load(["critic.forward_micro_batch_size_per_gpu=2"])
    assert not cfg.critic.use_dynamic_bsz and cfg.critic.ppo_micro_batch_size_per_gpu is None


def test_defaults_that_depend_on_the_method():
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    cfg = load([f"{loss}=gspo"])
    assert cfg.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-mean"
    assert any("gspo" in n for n in cfg.notices)
    cfg = load([f"{loss}=gspo", "actor_rollout_ref.actor.loss_agg_mode=token-mean"])
    assert cfg.actor_rollout_ref.actor.loss_agg_mode == "token-mean"
    assert load([f"{loss}=dppo_tv"]).actor_rollout_ref.actor.clip_ratio_c == 20
    assert load([]).critic.enable and not load(["algorithm.adv_estimator=grpo"]).critic.enable
    cfg = load(["algorithm.adv_estimator=optimal_token_baseline"])
    assert cfg.actor_rollout_ref.actor.calculate_sum_pi_squared
    assert load(["actor_rollout_ref.rollout.name=hf"]).actor_rollout_ref.rollout.name == "native"
    assert load([]).actor_rollout_ref.rollout.name == "native"


def test_batched_tokens_are_raised_unless_set():
    long = ["data.max_prompt_length=9000", "actor_rollout_ref.rollout.enable_chunked_prefill=False"]
    cfg = load(long)
    assert cfg.actor_rollout_ref.rollout.max_num_batched_tokens == 9512
    assert any("max_num_batched_tokens" in n for n in cfg.notices)
    cfg = load([*long, "actor_rollout_ref.rollout.max_num_batched_tokens=8192"])
    assert cfg.actor_rollout_ref.rollout.max_num_batched_tokens == 8192


def test_access_as_a_mapping():
    cfg = load(["data.apply_chat_template_kwargs.enable_thinking=False"])
    assert cfg["data"]["train_batch_size"] == cfg.data.get("train_batch_size") == 1024
    assert "data" in cfg and "train_batch_size" in cfg.data
    assert "nothing" not in cfg.data and 3 not in cfg.data
    assert cfg.data.get("nothing", 5) == 5 and cfg.data.get("gen_batch_size", 5) is None
    assert cfg.data.apply_chat_template_kwargs.enable_thinking is False
    assert dict(cfg.algorithm.kl_ctrl)["horizon"] == 10000 and {**cfg.algorithm.kl_ctrl}
    with pytest.raises(AttributeError, match="nothing"):
        _ = cfg.data.nothing
    with pytest.raises(KeyError):
        _ = cfg.data["nothing"]
    with pytest.raises(AttributeError, match="enable_thinking"):
        _ = cfg.data.apply_chat_template_kwargs.other
    cfg.trainer["device"] = "cpu"
    assert cfg.trainer.device == "cpu"


def test_was_set():
    cfg = load(["actor_rollout_ref.actor.loss_agg_mode=token-mean", "critic.optim.clip_grad=1.0"])
    assert cfg.was_set("actor_rollout_ref.actor.loss_agg_mode") and cfg.was_set("actor_rollout_ref.actor")
    assert cfg.was_set("critic.grad_clip") and not cfg.was_set("critic.optim") and not cfg.was_set("trainer")


def test_configs_do_not_share_state():
    a, b = load([]), load([])
    a.data.train_files.append("x")
    a.data.apply_chat_template_kwargs["y"] = 1
    assert b.data.train_files != a.data.train_files and not b.data.apply_chat_template_kwargs


def test_copies_and_pickles():
    cfg = load(["++trainer.mine=1", "data.seed=3", "+data.apply_chat_template_kwargs.a.b=1"])
    for other in (copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg))):
        assert other == cfg and other.was_set("data.seed") and other.trainer.mine == 1
        assert isinstance(other.data.apply_chat_template_kwargs, Map)
    other.data.seed = 4
    assert other != cfg


ODD_TEXTS = "a 1e5 true é a:b 1_0 it's 0x1 1e-3 ~"


def _values(known):
    """Values of a key's type, within its range."""
    about = known.about
    if "options" in about:
        one = st.sampled_from(about["options"])
        return st.lists(one, max_size=3) if typing.get_origin(known.type) is list else one
    low = about.get("low", about["above"] + 1 if about.get("above") is not None else -3)
    high = about.get("high", low + 9)
    item = typing.get_args(known.type)[0] if typing.get_origin(known.type) is list else known.type
    text = st.sampled_from([*ODD_TEXTS.split(), "x y", "null ", "- x"])
    plain = st.one_of(text, st.integers(), st.none(), st.booleans(), st.floats(allow_nan=False))
    base = {
        bool: st.booleans(),
        int: st.integers(int(low), max(int(low), int(high))),
        float: st.floats(low, high, allow_nan=False),
        Map: st.dictionaries(st.sampled_from(["a", "b", "1"]), plain, max_size=3),
    }.get(item, st.just(2.0) if isinstance(item, tuple) else text)
    return st.lists(base, max_size=3) if typing.get_origin(known.type) is list else base


@settings(max_examples=20, deadline=None)
@given(st.data())
@pytest.mark.parametrize("entry", list(ROOTS))
def test_printed_and_read_back_is_the_same(entry, tmp_path_factory, data):
    """--cfg job's output, given as --config-name, makes the same configuration; any key, any value."""
    known = leaves(ROOTS[entry])
    tree: dict = {}
    for path in data.draw(st.lists(st.sampled_from(sorted(known)), max_size=6, unique=True)):
        *parents, name = path.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[name] = data.draw(_values(known[path]))
    folder = tmp_path_factory.mktemp("config")
    first = _from_file(folder, dump_yaml(tree), entry)
    assert _from_file(folder, dump_yaml(first.to_dict()), entry) == first
    for path, field in known.items():
        given_value = select(Map.of(tree), path, "not given")
        if path.endswith("model.trust_remote_code") and select(Map.of(tree), "data.trust_remote_code", False):
            continue  # the switch of the data turns that of the model on
        if field.type in (int, bool) and given_value != "not given":
            assert first.select(path) == given_value


def _from_file(folder, text, entry):
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return load([f"--config-path={folder}", "--config-name=run"], entry=entry)
