"""The check: what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.preflight.cases import ARR, only, problems, write_model, write_rows
from verl.config import load
from verl.config.layout import rank_problems
from verl.engine.registry import Placement
from verl.preflight.check import check


def test_a_right_one(base):
    report = check(load(base))
    assert report.problems == [] and report.exit_code == 0 and report.notices == []


RC = "algorithm.rollout_correction"
BUFFER = "reward_model.reward_kwargs.overlong_buffer_cfg"
TORCH = "global_profiler.tool=torch"
ADAPTIVE = ["algorithm.kl_ctrl.type=adaptive", "algorithm.use_kl_in_reward=True"]

CRITIC = ("algorithm.adv_estimator=gae", "critic.model.path={model}")
TEACHER, LOSS = "distillation.teacher_models.teacher_model", "distillation.distillation_loss"
TAUGHT = ("distillation.enabled=True", f"{TEACHER}.model_path={{model}}")

# (overrides, parts of the one problem they make); {model} is the run's own
REFUSED = [
    # What would be accepted and do nothing, or fail late.
    ([f"{ARR}.actor.optim.betas=[0.9]"], ["two numbers"]),
    ([f"{ARR}.actor.optim.lr=inf"], ["at most 10000"]),
    ([f"{ARR}.actor.optim.weight_decay=1e300"], ["at most 1000000000"]),
    ([f"{ARR}.rollout.temperature=1e-30"], ["at least 0.01 and at most 100, or 0"]),
    ([f"{ARR}.rollout.stop=['']"], ["the empty text"]),
    ([f"{ARR}.rollout.stop_token_ids=[-5]"], ["at least 0"]),
    (["trainer.seed=99999999999999999999"], ["at most 9223372036854775807"]),
    (["data.train_max_samples=0"], ["at least 1", "or -1"]),
    (["data.train_files=[]"], ["names no file"]),
    (["data.reward_fn_key=prompt", "data.val_files=null"], ["a name is needed"]),
    ([f"{ARR}.model.tokenizer_path=/nowhere/tokenizer"], ["no such directory"]),
    ([f"{ARR}.model.external_lib=no_such_module"], ["no module no_such_module"]),
    ([f"{ARR}.model.custom_chat_template='{{% if %}}'"], ["is no Jinja template", "line 1"]),
    ([f"{ARR}.model.custom_chat_template='{{{{ m|nofilter }}}}'"], ["No filter named 'nofilter'"]),
    ([f"{ARR}.model.custom_chat_template=''"], ["neither Jinja text nor an existing file"]),
    (["trainer.default_local_dir=false"], ["name a folder"]),
    (["+data.apply_chat_template_kwargs.tokenize=True"], ["tokenize=True: is set by the system"]),
    ([f"+{ARR}.model.override_config.rms_norm_eps=inf"], ["rms_norm_eps=inf", "within ±3e38"]),
    ([f"+{ARR}.model.override_config.rope_scaling={{rope_type:linear,factor:nan}}"], ["factor=nan"]),
    ([f"+{ARR}.actor.optim.override_optimizer_config.eps=1e300"], ["eps=1e+300", "within ±3e38"]),
    (["reward_model.weights={function: inf}"], ["weights.function=inf", "within ±10^9"]),
    (["reward_model.weights={function: 1e300}"], ["weights.function=1e+300"]),
    ([f"{ARR}.rollout.agent.default_agent_loop=nonsense"], ["unknown agent loop 'nonsense'", "tool_agent"]),
    (["+reward_model.reward_kwargs.overlong_bufer_cfg.enable=True"], ["nearest: overlong_buffer_cfg"]),
    (["custom_reward_function.name=mine"], ["nothing is loaded without custom_reward_function.path"]),
    (["data.custom_cls.name=Mine"], ["nothing is loaded without data.custom_cls.path"]),
    ([f"{ARR}.actor.checkpoint.save_contents=[]", "trainer.save_freq=1"], ["would hold nothing"]),
    ([f"{ARR}.rollout.temperature=inf"], ["at most 100"]),
    ([f"{ARR}.actor.use_kl_loss=True", f"{ARR}.actor.kl_loss_coef=inf"], ["at most 1000000000"]),
    ([f"{ARR}.actor.entropy_coeff=1e300"], ["at most 1000000000"]),
    ([f"{ARR}.actor.fsdp_config.fsdp_size=0"], ["at least 1", "or -1"]),
    ([f"{ARR}.model.lora_alpha=-1"], ["at least 0"]),
    ([f"{ARR}.model.lora_alpha=0", f"{ARR}.model.lora_rank=4"], ["lora_alpha=0", "at least 1"]),
    (["algorithm.kl_ctrl.kl_coef=-1"], ["at least 0"]),
    ([f"{BUFFER}.penalty_factor=-1"], ["at least 0"]),
    (["+custom_reward_function.reward_kwargs.metod=flexible"], ["reward_kwargs.metod", "method"]),
    (["reward_manager.module.path=mine.py"], ["nothing is loaded without reward_manager.source=importlib"]),
    ([f"{ARR}.rollout.stop_token_ids=[512]"], ["stop_token_ids=512", "has 512 tokens"]),
    (["trainer.experiment_name="], ["name something"]),
    (["data.train_max_samples=-2"], ["at least 1", "or -1"]),
    (["data.val_max_samples=0"], ["at least 1", "or -1"]),
    (
        [
            f"{ARR}.model.custom_chat_template='{{{{ enable_thinking }}}}'",
            "+data.apply_chat_template_kwargs.enable_thinkng=False",
        ],
        ["enable_thinkng", "nearest: enable_thinking"],
    ),
    (["trainer.default_local_dir="], ["name a folder"]),
    (["trainer.default_local_dir=False"], ["name a folder"]),
    (["trainer.project_name=../../x"], ["remove '..'"]),
    ([f"{ARR}.rollout.prompt_length=100"], ["prompt_length=100", "data.max_prompt_length=512", "unset"]),
    (["trainer.val_only=True", "data.val_files=null"], ["val_only", "nothing to validate on"]),
    # 1
    ([f"{ARR}.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True"], ["KL would be charged twice"]),
    # 2
    (["algorithm.adv_estimator=grop"], ["grpo_vectorized", "nearest: grpo", "register_adv_est"]),
    ([f"{ARR}.actor.policy_loss.loss_mode=vanila"], ["nearest: vanilla", "register_policy_loss"]),
    ([f"{ARR}.actor.loss_agg_mode=token_mean"], ["nearest: token-mean"]),
    ([f"{ARR}.actor.kl_loss_type=k4"], ["low_var_kl"]),
    (["algorithm.kl_penalty=full"], ["needs all logits", "low_var_kl"]),
    (["reward_model.reward_manager=nave"], ["nearest: naive"]),
    (["trainer.device=gpu"], ["cuda"]),
    ([f"{ARR}.rollout.name=vlm"], ["nearest: vllm"]),
    ([f"{ARR}.rollout.multi_turn.format=herms"], ["nearest: hermes"]),
    (["trainer.logger=[console,wandbb]"], ["trainer.logger=wandbb", "nearest: wandb"]),
    (["trainer.resume_mode=yes"], ["disable"]),
    ([f"{ARR}.actor.optim.lr_scheduler_type=cos"], ["cosine"]),
    ([f"{ARR}.actor.router_replay.mode=R2"], ["qwen3 is a dense model", "set it to disabled"]),
    # 6
    ([f"{ARR}.rollout.do_sample=False"], ["set True"]),
    ([f"{ARR}.rollout.val_kwargs.do_sample=True"], ["temperature 0 is greedy"]),
    ([f"{ARR}.rollout.dtype=fp64"], ["none of float32", "nearest: fp16"]),
    (
        [f"{ARR}.actor.fsdp_config.dtype=half"],
        [f"; set {ARR}.rollout.dtype=float32 or bfloat16 (null is the trainer's type, float16)"],
    ),
    ([f"{ARR}.rollout.dtype=half"], ["the native engine computes in float32 or bfloat16", "or leave it null"]),
    ([f"{ARR}.actor.fsdp_config.mixed_precision.param_dtype=bf61"], ["nearest: bf16"]),
    ([f"{ARR}.rollout.top_p=0"], ["above 0 and at most 1"]),
    ([f"{ARR}.rollout.top_p=1.1"], ["at most 1"]),
    # 7
    (["data.max_response_length=2000"], ["2512", "2048"]),
    ([f"{ARR}.rollout.max_model_len=100"], ["1024", "max_model_len=100"]),
    # 8
    ([f"{ARR}.rollout={{enable_chunked_prefill:False,max_num_batched_tokens:100}}"], ["raise it to 1024"]),
    # 9
    ([f"{ARR}.rollout.tensor_model_parallel_size=2"], ["1 devices of the node"]),
    # 10
    ([f"{ARR}.rollout.expert_parallel_size=2"], ["no experts"]),
    # 11
    ([f"{ARR}.actor.ulysses_sequence_parallel_size=2"], ["does not divide the 1 ranks"]),
    ([f"{ARR}.actor.fsdp_config.fsdp_size=3"], ["does not divide the 1 ranks"]),
    # 13
    ([f"{ARR}.actor.ppo_mini_batch_size=0"], ["at least 1"]),
    ([f"{ARR}.actor.ppo_micro_batch_size_per_gpu=0"], ["at least 1"]),
    ([f"{ARR}.rollout.n=0"], ["at least 1"]),
    # 14
    ([f"{ARR}.actor.clip_ratio_c=1"], ["above 1"]),
    ([f"{ARR}.actor.clip_ratio_low=-0.1"], ["at least 0"]),
    (["algorithm.gamma=1.1"], ["at least 0 and at most 1"]),
    ([*ADAPTIVE, "algorithm.kl_ctrl.horizon=0"], ["at least 1"]),
    ([*ADAPTIVE, "algorithm.kl_ctrl.target_kl=0"], ["above 0"]),
    # distillation
    (["distillation.enabled=True"], ["teacher_models.teacher_model.model_path", "is required"]),
    ([*TAUGHT, f"{LOSS}.loss_mode=k1"], ["loss_mode=k1", "does not see the teacher"]),
    ([*TAUGHT, f"{LOSS}.loss_mode=full"], ["forward_kl_topk"]),
    ([*TAUGHT, f"{LOSS}.policy_loss_mode=kl_cov"], ["none of vanilla"]),
    (
        [*TAUGHT, f"{LOSS}.policy_loss_mode=dro", f"{LOSS}.use_policy_gradient=True"],
        ["dro_beta", "above 0"],
    ),
    ([*TAUGHT, f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=600"], ["topk=600", "has 512 tokens"]),
    ([*TAUGHT, f"+{TEACHER}.modl_path=x"], ["modl_path", "nearest: model_path"]),
    ([*TAUGHT, f"{TEACHER}.prompt='{{solution}}'", f"{LOSS}.loss_mode=forward_kl_topk"], ["take jsd_topk"]),
    ([*TAUGHT, f"{TEACHER}.solution_score=much"], ["solution_score=much", "not a number"]),
    ([*TAUGHT, "+distillation.teacher_models.other=x"], ["a teacher is a mapping"]),
    (
        [*TAUGHT, "+distillation.teacher_models.b={key:teacher_model,model_path:{model}}"],
        ["key=teacher_model", "one key for each"],
    ),
    (
        [*TAUGHT, f"+{TEACHER}.inference.tensor_model_parallel_size=2"],
        ["inference.tensor_model_parallel_size=2", "set 1"],
    ),
    (
        [
            *TAUGHT,
            "distillation.nnodes=1",
            "distillation.n_gpus_per_node=3",
            f"+{TEACHER}.inference={{tensor_model_parallel_size:2}}",
        ],
        ["does not divide the teachers' 3 devices", "distillation.n_gpus_per_node=3"],
    ),
    # 15
    ([f"{RC}.loss_type=reinforce"], ["bypass_mode=True"]),
    # 16
    ([f"{BUFFER}.enable=True"], ["at most", "max_resp_len=512"]),
    ([f"{BUFFER}={{enable:True,len:513}}"], ["513"]),
    # 18
    ([f"{ARR}.hybrid_engine=False"], ["rollout.nnodes"]),
    (["algorithm.adv_estimator=gae", "critic.model.path={model}/.."], ["critic.model.path=", "config.json"]),
    (
        [f"{ARR}.actor.use_kl_loss=True", f"{ARR}.ref.model.path={{model}}/.."],
        ["ref.model.path=", "config.json"],
    ),
    ([f"{ARR}.model.mtp={{enable:True,enable_rollout:True}}"], ["native engine does not draft with it; vllm does"]),
    ([f"{ARR}.model.mtp.enable=True", f"{ARR}.model.lora_rank=4"], ["with LoRA such a layer is not trained"]),
    ([f"{ARR}.rollout.quantization=fp8"], ["rollout.quantization=fp8", "the native engine cannot", "vllm can"]),
    ([*CRITIC, "critic.model.tiled_mlp.enabled=True"], ["critic.model.tiled_mlp.enabled=True", "MLP in slices"]),
    (
        [f"{ARR}.rollout.nnodes=1", f"{ARR}.rollout.tensor_model_parallel_size=2"],
        ["1 devices of the node (actor_rollout_ref.rollout.n_gpus_per_node)"],
    ),
    (["reward_model.enable_resource_pool=True"], ["reward_model.nnodes=0", "set its size"]),
    (
        [*CRITIC, "critic.ulysses_sequence_parallel_size=2"],
        ["2 devices share a row of the critic", "critic.nnodes"],
    ),
    (
        [*CRITIC, "critic.nnodes=1", "critic.n_gpus_per_node=3", "critic.ulysses_sequence_parallel_size=2"],
        ["critic.ulysses_sequence_parallel_size=2", "does not divide the 3 ranks", "critic.nnodes=1"],
    ),
    # 20
    (["custom_reward_function.path=/no/such/file.py"], ["no such file", "/no/such/file.py"]),
    (["custom_reward_function.path=pkg://no.such.module"], ["no module no.such.module"]),
    ([f"+{ARR}.actor.optim.override_optimizer_config.lr=0.1"], ["override_optimizer_config.lr", "optim.lr"]),
    # 21
    (["trainer.resume_mode=resume_path"], ["needs trainer.resume_from_path"]),
    (
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/such"],
        ["no such directory", "start afresh with trainer.resume_mode=disable"],
    ),
    # 25
    (["data.train_batch_size=17"], ["more than 16 rows", "lower it to 16"]),
    (["data.train_max_samples=4"], ["more than 4 rows"]),
    # recognised values
    ([f"{ARR}.rollout.name=trtllm"], ["TensorRT-LLM", "closest"]),
    ([f"{ARR}.rollout.checkpoint_engine.backend=nixl"], ["NIXL"]),
    ([*CRITIC, "critic.strategy=mindspeed"], ["MindSpeed"]),
    ([f"{ARR}.actor.optim.optimizer=Nope"], ["optimizer_impl=torch.optim has no optimizer of that name"]),
    (
        [*CRITIC, "critic.optim.optimizer_impl=no.module"],
        ["optimizer_impl=no.module has no optimizer of that name"],
    ),
    ([f"{ARR}.actor.optim.optimizer=adamw"], ["nearest: AdamW"]),
    ([f"{ARR}.actor.optim.optimizer=LBFGS"], ["has no optimizer of that name"]),
    ([f"{ARR}.rollout.n=1000000000000"], ["at most 65536"]),
    ([f"+{ARR}.model.override_config.rms_norm_epz=1"], ["no such field; nearest: rms_norm_eps"]),
    ([f"+{ARR}.model.override_config.model_config.use_cach=1"], ["override_config.use_cach", "use_cache"]),
    ([f"+{ARR}.model.override_config.rms_norm_eps=small"], ["override_config.rms_norm_eps=small", "float"]),
    ([f"+{ARR}.model.override_config.hidden_act=nope"], ["hidden_act=nope", "no model can be built so"]),
    ([f"+{ARR}.model.override_config.layer_types=[a]"], ["layer_types", "no model can be built so"]),
    ([f"+{ARR}.model.override_config.rope_theta=[1]"], ["rope_theta", "positive number"]),
    ([f"+{ARR}.model.override_config.rope_theta=-3"], ["rope_theta=-3", "positive number"]),
    (["trainer.weight_sync_every=4"], ["keeps older weights", f"{ARR}.rollout.nnodes=1"]),
    # not in this release
    ([f"{ARR}.rollout.multi_turn.tool_config_path=no.yaml"], ["multi_turn", "no.yaml: cannot be read"]),
    (
        [f"{ARR}.rollout.agent.environment.path=/a.py:Game"],
        ["agent.environment.name", "environment.path=/a.py:Game needs it"],
    ),
    (
        [f"{ARR}.rollout.agent.environment.name=gym"],
        ["agent.environment.path", "environment.name=gym needs it"],
    ),
    ([f"{ARR}.rollout.agent.on_status.timeout=retry"], ["score, mask, drop, resample"]),
    (["reward_model.weights={model: 1}"], ["model needs reward_model.enable=True"]),
    (["reward_model.weights={function: high}"], ["function: a weight is a number"]),
    (["trainer.max_staleness=1"], ["share one model here", f"{ARR}.rollout.nnodes=1"]),
    (["skip.rollout.enable=True", "algorithm.filter_groups.enable=True"], ["sampled by itself"]),
    ([TORCH, "global_profiler.steps=[0,1]"], ["counted from 1"]),
    (
        [TORCH, "global_profiler.steps=[1]", f"+{ARR}.actor.profiler.tool_config.torch.contents=[nonsense]"],
        ["nonsense is not known", "cpu, cuda, npu, memory, shapes, stack"],
    ),
]


@pytest.mark.parametrize(("overrides", "parts"), REFUSED, ids=lambda v: v[0][-48:] if isinstance(v, list) else None)
def test_refused(base, tmp_path, monkeypatch, overrides, parts):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    words = [word.replace("{model}", str(tmp_path / "model")) for word in overrides]
    only(problems(*base, *words), "configuration", *parts)


@pytest.mark.parametrize(
    "word",
    [
        "data.train_batch_size=0",
        "trainer.logger=[console,wandbb]",
        f"{ARR}.actor.ppo_mini_batch_size=0",
        "data.max_response_length=0",
    ],
)
def test_of_a_value_that_is_refused_nothing_more_is_said(base, word):
    """Nor of the value that stands in for it, which the user never wrote."""
    report = check(load([*base, word]))
    assert len(report.problems) == 1 and report.notices == report.check_only == []


# (sizes of four ranks, changes to the model, the key that is named, what is said): what the ranks would refuse
LAYOUTS = [
    (
        {"ulysses": 2, "tensor": 4},
        {"num_attention_heads": 8},
        "ulysses × tensor",
        "= 8 does not divide the 4 ranks; lower one of them",
    ),
    ({"tensor": 2}, {"num_key_value_heads": 1}, "tensor", "1 key-value heads; use one of 1"),
    ({"tensor": 2}, {"num_attention_heads": 3}, "tensor", "3 attention heads; use one of 1, 3"),
    ({"tensor": 2}, {"intermediate_size": 33}, "tensor", "33 intermediate_size; use one of 1, 3, 11, 33"),
    ({"tensor": 2}, {"num_experts": 8}, "tensor", "the model has experts, which are not cut so; set 1"),
    ({"ulysses": 2}, {"num_attention_heads": 3}, "ulysses", "3 attention heads; use one of 1, 3"),
    ({"ulysses": 2, "tensor": 2}, {"num_attention_heads": 2}, "ulysses", "use one of 1"),
    ({"ulysses": 2}, {"layer_types": ["conv", "full_attention"]}, "ulysses", "(conv)"),
    ({"ulysses": 2}, {"layer_types": ["linear_attention", "full_attention"]}, None, ""),
    ({"shard": 3}, {}, "shard", "does not divide the 4 ranks; use one of 1, 2, 4"),
    ({"shard": 2, "tensor": 4}, {}, None, ""),
    ({"shard": 4, "tensor": 2}, {}, None, "all of them"),
    ({"ulysses": 2, "tensor": 2, "shard": 2}, {"num_key_value_heads": 2, "intermediate_size": 64}, None, ""),
]


@pytest.mark.parametrize("entry", ["ppo", "sft"])
@pytest.mark.parametrize(("sizes", "changes", "named", "text"), LAYOUTS)
def test_layouts_are_checked_as_the_ranks_do(base, tmp_path, monkeypatch, entry, sizes, changes, named, text):
    role, engine = ("engine", "engine") if entry == "sft" else (f"{ARR}.actor", f"{ARR}.actor.fsdp_config")
    keys = {
        "ulysses": f"{role}.ulysses_sequence_parallel_size",
        "tensor": f"{engine}.tensor_parallel_size",
        "shard": f"{engine}.fsdp_size",
    }
    write_model(tmp_path / "model", **changes)
    if entry == "ppo":
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        argv = [*base, "trainer.n_gpus_per_node=4"]
    else:
        monkeypatch.setenv("WORLD_SIZE", "4")
        rows = write_rows(tmp_path / "sft.parquet", messages=[[{"role": "assistant", "content": "1"}]] * 16)
        argv = [f"data.train_files={rows}", f"model.path={tmp_path / 'model'}", "data.train_batch_size=4"]
        argv += ["trainer.device=cpu"]
    found = problems(*argv, *(f"{keys[name]}={size}" for name, size in sizes.items()), entry=entry)
    if named is None:
        assert found == []
    else:
        words = [f"{keys[name]}={sizes[name]}" for name in named.split(" × ")]
        only(found, "configuration", " × ".join(words) + ": ", text)


_UNEVEN = "override_transformer_config.num_layers_in_first_pipeline_stage"


@pytest.mark.parametrize(
    ("sizes", "named", "text"),
    [
        ({"pipeline": 4}, "pipeline", "the model's 6 layers; set override_transformer_config.num_layers_in_first"),
        ({"pipeline": 2, "virtual_pipeline": 2}, "pipeline × virtual_pipeline", "the model's 6 layers"),
        ({"pipeline": 2, "virtual_pipeline": 3}, None, ""),
        ({"pipeline": 4, _UNEVEN: 1}, None, ""),
        ({"virtual_pipeline": 2}, "virtual_pipeline", "needs actor_rollout_ref.actor.megatron.pipeline"),
        ({"expert": 2}, "expert", "the model's 0 experts"),
    ],
)
def test_megatrons_sizes_are_checked(base, tmp_path, monkeypatch, sizes, named, text):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    write_model(tmp_path / "model", num_hidden_layers=6)
    megatron, spelled = f"{ARR}.actor.megatron", {_UNEVEN: _UNEVEN}
    keys = {
        name: f"{megatron}.{spelled.get(name, f'{name}_model_parallel_size')}={size}" for name, size in sizes.items()
    }
    argv = [*base, "trainer.n_gpus_per_node=4", f"{ARR}.actor.strategy=megatron", f"{ARR}.actor.use_kl_loss=True"]
    found = [problem for problem in problems(*argv, *keys.values()) if problem.startswith("configuration")]
    if named is None:
        assert found == []
    else:
        only(found, "configuration", " × ".join(keys[name] for name in named.split(" × ")) + ": ", text)


def test_the_references_layout_is_checked_where_there_is_one(base, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    argv = [*base, "trainer.n_gpus_per_node=4", f"{ARR}.ref.fsdp_config.fsdp_size=3"]
    assert problems(*argv) == []
    argv.append(f"{ARR}.actor.use_kl_loss=True")
    only(problems(*argv), "configuration", f"{ARR}.ref.fsdp_config.fsdp_size=3", "does not divide the 4 ranks")


# (sizes of a critic beside four ranks, changes to the model, the key that is named, what is said)
CRITICS = [
    ({"critic.model.fsdp_config.fsdp_size": 3}, {}, "does not divide the 4 ranks; use one of 1, 2, 4"),
    (
        {"critic.model.fsdp_config.tensor_parallel_size": 2, f"{ARR}.actor.fsdp_config.tensor_parallel_size": 2},
        {"model_type": "qwen3_moe", "num_experts": 8},
        "the model has experts, which are not cut so; set 1",
    ),
    (
        {"critic.model.fsdp_config.expert_parallel_size": 4},
        {"model_type": "qwen3_moe", "num_experts": 6},
        "does not divide the model's 6 experts; use one of 1, 2, 3, 6",
    ),
    (
        {"critic.ulysses_sequence_parallel_size": 3, "critic.nnodes": 1, "critic.n_gpus_per_node": 3},
        {},
        "does not divide the model's 4 attention heads; use one of 1, 2, 4",
    ),
    (
        {"critic.model.fsdp_config.tensor_parallel_size": 2, "critic.nnodes": 1, "critic.n_gpus_per_node": 3},
        {},
        "does not divide the 3 ranks; use one of 1, 3 (its ranks: critic.nnodes=1, critic.n_gpus_per_node=3)",
    ),
]


@pytest.mark.parametrize(("sizes", "changes", "text"), CRITICS)
def test_a_critics_layout_is_checked_as_its_ranks_do(base, tmp_path, monkeypatch, sizes, changes, text):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    write_model(tmp_path / "model", **changes)
    argv = [*base, CRITIC[0], "trainer.n_gpus_per_node=4", *(f"{key}={size}" for key, size in sizes.items())]
    key, size = next(iter(sizes.items()))
    found = [problem for problem in problems(*argv) if "critic." in problem]
    only(found, "configuration", f"{key}={size}: {text}")


def test_a_critics_model_is_looked_at_with_its_own_overrides(base, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    size, pool = "critic.ulysses_sequence_parallel_size=3", ("critic.nnodes=1", "critic.n_gpus_per_node=3")
    argv = [*base, CRITIC[0], *pool, size]
    assert problems(*argv, f"critic.model.path={write_model(tmp_path / 'other', num_attention_heads=6)}") == []
    assert problems(*argv, "+critic.model.override_config.num_attention_heads=6") == []


def test_a_size_that_follows_another_roles_names_that_one(base, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    actors, own = f"{ARR}.actor.ulysses_sequence_parallel_size", "critic.ulysses_sequence_parallel_size"
    argv = [*base, CRITIC[0], f"{actors}=2", "trainer.n_gpus_per_node=2", "critic.nnodes=1"]
    argv += ["critic.n_gpus_per_node=1"]
    inherited = f"Inherited from {actors}: set {own} itself"
    only(problems(*argv), "configuration", f"{own}=2: does not divide the 1 ranks; use one of 1", inherited)
    assert problems(*argv, f"{own}=1") == []
    assert "Inherited" not in problems(*argv, f"{own}=2")[0]
    only(problems(*base, CRITIC[0], f"{actors}=2"), "configuration", f"{actors}=2: does not divide the 1 ranks")
    same = [*argv, "critic.n_gpus_per_node=2", f"{actors}=3"]
    assert not [p for p in problems(*same) if "critic." in p], "said of the actor, which it follows"


def test_the_ranks_that_remain_beside_another_cut_are_counted():
    assert list(rank_problems(Placement(tensor=3, shard=3), 12)) == [
        (
            "shard=3",
            "does not divide the 4 ranks that remain beside tensor=3; use one of 1, 2, 4",
        )
    ]


# (overrides, parts that must be among the problems): combinations that more than one rule refuses
ALSO_REFUSED = [
    # 3
    (["algorithm.adv_estimator=gae", "critic.enable=False"], "enable the critic or use grpo"),
    (["algorithm.use_pf_ppo=True"], "PF-PPO goes with gae"),
    # 4
    (["algorithm.adv_estimator=grpo_passk", f"{ARR}.rollout.n=1"], "set actor_rollout_ref.rollout.n=2"),
    (["algorithm.filter_groups.enable=True", f"{ARR}.rollout.n=1"], "filter_groups compares"),
    # 5
    (["algorithm.adv_estimator=gdpo"], "gdpo needs the keys"),
    (["algorithm={adv_estimator:gdpo,gdpo_reward_keys:[a,b],gdpo_reward_weights:[1]}"], "1 weights for 2"),
    # 9
    ([f"{ARR}.rollout.tensor_model_parallel_size=3", "trainer.n_gpus_per_node=3"], "use one of 1, 2, 4"),
    ([f"{ARR}.rollout.data_parallel_size=2", f"{ARR}.rollout.name=vllm", "trainer.n_gpus_per_node=3"], "pool of 3"),
    (
        [f"{ARR}.rollout={{tensor_model_parallel_size:4,name:vllm}}", "trainer={nnodes:2,n_gpus_per_node:3}"],
        "more than the 3 devices of the node (trainer.n_gpus_per_node); lower it or make it a multiple of 3",
    ),
    (
        [
            f"{ARR}={{rollout:{{tensor_model_parallel_size:4,name:vllm}},model:{{lora_rank:8}}}}",
            "trainer={nnodes:2,n_gpus_per_node:2}",
        ],
        "with LoRA an engine stays on one node",
    ),
    (
        [f"{ARR}.rollout={{tensor_model_parallel_size:4,name:vllm}}", "trainer={nnodes:3,n_gpus_per_node:2}"],
        "an engine of 4 devices does not divide the pool of 6",
    ),
    (
        [
            f"{ARR}.rollout={{data_parallel_size:4,expert_parallel_size:4,name:vllm}}",
            "trainer={nnodes:2,n_gpus_per_node:2}",
        ],
        "an engine of 4 devices does not divide the 2 of a node",
    ),
    # 10
    ([f"{ARR}.rollout.pipeline_model_parallel_size=2", f"{ARR}.rollout.name=vllm"], "not run in pipeline"),
    # 11
    (
        [f"{ARR}.actor.fsdp_config.expert_parallel_size=2", "trainer.n_gpus_per_node=4"],
        "does not divide the model's 0 experts",
    ),
    (
        [f"{ARR}.actor.fsdp_config.expert_parallel_size=3", "trainer.n_gpus_per_node=4"],
        "3: does not divide the 4 ranks of a copy",
    ),
    ([f"{ARR}.actor.ulysses_sequence_parallel_size=8", "trainer.n_gpus_per_node=8"], "4 attention heads"),
    # 14
    ([f"{ARR}.actor.policy_loss.loss_mode=dro"], "dro needs a value above 0"),
    (["algorithm.entropy_ctrl.target=0.2", f"{ARR}.actor.entropy_coeff=0.01"], "the bonus would count twice"),
    (["algorithm.by_source={a:{policy_loss:gspo}}"], "is a mapping, {loss_mode"),
    (["algorithm.by_source={a:{policy_loss:{loss_mode:gsop}}}"], "nearest: gspo"),
    (["algorithm.by_source={a:{policy_loss:{loss_mode:bypass_mode}}}"], "none of vanilla"),
    (
        ["algorithm.by_source={a:{policy_loss:{clip_high:0.3}}}"],
        "no such setting of a policy loss; nearest: fipo_clip_high",
    ),
    (["algorithm.by_source={a:{policy_loss:{clip_ratio:-1}}}"], "clip_ratio=-1: out of the range of"),
    (["algorithm.by_source={a:{policy_loss:{clip_ratio:high}}}"], "clip_ratio=high: expected a number"),
    (["algorithm.by_source={a:{policy_loss:{loss_agg_mode:mean}}}"], "loss_agg_mode=mean: none of token-mean"),
    (["algorithm.by_source={a:{policy_loss:{loss_mode:dro}}}"], "dro needs a value above 0"),
    (
        [
            "algorithm.by_source={a:{policy_loss:{loss_mode:gspo}}}",
            "algorithm.rollout_correction.bypass_mode=True",
            "algorithm.rollout_correction.loss_type=reinforce",
        ],
        "loss_type=reinforce is the loss of all rows",
    ),
    # 15
    ([f"{RC}.rollout_rs=token_k1"], "rollout_rs needs one"),
    ([f"{RC}.rollout_rs=token_k9", f"{RC}.rollout_rs_threshold=2"], "token_k1..3"),
    ([f"{RC}.rollout_rs='token_k1,seq_max_k2'", f"{RC}.rollout_rs_threshold='1,2,3'"], "3 thresholds"),
    ([f"{RC}.rollout_rs=token_k1", f"{RC}.rollout_rs_threshold=2_x"], "one number above 1"),
    ([f"{RC}.rollout_is=token", f"{RC}.rollout_is_threshold=5_2"], "write a number"),
    ([f"{RC}.rollout_rs='token_k1,seq_max_k2'", f"{RC}.rollout_rs_threshold=0.5_2.0"], "an upper bound only"),
    ([f"{RC}.rollout_rs='token_k2,seq_mean_k1'", f"{RC}.rollout_rs_threshold='0.5,0.5'"], "ratio bounds"),
    ([f"{RC}.bypass_mode=True", f"{ARR}.rollout.calculate_log_probs=False"], "needs the sampler's log-probs"),
    # router replay
    ([f"{ARR}.actor.router_replay.mode=R3"], "enable_rollout_routing_replay=True"),
    (
        [
            *(f"{ARR}.rollout.name=vllm", f"{ARR}.rollout.enable_rollout_routing_replay=True"),
            *(f"{ARR}.actor.router_replay.mode=R3", f"{ARR}.rollout.enable_prefix_caching=False"),
        ],
        "set it to True",
    ),
    (
        ["algorithm.rollout_correction.bypass_mode=True", f"{ARR}.actor.router_replay.mode=R2"],
        "no pass gives old log-probs and routes; use R3",
    ),
    # 17
    (["reward_model.enable=True"], "reward_model.model.path"),
    # 24
    ([f"{ARR}.model.lora_rank=600", f"{ARR}.rollout.name=vllm"], "at most 512"),
]


@pytest.mark.parametrize(
    ("overrides", "part"), ALSO_REFUSED, ids=lambda v: v[-1][-48:] if isinstance(v, list) else None
)
def test_refused_among_others(base, overrides, part):
    found = problems(*base, *overrides)
    assert any(part in p and p.startswith("configuration") for p in found), found


ONE_LABEL = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


@pytest.mark.parametrize(
    ("changes", "overrides", "part"),
    [
        ({}, [], "is no sequence classifier with one label"),
        (
            {"architectures": ["Qwen3ForSequenceClassification"]},
            [],
            "is no sequence classifier with one label",
        ),
        (
            ONE_LABEL,
            ["custom_reward_function.path=pkg://verl.reward.judge"],
            "weights={function: 1, model: 1}",
        ),
        ({}, ["reward_model.weights={function: 1}"], "nothing asks this model"),
        (
            {},
            ["custom_reward_function.path=pkg://verl.reward.judge", "trainer.n_gpus_per_node=2"],
            "a judge has a pool of its own",
        ),
    ],
)
def test_reward_models_that_do_not_fit(base, tmp_path, changes, overrides, part):
    path = write_model(tmp_path / "scorer", **changes)
    found = problems(*base, "reward_model.enable=True", f"reward_model.model.path={path}", *overrides)
    assert any(part in p and "reward_model.model.path" in p for p in found), found


def test_a_folder_that_is_a_file(base, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file/below"):
        found = problems(*base, f"trainer.default_local_dir={folder}")
        only(found, "configuration", "trainer.default_local_dir", f"{tmp_path}/file is a file")
        profile = ["global_profiler.tool=torch", "global_profiler.steps=[1]"]
        found = problems(*base, *profile, f"global_profiler.save_path={folder}")
        only(found, "configuration", "global_profiler.save_path", f"{tmp_path}/file is a file")


def test_an_override_that_contradicts_the_weights(base, tmp_path):
    from safetensors.numpy import save_file

    save_file({"lm_head.weight": np.zeros(2, np.float32)}, tmp_path / "model" / "model.safetensors")
    gae = [*CRITIC[:1], f"critic.model.path={tmp_path / 'model'}"]
    for model, more in ((f"{ARR}.model", []), ("critic.model", gae)):
        key = f"{model}.override_config.num_hidden_layers"
        only(problems(*base, *more, f"+{key}=3"), "configuration", f"{key}=3", "num_hidden_layers=2")
        assert problems(*base, *more, f"+{key}=2") == []


def test_an_override_of_a_part_of_a_configuration_leaves_the_rest(base, tmp_path):
    from safetensors.numpy import save_file

    from verl.config.model_facts import look

    folder = tmp_path / "seeing"
    text = {"vocab_size": 512, "num_attention_heads": 4, "max_position_embeddings": 64, "hidden_size": 8}
    write_model(folder, model_type="qwen3_vl", text_config=text, vision_config={"depth": 2})
    save_file({"lm_head.weight": np.zeros(2, np.float32)}, folder / "model.safetensors")
    facts = look(str(folder), {"text_config": {"max_position_embeddings": 128}, "vision_config": {"a": 1}})
    assert (facts.context, facts.heads, facts.config["vision_config"]) == (128, 4, {"depth": 2, "a": 1})
    key = f"{ARR}.model.override_config"
    words = [f"+{key}.vision_config.depth=3", f"+{key}.text_config.hidden_size=9"]
    found = "\n".join(problems(*base, f"{ARR}.model.path={folder}", *words))
    for word, own in zip(words, ("depth=2", "hidden_size=8"), strict=True):
        assert f"{word[1:]}: the weights" in found and own in found, found


def test_constants_of_a_template_are_not_computed(base, tmp_path):
    import tracemalloc

    template = "{% set x = 'x' * 100000000 %}{{ 'x' * 100000000 }}{{ 'x' | center(100000000) }}"
    (tmp_path / "model/chat_template.jinja").write_text(template)
    tracemalloc.start()
    assert problems(*base) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6


def test_the_models_own_template_is_compiled(base, tmp_path):
    (tmp_path / "model/chat_template.jinja").write_text("{% for m in messages %}")
    only(problems(*base), "configuration", f"{ARR}.model.path=", "is no Jinja template")
