"""The check: every rule of spec config.md §16 that can apply, its notices, and the plan of batches."""

from __future__ import annotations

import itertools
import json

import pytest

from verl.config import load
from verl.config.check import check
from verl.config.layout import Sizes, rank_problems

ARR = "actor_rollout_ref"
MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine without accelerators, cluster, hub cache or trackers' logins."""
    for name in (
        "RAY_ADDRESS",
        "VERL_USE_EXTERNAL_MODULES",
        "HF_HUB_OFFLINE",
        "HF_HUB_CACHE",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("verl.config.devices._nodes", lambda name: [])
    monkeypatch.setattr("verl.config.devices._proc_gpus", list)


def write_model(folder, weights=True, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | changes))
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    return folder


def write_rows(file, rows=16, **columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = {
        "data_source": ["openai/gsm8k"] * rows,
        "prompt": [[{"role": "user", "content": "1+1?"}]] * rows,
        "reward_model": [{"style": "rule", "ground_truth": "2"}] * rows,
    } | columns
    pq.write_table(pa.table({k: v for k, v in table.items() if v is not None}), file)
    return file


@pytest.fixture
def base(tmp_path):
    """Arguments of a run that is right."""
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={write_rows(tmp_path / 'train.parquet')}",
        f"data.val_files={write_rows(tmp_path / 'test.parquet', 4)}",
        "data.train_batch_size=8",
        f"{ARR}.actor.ppo_mini_batch_size=4",
        f"{ARR}.model.path={write_model(tmp_path / 'model')}",
        f"{ARR}.rollout.n=4",
        "trainer.device=cpu",
    ]


def problems(*argv, entry="ppo"):
    report = check(load(list(argv), entry=entry))
    return [f"{p.kind}: {p}" for p in report.problems]


def notices(*argv):
    return "\n".join(check(load(list(argv))).notices)


def only(found, kind, *parts):
    assert len(found) == 1, found
    assert found[0].startswith(kind)
    for part in parts:
        assert part in found[0], (part, found[0])


def test_a_right_one(base):
    report = check(load(base))
    assert report.problems == [] and report.exit_code == 0 and report.notices == []


# (overrides, parts of the one problem they make)
REFUSED = [
    ([f"{ARR}.rollout.prompt_length=100"], ["prompt_length=100", "data.max_prompt_length=512", "unset"]),
    (["trainer.val_only=True", "data.val_files=null"], ["val_only", "nothing to validate on"]),
    # 1
    (
        [f"{ARR}.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True"],
        ["KL would be charged twice", "keep one"],
    ),
    # 2
    (["algorithm.adv_estimator=grop"], ["grpo_vectorized", "nearest: grpo", "register_adv_est"]),
    ([f"{ARR}.actor.policy_loss.loss_mode=vanila"], ["nearest: vanilla", "register_policy_loss"]),
    ([f"{ARR}.actor.loss_agg_mode=token_mean"], ["nearest: token-mean"]),
    ([f"{ARR}.actor.kl_loss_type=k4"], ["low_var_kl"]),
    (["algorithm.kl_penalty=full"], ["low_var_kl"]),
    (["reward_model.reward_manager=nave"], ["nearest: naive"]),
    (["trainer.device=gpu"], ["cuda"]),
    ([f"{ARR}.rollout.name=vlm"], ["nearest: vllm"]),
    ([f"{ARR}.rollout.multi_turn.format=herms"], ["nearest: hermes"]),
    (["trainer.logger=[console,wandbb]"], ["trainer.logger=wandbb", "nearest: wandb"]),
    (["data.truncation=centre"], ["data.truncation=centre", "middle"]),
    (["trainer.resume_mode=yes"], ["disable"]),
    ([f"{ARR}.actor.optim.lr_scheduler_type=cos"], ["cosine"]),
    # 6
    ([f"{ARR}.rollout.temperature=0"], ["set 1.0"]),
    ([f"{ARR}.rollout.do_sample=False"], ["set True"]),
    ([f"{ARR}.rollout.val_kwargs.do_sample=True"], ["temperature 0 is greedy"]),
    ([f"{ARR}.rollout.dtype=fp64"], ["none of float32", "nearest: fp16"]),
    ([f"{ARR}.rollout.dtype=half"], ["the native engine computes in float32 or bfloat16"]),
    ([f"{ARR}.actor.fsdp_config.mixed_precision.param_dtype=bf61"], ["nearest: bf16"]),
    ([f"{ARR}.rollout.top_p=0"], ["above 0 and at most 1"]),
    ([f"{ARR}.rollout.top_p=1.1"], ["at most 1"]),
    # 7
    (["data.max_response_length=2000"], ["2512", "2048"]),
    ([f"{ARR}.rollout.max_model_len=100"], ["1024", "max_model_len=100"]),
    # 8
    (
        [f"{ARR}.rollout.enable_chunked_prefill=False", f"{ARR}.rollout.max_num_batched_tokens=100"],
        ["raise it to 1024"],
    ),
    # 9
    ([f"{ARR}.rollout.tensor_model_parallel_size=2"], ["1 devices of the node"]),
    ([f"{ARR}.rollout.data_parallel_size=2"], ["does not divide the pool of 1", "use one of 1"]),
    # 10
    ([f"{ARR}.rollout.expert_parallel_size=2"], ["no experts"]),
    # 11
    ([f"{ARR}.actor.ulysses_sequence_parallel_size=2"], ["does not divide the 1 ranks"]),
    ([f"{ARR}.actor.fsdp_config.fsdp_size=3"], ["does not divide the 1 ranks"]),
    # 13
    (["data.train_batch_size=0"], ["at least 1"]),
    ([f"{ARR}.actor.ppo_mini_batch_size=0"], ["at least 1"]),
    ([f"{ARR}.actor.ppo_micro_batch_size_per_gpu=0"], ["at least 1"]),
    ([f"{ARR}.rollout.n=0"], ["at least 1"]),
    # 14
    ([f"{ARR}.actor.clip_ratio_c=1"], ["above 1"]),
    ([f"{ARR}.actor.clip_ratio_low=-0.1"], ["at least 0"]),
    (["algorithm.gamma=1.1"], ["at least 0 and at most 1"]),
    (
        ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=0", "algorithm.use_kl_in_reward=True"],
        ["above 0"],
    ),
    (
        [
            "algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_ctrl.target_kl=0",
            "algorithm.use_kl_in_reward=True",
        ],
        ["above 0"],
    ),
    # 15
    (["algorithm.rollout_correction.loss_type=reinforce"], ["bypass_mode=True"]),
    # 16
    (["reward_model.reward_kwargs.overlong_buffer_cfg.enable=True"], ["at most", "max_resp_len=512"]),
    (["reward_model.reward_kwargs.overlong_buffer_cfg={enable:True,len:513}"], ["513"]),
    # 18
    (["reward_model.enable_resource_pool=True"], ["reward_model.nnodes=1"]),
    ([f"{ARR}.hybrid_engine=False"], ["rollout.nnodes"]),
    # 20
    (["custom_reward_function.path=/no/such/file.py"], ["no such file", "/no/such/file.py"]),
    (["custom_reward_function.path=pkg://no.such.module"], ["no module no.such.module"]),
    (
        [f"+{ARR}.actor.optim.override_optimizer_config.lr=0.1"],
        ["override_optimizer_config.lr", "set", "optim.lr"],
    ),
    # 21
    (["trainer.resume_mode=resume_path"], ["needs trainer.resume_from_path"]),
    (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/such"], ["no such directory"]),
    # 25
    (["data.train_batch_size=17"], ["more than the 16 rows", "lower it to 16"]),
    (["data.train_max_samples=4"], ["more than the 4 rows"]),
    # recognised values
    ([f"{ARR}.rollout.name=trtllm"], ["TensorRT-LLM", "closest"]),
    ([f"{ARR}.rollout.checkpoint_engine.backend=nixl"], ["NIXL"]),
    (["critic.strategy=torchtitan"], ["TorchTitan"]),
    # not in this release
    (["algorithm.adv_estimator=rloo"], ["rloo is not in this release; set algorithm.adv_estimator=grpo"]),
    ([f"{ARR}.actor.policy_loss.loss_mode=cispo"], ["cispo is not in this release", "vanilla"]),
    ([f"{ARR}.rollout.multi_turn.enable=True"], ["not in this release (tools and turns); set it to False"]),
    (["algorithm.filter_groups.enable=True"], ["dynamic sampling"]),
    (["reward_model.enable=True", "reward_model.model.path=/m"], ["reward models"]),
    (["critic.enable=True"], ["the critic"]),
    ([f"{ARR}.rollout.agent.agent_loop_config_path=x.yaml"], ["agent loops listed in a file"]),
    (["trainer.max_staleness=1"], ["share one model here", f"{ARR}.rollout.nnodes=1"]),
    (["critic.strategy=megatron"], ["use fsdp or fsdp2"]),
    (["skip.rollout.enable=True"], ["replay"]),
    (["global_profiler.tool=torch"], ["no step is named", "global_profiler.steps=[2]"]),
    (["global_profiler.tool=torch", "global_profiler.steps=[0,1]"], ["counted from 1"]),
    (
        [
            "global_profiler.tool=torch",
            "global_profiler.steps=[1]",
            f"+{ARR}.actor.profiler.tool_config.torch.contents=[cpu,nonsense]",
        ],
        ["nonsense is not known", "cpu, cuda, npu, memory, shapes, stack"],
    ),
]


@pytest.mark.parametrize(
    ("overrides", "parts"), REFUSED, ids=lambda v: v[0][-48:] if isinstance(v, list) else None
)
def test_refused(base, overrides, parts):
    only(problems(*base, *overrides), "configuration", *parts)


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
    ({"ulysses": 2}, {"layer_types": ["linear_attention", "full_attention"]}, "ulysses", "linear_attention"),
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
        rows = write_rows(tmp_path / "sft.parquet", messages=[[{"role": "user", "content": "1"}]] * 16)
        argv = [f"data.train_files={rows}", f"model.path={tmp_path / 'model'}", "data.train_batch_size=4"]
        argv += ["trainer.device=cpu"]
    found = problems(*argv, *(f"{keys[name]}={size}" for name, size in sizes.items()), entry=entry)
    if named is None:
        assert found == []
    else:
        words = [f"{keys[name]}={sizes[name]}" for name in named.split(" × ")]
        only(found, "configuration", " × ".join(words) + ": ", text)


def test_the_references_layout_is_checked_where_there_is_one(base, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    argv = [*base, "trainer.n_gpus_per_node=4", f"{ARR}.ref.fsdp_config.fsdp_size=3"]
    assert problems(*argv) == []
    argv.append(f"{ARR}.actor.use_kl_loss=True")
    only(
        problems(*argv), "configuration", f"{ARR}.ref.fsdp_config.fsdp_size=3", "does not divide the 4 ranks"
    )


def test_sizes_without_a_problem_can_be_laid_out():
    for ranks, sequence, tensor, shard in itertools.product(
        range(1, 13), (1, 2, 3), (1, 2, 3, 4), range(-1, 13)
    ):
        if not list(rank_problems(Sizes(sequence, tensor, shard), ranks)):
            parts = ranks // tensor
            assert ranks % (sequence * tensor) == 0
            assert shard <= 0 or shard >= parts or parts % shard == 0, (ranks, tensor, shard)
    (problem,) = rank_problems(Sizes(1, 3, 3), 12)
    assert problem == (
        "fsdp_config.fsdp_size=3",
        "does not divide the 4 ranks that remain beside fsdp_config.tensor_parallel_size=3; use one of 1, 2, 4",
    )


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
    (
        [
            "algorithm.adv_estimator=gdpo",
            "algorithm.gdpo_reward_keys=[a,b]",
            "algorithm.gdpo_reward_weights=[1]",
        ],
        "1 weights for 2 keys",
    ),
    # 9
    (
        [f"{ARR}.rollout.tensor_model_parallel_size=3", "trainer.n_gpus_per_node=3"],
        "4 attention heads; use one of 1, 2, 4",
    ),
    (
        [f"{ARR}.rollout.data_parallel_size=2", "trainer.n_gpus_per_node=3", "trainer.nnodes=1"],
        "pool of 3",
    ),
    # 10
    (
        [
            f"{ARR}.rollout.pipeline_model_parallel_size=2",
            f"{ARR}.rollout.name=vllm",
            "trainer.n_gpus_per_node=2",
        ],
        "not run in pipeline",
    ),
    # 11
    ([f"{ARR}.actor.ulysses_sequence_parallel_size=8", "trainer.n_gpus_per_node=8"], "4 attention heads"),
    # 12
    (
        [f"{ARR}.actor.strategy=megatron", f"{ARR}.actor.megatron.tensor_model_parallel_size=2"],
        "tensor × pipeline × context = 2",
    ),
    (
        [f"{ARR}.actor.strategy=megatron", f"{ARR}.actor.megatron.virtual_pipeline_model_parallel_size=2"],
        "needs pipeline",
    ),
    (
        [
            f"{ARR}.actor.strategy=megatron",
            f"{ARR}.actor.megatron.pipeline_model_parallel_size=4",
            "trainer.n_gpus_per_node=4",
        ],
        "2 layers over 4 chunks",
    ),
    ([f"{ARR}.actor.strategy=megatron", f"{ARR}.actor.megatron.expert_model_parallel_size=2"], "no experts"),
    # 14
    ([f"{ARR}.actor.policy_loss.loss_mode=dro"], "dro needs a value above 0"),
    # 15
    (["algorithm.rollout_correction.rollout_rs=token_k1"], "rollout_rs needs one"),
    (
        [
            "algorithm.rollout_correction.rollout_rs=token_k9",
            "algorithm.rollout_correction.rollout_rs_threshold=2",
        ],
        "token_k1..3",
    ),
    (
        [
            "algorithm.rollout_correction.rollout_rs='token_k1,seq_max_k2'",
            "algorithm.rollout_correction.rollout_rs_threshold='1,2,3'",
        ],
        "3 thresholds for 2 rules",
    ),
    (
        [
            "algorithm.rollout_correction.rollout_rs=token_k1",
            "algorithm.rollout_correction.rollout_rs_threshold=2_x",
        ],
        "write a number",
    ),
    (
        [
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.rollout_correction.rollout_is_threshold=5_2",
        ],
        "write a number",
    ),
    (
        [
            "algorithm.rollout_correction.rollout_rs='token_k1,seq_max_k2'",
            "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
        ],
        "seq_max_k2 has an upper bound only",
    ),
    (
        [
            "algorithm.rollout_correction.rollout_rs='token_k2,seq_mean_k1'",
            "algorithm.rollout_correction.rollout_rs_threshold='0.5,0.5'",
        ],
        "seq_mean_k1 is bounded on both sides",
    ),
    (
        ["algorithm.rollout_correction.bypass_mode=True", f"{ARR}.rollout.calculate_log_probs=False"],
        "needs the sampler's log-probs",
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


def test_thresholds_that_parse(base):
    for given in ("2.0", "0.5_5.0", "2"):
        found = problems(
            *base,
            "algorithm.rollout_correction.rollout_is=token",
            f"algorithm.rollout_correction.rollout_is_threshold={given}",
        )
        assert found == []


NOTICES = [
    (["trainer.critic_warmup=3"], "no critic to warm up"),
    ([f"{ARR}.actor.ppo_mini_batch_size=16"], "one update on the batch"),
    ([f"{ARR}.actor.ppo_mini_batch_size=3"], "3 mini-batches of 2 to 3 prompts"),
    ([f"{ARR}.rollout.n=1"], "the score is the advantage"),
    ([f"{ARR}.rollout.val_kwargs.n=2"], "all answers to a prompt will be the same"),
    (["trainer.test_freq=5", "data.val_files=null"], "nothing to validate on"),
    ([f"{ARR}.model.exclude_modules=[x]"], "LoRA only"),
    ([f"{ARR}.actor.freeze_vision_tower=True"], "no vision tower"),
    ([f"{ARR}.rollout.top_p=0.9"], "not truncated"),
    ([f"{ARR}.rollout.top_k=5"], "not truncated"),
    ([f"{ARR}.actor.loss_agg_mode=seq-mean-token-sum-norm"], "Dr. GRPO"),
    (
        [
            "reward_model.reward_kwargs.overlong_buffer_cfg={enable:True,len:5}",
            "reward_model.reward_kwargs.max_resp_len=100",
        ],
        "is not data.max_response_length",
    ),
    (["algorithm.kl_ctrl.kl_coef=0.1"], "nothing uses it"),
    ([f"{ARR}.actor.ppo_max_token_len_per_gpu=100"], "goes alone"),
    ([f"{ARR}.model.use_remove_padding=False"], "packed without padding"),
    ([f"{ARR}.rollout.engine_kwargs.vllm.x=1"], "belong to vllm and sglang"),
    ([f"{ARR}.actor.use_kl_loss=True", f"{ARR}.actor.kl_loss_type=k1"], "expected gradient is 0"),
    ([f"{ARR}.actor.checkpoint.save_contents=[model,hf_model]"], "hf_model has no effect"),
    (["trainer.logger=[mlflow]"], "not in this release, left out"),
    (
        [f"{ARR}.rollout.multi_stage_wake_up=True"],
        "rollout.multi_stage_wake_up=True: the native engine decides",
    ),
    ([f"{ARR}.ref.fsdp_config.offload_policy=True"], "nothing is sharded"),
    ([f"{ARR}.actor.fsdp_config.param_offload=True"], "stay where they are"),
    ([f"{ARR}.actor.fsdp_config.model_dtype=bf16"], "master weights and the optimizer's state are float32"),
    (
        [f"{ARR}.actor.checkpoint.async_save=True", "trainer.esi_redundant_time=5"],
        "trainer.esi_redundant_time=5.0: not",
    ),
    ([f"{ARR}.actor.profiler.enable=True"], "nothing is profiled without global_profiler.tool=torch"),
    (
        [
            "algorithm.rollout_correction.bypass_mode=True",
            "algorithm.rollout_correction.loss_type=reinforce",
        ],
        "trained on uncorrected",
    ),
    (
        ["algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.rollout_is=token"],
        "whose ratio is to the sampler already",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "part"), NOTICES, ids=lambda v: v[0][-48:] if isinstance(v, list) else None
)
def test_notices(base, overrides, part):
    report = check(load([*base, *overrides]))
    assert report.exit_code == 0, report.problems
    said = report.notices + report.check_only
    assert sum(part in notice for notice in said) == 1, said


NOTICES_BESIDE = [
    (["trainer.max_staleness=1", "trainer.n_gpus_per_node=2"], "sampler and trainer compete for them"),
    ([f"{ARR}.actor.policy_loss.loss_mode=gspo"], "its paper has clip_ratio_low=3e-4"),
    ([f"{ARR}.actor.policy_loss.loss_mode=dppo_kl"], "set both"),
    (["trainer.max_staleness=1"], "trained on uncorrected"),
    ([f"{ARR}.actor.strategy=megatron"], "sequence_parallel is off"),
]


@pytest.mark.parametrize(("overrides", "part"), NOTICES_BESIDE)
def test_notices_of_what_this_release_refuses(base, overrides, part):
    assert part in notices(*base, *overrides)


def test_another_name_of_the_default_is_no_news(base):
    assert "model_dtype" not in notices(*base, f"{ARR}.actor.fsdp_config.model_dtype=float32")


def test_staleness_with_a_pool_of_its_own_and_a_correction(base):
    """Nothing is left to say: not shared, and corrected, by weights or by the ratio to the sampler."""
    for how in ("rollout_is=token", "bypass_mode=True"):
        found = check(
            load(
                [
                    *base,
                    "trainer.max_staleness=2",
                    f"{ARR}.rollout.nnodes=1",
                    f"{ARR}.rollout.n_gpus_per_node=1",
                    f"algorithm.rollout_correction.{how}",
                ]
            )
        )
        assert not [p for p in found.problems if p.kind == "configuration"], found.problems
        assert not any("stal" in notice or "compete" in notice for notice in found.notices), found.notices


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train_batch_size=7", f"{ARR}.rollout.n=3"],
        [f"{ARR}.actor.ppo_micro_batch_size_per_gpu=3"],
        [f"{ARR}.actor.ppo_micro_batch_size_per_gpu=null"],
        [f"{ARR}.rollout.agent.num_workers=5"],
        ["data.gen_batch_size=3"],
        [f"{ARR}.actor.checkpoint.async_save=True"],
        [f"{ARR}.actor.strategy=fsdp2"],
        ["algorithm.adv_estimator=grpo_vectorized", "algorithm.norm_adv_by_std_in_grpo=False"],
        ["trainer.n_gpus_per_node=1", "trainer.nnodes=1", f"{ARR}.rollout.tensor_model_parallel_size=1"],
        ["data.val_files=null"],
    ],
)
def test_lifted(base, overrides):
    """What the public system refuses and nothing in the method asks for."""
    assert problems(*base, *overrides) == []


# ---- the machine ----


def test_ray_and_open_files(base, monkeypatch):
    import importlib.util
    import resource

    many = "trainer.n_gpus_per_node=2"
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    with monkeypatch.context() as few:
        few.setattr(resource, "getrlimit", lambda which: (256, 512))
        only(problems(*base, many), "machine", "ulimit -n", "2 workers need 1280")
        assert problems(*base) == [], "one device needs none of it"
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "ray" else real(name, *a)
    )
    only(problems(*base, many), "machine", "pip install 'verl[ray]'")


def test_devices(base, monkeypatch):
    only(problems(*base, "trainer.device=cuda"), "machine", "no cuda device")
    only(problems(*base, "trainer.device=npu"), "machine", "no npu device")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert problems(*base, "trainer.n_gpus_per_node=4") == []
    only(problems(*base, "trainer.n_gpus_per_node=8"), "machine", "8 devices", "found 4 cores", "RAY_ADDRESS")
    only(problems(*base, "trainer.nnodes=2"), "machine", "2 devices on 2 nodes", "examples/ray_start.sh")
    pool = (f"{ARR}.rollout.nnodes=1", f"{ARR}.rollout.n_gpus_per_node=2", "trainer.n_gpus_per_node=2")
    assert problems(*base, *pool) == [], "two pools of one machine"
    only(problems(*base, *pool, "trainer.n_gpus_per_node=3"), "machine", "5 devices asked for")
    with monkeypatch.context() as joined:
        joined.setenv("RAY_ADDRESS", "127.0.0.1:1")
        assert problems(*base, "trainer.nnodes=2", "trainer.device=npu") == [], (
            "the cluster's nodes are looked at later"
        )
    monkeypatch.setattr("verl.config.devices._nodes", lambda name: ["nvidia0"] if name == "nvidia" else [])
    monkeypatch.setattr("verl.config.devices._torch_has_cuda", lambda: True)
    assert problems(*base, "trainer.device=cuda") == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    only(problems(*base, "trainer.device=cuda"), "machine", "no cuda device")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("verl.config.devices._torch_has_cuda", lambda: False)
    only(problems(*base, "trainer.device=cuda"), "machine", "built without CUDA")


def test_engines(base):
    only(
        problems(*base, f"{ARR}.rollout.name=sglang"),
        "machine",
        "set actor_rollout_ref.rollout.name=native",
    )


def test_models_that_are_not_here(base, monkeypatch):
    report = check(load([*base, f"{ARR}.model.path=Org/Name"]))
    assert report.exit_code == 3 and "hf download Org/Name" in str(report.problems[0])
    report.allow_downloads()
    assert report.exit_code == 0 and "fetched at the start" in report.notices[-1]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    report = check(load([*base, f"{ARR}.model.path=Org/Name"]))
    report.allow_downloads()
    assert report.exit_code == 3
    only(problems(*base, f"{ARR}.model.path=/no/such/dir"), "machine", "no such directory")
    only(problems(*base, f"{ARR}.model.path=null"), "configuration", "is required")


def test_models_in_the_hubs_cache(base, tmp_path):
    root = tmp_path / "hub" / "hub" / "models--Org--Name"
    write_model(root / "snapshots" / "abc", max_position_embeddings=100)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc")
    only(problems(*base, f"{ARR}.model.path=Org/Name"), "configuration", "the model's context is 100")


def test_model_directories(base, tmp_path):
    def path(name):
        return f"{ARR}.model.path={tmp_path / name}"

    write_model(tmp_path / "no-weights", weights=False)
    only(problems(*base, path("no-weights")), "configuration", "no *.safetensors there")
    (tmp_path / "empty").mkdir()
    only(problems(*base, path("empty")), "configuration", "config.json does not exist")
    write_model(tmp_path / "shards", weights=False)
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-1.safetensors"}}'
    )
    only(problems(*base, path("shards")), "configuration", "model-1.safetensors")
    write_model(tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("{")
    only(problems(*base, path("broken")), "configuration", "cannot be read as JSON")
    write_model(tmp_path / "vl", vision_config={}, text_config=MODEL)
    only(problems(*base, path("vl")), "machine", "vision models")
    write_model(tmp_path / "remote", auto_map={"AutoModel": "x.Y"}, model_type="nobody_knows")
    only(problems(*base, path("remote")), "configuration", "trust_remote_code=False", "author")
    assert problems(*base, path("remote"), f"{ARR}.model.trust_remote_code=True") == []
    write_model(tmp_path / "native", auto_map={"AutoModel": "x.Y"}, model_type="qwen3")
    assert problems(*base, path("native")) == []


def test_context_counts_rope_scaling_and_overrides(base, tmp_path):
    long = [*base, "data.max_response_length=6000"]
    only(problems(*long), "configuration", "2048")
    write_model(
        tmp_path / "yarn",
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    )
    assert problems(*long, f"{ARR}.model.path={tmp_path / 'yarn'}") == []
    assert problems(*long, f"{ARR}.model.override_config.max_position_embeddings=8192") == []
    assert problems(*long, f"{ARR}.model.override_config.model_config.max_position_embeddings=8192") == []


# ---- data ----


def test_files_that_are_not_here(base):
    only(problems(*base, "data.train_files=/no/such.parquet"), "machine", "/no/such.parquet")


def test_remote_files_are_not_looked_at(base):
    assert "not looked at here" in notices(*base, "data.train_files=s3://b/x.parquet")


def test_broken_and_empty_files(base, tmp_path):
    (tmp_path / "broken.parquet").write_text("not parquet")
    only(
        problems(*base, f"data.train_files={tmp_path}/broken.parquet"), "configuration", "not a parquet file"
    )
    (tmp_path / "zero.parquet").write_bytes(b"")
    only(problems(*base, f"data.train_files={tmp_path}/zero.parquet"), "configuration", "empty")
    write_rows(tmp_path / "none.parquet", 0)
    only(problems(*base, f"data.train_files={tmp_path}/none.parquet"), "configuration", "no rows")


def test_columns(base, tmp_path):
    file = f"data.train_files={write_rows(tmp_path / 'a.parquet', Prompt=['x'] * 16, prompt=None)}"
    only(problems(*base, file), "configuration", "no column 'prompt'", "nearest is 'Prompt'")
    file = f"data.train_files={write_rows(tmp_path / 'b.parquet', data_source=None)}"
    only(problems(*base, file), "configuration", "data_source")


def test_sources(base, tmp_path):
    file = (
        f"data.train_files={write_rows(tmp_path / 'a.parquet', data_source=['openai/gsm8k', 'my/own'] * 8)}"
    )
    only(problems(*base, file), "configuration", "my/own", "openai/gsm8k")
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0"
    )
    assert problems(*base, file, f"custom_reward_function.path={tmp_path}/reward.py") == []


def test_the_plain_format(base, tmp_path):
    def file(name, responses):
        columns = {
            "prompt": ["1+1?"] * 16,
            "response": responses,
            "reward": [0.0] * 16,
            "data_source": None,
            "reward_model": None,
        }
        return f"data.train_files={write_rows(tmp_path / name, **columns)}"

    assert problems(*base, file("good.parquet", ["so #### 2"] * 16)) == []
    found = check(load([*base, file("good.parquet", ["so #### 2"] * 16)]))
    assert sum("otherwise unused" in text for text in found.check_only) == 1
    assert not any("otherwise unused" in text for text in found.notices), (
        "the run says it when it reads the file"
    )
    only(
        problems(*base, file("bad.parquet", [""] * 16)),
        "configuration",
        "Every reward would be 0",
        "custom_reward_function.path",
    )


def test_json_lines(base, tmp_path):
    row = {"data_source": "openai/gsm8k", "prompt": "1+1?", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(row)] * 9))
    report = check(load([*base, f"data.train_files={tmp_path}/a.jsonl"]))
    assert report.problems == [] and report.plan[0].startswith("9 rows")


def test_rows_with_images(base, tmp_path):
    images = [[{"bytes": b"x", "path": "a"}]] * 16
    file = f"data.train_files={write_rows(tmp_path / 'a.parquet', images=images)}"
    only(problems(*base, file), "configuration", "images", "text model")
    write_model(tmp_path / "vl", vision_config={}, text_config=MODEL)
    found = problems(*base, file, f"{ARR}.model.path={tmp_path / 'vl'}")
    assert len(found) == 2 and all(p.startswith("machine") and "not in this release" in p for p in found)
    import pyarrow as pa

    none = pa.array([[]] * 16, pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})))
    assert problems(*base, f"data.train_files={write_rows(tmp_path / 'b.parquet', images=none)}") == []


# ---- the user's own code ----


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("def other(): pass", "defines no such name"),
        ("def compute_scor(data_source): pass", "nearest: compute_scor"),
        ("def compute_score(answer): pass", "it takes answer; add data_source"),
        ("def compute_score(data_source, solution_str, ground_truth): pass", "add extra_info"),
        ("def compute_score(:", "cannot be read as Python"),
    ],
)
def test_reward_functions_that_do_not_fit(base, tmp_path, code, part):
    (tmp_path / "reward.py").write_text(code)
    only(problems(*base, f"custom_reward_function.path={tmp_path}/reward.py"), "configuration", part)


@pytest.mark.parametrize(
    "code",
    [
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): pass",
        "async def compute_score(data_source, solution_str, **kwargs): pass",
        "compute_score = lambda **k: 1.0",
        "from math import sqrt as compute_score",
        "try:\n    from x import compute_score\nexcept ImportError:\n    pass",
        "import torch_is_never_imported_here\ndef compute_score(**kwargs): pass",
    ],
)
def test_reward_functions_that_fit(base, tmp_path, code):
    (tmp_path / "reward.py").write_text(code)
    assert problems(*base, f"custom_reward_function.path={tmp_path}/reward.py") == []


def test_batch_functions(base, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos): pass"
    )
    argv = [*base, f"custom_reward_function.path={tmp_path}/reward.py"]
    assert problems(*argv, "reward_model.reward_manager=batch") == []
    only(problems(*argv), "configuration", "add data_source")


def test_plugins_bring_names(base, tmp_path, monkeypatch):
    name = f"plugin_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "from verl.algorithms.registry import ESTIMATORS, LOSSES\n"
        f"ESTIMATORS.register('est_{name}')(lambda **k: None)\nLOSSES.register('loss_{name}')(lambda **k: None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    argv = [*base, f"algorithm.adv_estimator=est_{name}", f"{ARR}.actor.policy_loss.loss_mode=loss_{name}"]
    assert len(problems(*argv)) == 2
    assert problems(*argv, f"{ARR}.model.external_lib={name}") == []
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", name)
    assert problems(*argv) == []
    found = problems(*base, "algorithm.adv_estimator=nobody", f"{ARR}.model.external_lib=no_such_plugin")
    assert any("importing no_such_plugin failed" in p for p in found)


def test_resume_path(base, tmp_path):
    argv = [*base, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/run"]
    (tmp_path / "run").mkdir()
    only(problems(*argv), "configuration", "holds no checkpoint")
    (tmp_path / "run" / "global_step_3").mkdir()
    assert problems(*argv) == []


# ---- the plan, the other programs ----


def test_the_plan(base):
    plan = "\n".join(check(load([*base, "trainer.total_epochs=3", f"{ARR}.actor.ppo_epochs=2"])).plan)
    assert "16 rows, 2 steps an epoch × 3 epochs = 6 steps" in plan
    assert "8 prompts × 4 answers = 32 trajectories" in plan
    assert "4 updates (2 mini-batches of 16 answers × 2 epochs)" in plan
    assert "up to 16384 tokens each" in plan and "validation: 4 prompts × 1" in plan
    words = ["data.val_max_samples=3", "data.train_max_samples=9", "trainer.total_epochs=3"]
    few = "\n".join(check(load([*base, *words])).plan)
    assert "validation: 3 prompts × 1" in few and "9 rows, 1 step an epoch × 3 epochs = 3 steps" in few
    plan = "\n".join(
        check(
            load([*base, f"{ARR}.actor.ppo_micro_batch_size_per_gpu=3", "trainer.total_training_steps=9"])
        ).plan
    )
    assert "6 of 3 answers per mini-batch" in plan and "9 steps over 16 rows" in plan


def test_supervised(tmp_path):
    argv = [f"model.path={write_model(tmp_path / 'model')}", "data.train_batch_size=4", "trainer.device=cpu"]
    chat = f"data.train_files={write_rows(tmp_path / 'chat.parquet', messages=[[{'role': 'user', 'content': 'x'}]] * 16)}"
    assert problems(*argv, chat, entry="sft") == []
    pairs = (
        f"data.train_files={write_rows(tmp_path / 'pairs.parquet', question=['x'] * 16, answer=['y'] * 16)}"
    )
    only(problems(*argv, pairs, entry="sft"), "configuration", "no column 'messages'", "data.prompt_key")
    assert problems(*argv, pairs, "data.prompt_key=question", "data.response_key=answer", entry="sft") == []
    only(problems(*argv, chat, "engine.strategy=megatron", entry="sft"), "configuration", "use fsdp or fsdp2")
    only(problems(*argv, chat, "data.train_batch_size=17", entry="sft"), "configuration", "16 rows")


def test_generation_and_evaluation(tmp_path):
    file = write_rows(tmp_path / "a.parquet", responses=[["a"]] * 16)
    assert len(problems(entry="eval")) == 1
    assert problems(f"data.path={file}", entry="eval") == []
    only(
        problems(f"data.path={file}", "data.response_key=response", entry="eval"),
        "configuration",
        "nearest: responses",
    )
    argv = [f"data.path={file}", f"model.path={write_model(tmp_path / 'model')}", "trainer.device=cpu"]
    only(problems(*argv, entry="generation"), "configuration", "data.output_path: is required")
    assert problems(*argv, f"data.output_path={tmp_path}/o.parquet", entry="generation") == []


def test_keys_of_more_than_one_device_are_without_effect_on_one_only(base):
    size = f"{ARR}.rollout.checkpoint_engine.update_weights_bucket_megabytes=64"
    offload = f"{ARR}.actor.fsdp_config.param_offload=True"
    alone = notices(*base, size, offload)
    assert f"no effect: {offload}, {size}: in one process" in alone
    moved = f"{ARR}.ref.fsdp_config.param_offload=True", f"{ARR}.actor.fsdp_config.optimizer_offload=True"
    assert "offload" not in notices(*base, *moved)
    several = notices(*base, size, offload, "trainer.n_gpus_per_node=2")
    assert "update_weights_bucket_megabytes" not in several and "param_offload" not in several


def test_the_way_that_weights_travel_is_said_when_another_is_asked_for(base):
    backend = f"{ARR}.rollout.checkpoint_engine.backend=nccl"
    assert f"{backend}: weights travel through shared memory; only nodes" in notices(*base, backend)
    assert "checkpoint_engine.backend" not in notices(*base, backend, f"{ARR}.rollout.nnodes=1")


@pytest.mark.parametrize(("tool", "words"), [("nsys", "records CUDA devices"), ("npu", "an Ascend device")])
def test_profilers_of_other_devices_are_what_the_machine_lacks(base, tool, words):
    found = problems(*base, f"global_profiler.tool={tool}", "global_profiler.steps=[2]")
    only(found, "machine", words, "set it to torch")


def test_a_run_folder_inside_a_submitted_jobs_copy_is_said_to_be_lost(base, tmp_path, monkeypatch):
    copy = tmp_path / "session_x/runtime_resources/working_dir_files/_ray_pkg_1"
    copy.mkdir(parents=True)
    assert "temporary copy" not in notices(*base)
    monkeypatch.chdir(copy)
    assert "trainer.default_local_dir=runs/a is inside Ray's temporary copy" in notices(
        *base, "trainer.default_local_dir=runs/a"
    )
    assert "temporary copy" not in notices(*base, f"trainer.default_local_dir={tmp_path}/runs")
