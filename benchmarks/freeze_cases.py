"""What is frozen: the training runs, and the command lines that are only checked. `{inputs}` is the folder of
inputs."""

from __future__ import annotations

from dataclasses import dataclass

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, VLLM = "actor_rollout_ref.model", "actor_rollout_ref.rollout.engine_kwargs.vllm"
CORRECTION = "algorithm.rollout_correction"
BASE = [
    "algorithm.adv_estimator=grpo",
    "data.train_files={inputs}/train.parquet",
    "data.val_files={inputs}/val.parquet",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=12",
    f"{MODEL}.path={{inputs}}/models/qwen3",
    f"{ROLLOUT}.name=native",
    f"{ROLLOUT}.n=3",
    f"{ACTOR}.ppo_mini_batch_size=4",
    f"{ACTOR}.optim.lr=5e-3",
    f"{ACTOR}.fsdp_config.dtype=float32",
    "custom_reward_function.path={inputs}/reward.py",
    "reward_model.num_workers=1",
    "trainer.device=cpu",
    "trainer.total_training_steps=3",
    "trainer.save_freq=3",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.logger=console",
]
SFT_BASE = [
    "model.path={inputs}/models/qwen3_tied",
    "data.train_files={inputs}/sft.jsonl",
    "data.val_files={inputs}/sft.jsonl",
    "data.prompt_key=question",
    "data.response_key=answer",
    "data.train_batch_size=4",
    "data.max_token_len_per_gpu=150",
    "engine.dtype=float32",
    "optim.lr=1e-2",
    "optim.lr_warmup_steps=1",
    "optim.lr_scheduler_type=cosine",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=3",
    "trainer.test_freq=3",
    "trainer.save_freq=3",
    "trainer.logger=console",
]
PPO, SFT = ("-m", "verl.trainer.main_ppo"), ("-m", "verl.trainer.sft_trainer")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *SFT)
POOL = [f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1", "trainer.n_gpus_per_node=1"]


@dataclass(frozen=True)
class Run:
    """A training run: what follows `python`, and the words of the command line.

    `attempts`: how often a comparison may start it until it is as recorded, for runs whose course depends on time.
    """

    words: list[str]
    program: tuple[str, ...] = PPO
    attempts: int = 1


def grpo(*words: str, attempts: int = 1) -> Run:
    """A GRPO run: the common words, then `words`."""
    return Run([*BASE, *words], attempts=attempts)


RUNS: dict[str, Run] = {
    "grpo": grpo(),
    "grpo_four_mini_batches": grpo(f"{ACTOR}.ppo_mini_batch_size=1", f"{ACTOR}.clip_ratio=0.02"),
    "kl_in_loss": grpo(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.entropy_coeff=0.01"),
    "kl_in_reward": grpo(
        "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_ctrl.type=adaptive"
    ),
    "lora": grpo(f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8", f"{ACTOR}.use_kl_loss=True"),
    "dr_grpo": grpo(
        "algorithm.norm_adv_by_std_in_grpo=False",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        f"{ACTOR}.ppo_mini_batch_size=2",
    ),
    "correction": grpo(
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_is_threshold=1.001",
        f"{CORRECTION}.rollout_rs=token_k1",
        f"{CORRECTION}.rollout_rs_threshold=0.997_1.003",
        f"{ROLLOUT}.dtype=bfloat16",
        f"{ACTOR}.ppo_mini_batch_size=2",
    ),
    "correction_bypassed": grpo(
        f"{CORRECTION}.bypass_mode=True",
        f"{CORRECTION}.rollout_is=sequence",
        f"{ACTOR}.ppo_mini_batch_size=2",
    ),
    "sampling_and_micro_batches": grpo(
        f"{ROLLOUT}.temperature=0.7",
        f"{ROLLOUT}.top_p=0.9",
        f"{ROLLOUT}.top_k=20",
        f'{ROLLOUT}.stop=["a"]',
        f"{ROLLOUT}.max_num_seqs=5",
        f"{ACTOR}.use_dynamic_bsz=False",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        f"{ACTOR}.optim.lr_warmup_steps=2",
        f"{ACTOR}.grad_clip=0.1",
    ),
    "validation": grpo(
        "trainer.val_before_train=True",
        "trainer.test_freq=1",
        f"{ROLLOUT}.val_kwargs.n=3",
        f"{ROLLOUT}.val_kwargs.do_sample=True",
        f"{ROLLOUT}.val_kwargs.temperature=0.8",
        "trainer.log_val_generations=2",
        "trainer.rollout_data_dir={run}/rollouts",
        "trainer.validation_data_dir={run}/validations",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
    ),
    "plugin": grpo(
        f"{MODEL}.external_lib=frozen_plugin",
        "algorithm.adv_estimator=frozen_median",
        f"{ACTOR}.policy_loss.loss_mode=frozen_soft_clip",
        f"{ACTOR}.ppo_mini_batch_size=2",
    ),
    "experts": grpo(f"{MODEL}.path={{inputs}}/models/qwen3_moe", f"{ACTOR}.ppo_mini_batch_size=2"),
    "bf16": Run([*(w for w in BASE if "fsdp_config.dtype" not in w), f"{ACTOR}.ppo_mini_batch_size=2"]),
    "sft": Run(SFT_BASE, SFT),
    "sft_lora": Run([*SFT_BASE, "model.lora_rank=4", "model.lora_alpha=8"], SFT),
    "sft_two_ranks": Run([*(w for w in SFT_BASE if "n_gpus_per_node" not in w), "trainer.n_gpus_per_node=2"], TORCHRUN),
    "ray_two_ranks": grpo("trainer.n_gpus_per_node=2", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.ppo_mini_batch_size=2"),
    "ray_two_ranks_share_rows": grpo(
        "trainer.n_gpus_per_node=2", f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{MODEL}.lora_rank=4"
    ),
    "vllm": grpo(
        f"{MODEL}.path={{inputs}}/models/qwen3_vllm", f"{ROLLOUT}.name=vllm", f"{ACTOR}.ppo_mini_batch_size=2"
    ),
    # Sampling is much faster than training here, so no push finds a response half written, unless the machine is busy.
    "asynchronous": grpo(*POOL, "trainer.max_staleness=1", f"{CORRECTION}.rollout_is=token", attempts=3),
    "asynchronous_still": grpo(*POOL, "trainer.max_staleness=1", f"{ACTOR}.optim.lr=0", attempts=3),
}

# What tests/contract makes of a user's command so that it fits a small machine.
SHRUNK = [
    f"{MODEL}.path={{inputs}}/models/qwen3",
    "data.train_files={inputs}/train.parquet",
    "data.val_files={inputs}/val.parquet",
    "custom_reward_function.path={inputs}/reward.py",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ROLLOUT}.name=native",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.total_training_steps=2",
]

# Words after BASE (main_ppo).
LINES: dict[str, list[str]] = {
    "nothing": [],
    "later wins": ["trainer.seed=1", "trainer.seed=2"],
    "plus on a known key": ["+data.train_batch_size=8"],
    "plus in a map": [f"+{VLLM}.disable_mm_preprocessor_cache=True", f"+{VLLM}.a.b=[1,x]"],
    "plus on an unknown key": ["+trainer.foo=1"],
    "double plus": ["++trainer.foo.bar=1e-3", "++mine=x", "++data.train_batch_size=4"],
    "double plus below a value": ["++trainer.seed.x=1"],
    "tilde resets": ["trainer.total_epochs=3", "~trainer.total_epochs", "critic.optim.lr=1", "~critic.optim"],
    "tilde removes in a map": [f"+{VLLM}.a=1", f"+{VLLM}.b=2", f"~{VLLM}.a"],
    "tilde on an unknown key": ["~trainer.nothing"],
    "interpolation": [
        "trainer.experiment_name=run-${data.train_batch_size}",
        "data.seed=${oc.select:trainer.no,7}",
    ],
    "interpolation of a later key": [
        f"data.seed=${{{ACTOR}.ppo_mini_batch_size}}",
        f"{ACTOR}.ppo_mini_batch_size=2",
    ],
    "interpolation of nothing": ["trainer.seed=${no.such.key}"],
    "two typos": ["data.train_bach_size=8", "trainer.sead=1"],
    "typo without its prefix": ["actor.optim.lr=1"],
    "wrong types": [
        "trainer.seed=x",
        "data.shuffle=maybe",
        f"{ACTOR}.optim.lr=True",
        "data.train_batch_size=2.5",
    ],
    "no overrides": ["trainer.seed", "=1", "a b=1"],
    "unbalanced": ["trainer.experiment_name='abc"],
    "unbalanced brackets": ["trainer.experiment_name=[1,2"],
    "comma": ["trainer.experiment_name=x,y"],
    "sweep": ["trainer.seed=range(1,3)"],
    "a group is no value": ["algorithm.kl_ctrl=3"],
    "out of range": [
        "algorithm.gamma=1.1",
        f"{ACTOR}.clip_ratio_low=-0.1",
        f"{ACTOR}.clip_ratio_c=1",
        f"{ROLLOUT}.n=0",
    ],
    "sizes of nothing": ["data.train_batch_size=0", f"{ACTOR}.ppo_mini_batch_size=0"],
    "numbers": [
        "data.train_batch_size=1_6.0",
        "trainer.seed=+5",
        "data.max_prompt_length='80'",
        "trainer.total_epochs=1e2",
    ],
    "grouped digits": [
        "trainer.total_training_steps=1_000",
        f"{ACTOR}.optim.lr=.5",
        "trainer.watchdog_timeout=1e7",
    ],
    "booleans": ["data.shuffle=0", "trainer.balance_batch='True'", f"{ACTOR}.use_dynamic_bsz=true"],
    "nulls": [
        "trainer.total_training_steps=null",
        "data.val_files=None",
        "data.seed='null'",
        "trainer.wandb_proxy=none",
    ],
    "null where it may not be": ["trainer.total_epochs=null", "trainer.project_name=null"],
    "list": ['trainer.logger=["console","file"]', f"{ACTOR}.optim.betas=[0.9,'0.95']"],
    "list as a string": ['trainer.logger=\'["console","file"]\''],
    "list without brackets": ["trainer.logger=console,file"],
    "list of wrong items": [f"{ROLLOUT}.cudagraph_capture_sizes=[1,x]"],
    "mapping": [
        "data.apply_chat_template_kwargs={enable_thinking:False,x:{y:[1,2]}}",
        "algorithm.kl_ctrl={horizon:5}",
    ],
    "quotes and escapes": ["trainer.experiment_name='any, thing = here'", 'trainer.project_name="it\'s"'],
    "text stays": ["trainer.experiment_name=1e5", "trainer.project_name=0012"],
    "what hydra's lexer refuses": ["trainer.experiment_name=a(b) é;y#z", "trainer.project_name=b=c"],
    "home and variables": [
        "trainer.default_local_dir=~/run",
        "data.cache_dir=$HOME/cache",
        "trainer.rollout_data_dir='${HOME}/r'",
    ],
    "a variable that is not set": ["data.train_files=$NO_SUCH_THING/x.parquet"],
    "remote files": ["data.train_files=hdfs://h/p?x=1&y=2", "data.val_files=s3://bucket/$X/~/v.parquet"],
    "aliases": [
        f"{ACTOR}.optim.clip_grad=2.0",
        f"{MODEL}.lora.rank=8",
        f"{ACTOR}.optim.warmup_style=cosine",
        f"{ACTOR}.use_remove_padding=True",
        "reward.num_workers=2",
    ],
    "an alias and its key": ["critic.grad_clip=2.0", "critic.optim.clip_grad=3.0"],
    "old micro-batch sizes": [f"{ACTOR}.ppo_micro_batch_size=4", f"{ROLLOUT}.log_prob_micro_batch_size=4"],
    "value synonyms": [f"{ROLLOUT}.name=hf", "trainer.logger=[console,tracking]"],
    "group choices": [
        f"actor@{ACTOR}=dp_actor",
        "model_engine=dp",
        "data@data=legacy_data",
        "hydra.run.dir=/x",
    ],
    "a group choice of nothing": [f"actor@{ACTOR}=nothing"],
    "megatron": ["model_engine=megatron"],
    "keys without effect": [
        "data.pad_mode=x",
        "trainer.use_v1=True",
        f"{ROLLOUT}.mode=async",
        "data.val_batch_size=4",
        f"{ACTOR}.calculate_entropy=True",
        "data.return_raw_chat=True",
    ],
    "nothing reads these yet": [
        "data.gen_batch_size=3",
        "trainer.esi_redundant_time=5",
        f"{MODEL}.use_liger=False",
    ],
    "offload on one device": [
        f"{ACTOR}.fsdp_config.param_offload=True",
        "actor_rollout_ref.ref.fsdp_config.offload_policy=True",
        f"{ACTOR}.fsdp_config.model_dtype=bf16",
    ],
    "other values": [
        "trainer.device=gpu",
        f"{ROLLOUT}.name=vlm",
        "data.truncation=centre",
        "trainer.logger=[wandbb]",
    ],
    "unknown algorithms": ["algorithm.adv_estimator=grop", f"{ACTOR}.policy_loss.loss_mode=vanila"],
    "later algorithms": ["algorithm.adv_estimator=rloo", f"{ACTOR}.policy_loss.loss_mode=cispo"],
    "later features": [
        f"{ROLLOUT}.multi_turn.enable=True",
        "critic.enable=True",
        "algorithm.filter_groups.enable=True",
    ],
    "refused families": [
        "distillation.enabled=True",
        "transfer_queue.enable=True",
        f"{ROLLOUT}.over_sample_rate=0.5",
    ],
    "other systems' values": [f"{ROLLOUT}.name=trtllm", "critic.strategy=torchtitan"],
    "kl twice": [f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True"],
    "kl that nothing uses": ["algorithm.kl_ctrl.kl_coef=0.1"],
    "too long for the model": ["data.max_response_length=2000"],
    "limits of the sampler": [f"{ROLLOUT}.max_model_len=60", f"{ROLLOUT}.enable_chunked_prefill=False"],
    "sampling": [f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.do_sample=False", f"{ROLLOUT}.top_p=1.1"],
    "precision": [f"{ROLLOUT}.dtype=fp64", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bf61"],
    "parallel sizes": [
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        f"{ACTOR}.fsdp_config.fsdp_size=3",
    ],
    "two ranks": [
        "trainer.n_gpus_per_node=2",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
        f"{ACTOR}.use_dynamic_bsz=False",
    ],
    "too many devices": ["trainer.n_gpus_per_node=64", "trainer.nnodes=2"],
    "staleness in one process": ["trainer.max_staleness=1"],
    "staleness with a pool": [*POOL, "trainer.max_staleness=2"],
    "uneven mini-batches": [
        f"{ACTOR}.ppo_mini_batch_size=3",
        f"{ACTOR}.ppo_epochs=2",
        "trainer.total_epochs=3",
    ],
    "too few rows": ["data.train_batch_size=25"],
    "fewer rows": ["data.train_max_samples=9", "data.val_max_samples=3", "trainer.total_training_steps=null"],
    "files that are not there": [
        "custom_reward_function.path=/no/such/file.py",
        "data.val_files=/no/such.parquet",
    ],
    "a model that is not there": [f"{MODEL}.path=/no/such"],
    "resume from nothing": ["trainer.resume_mode=resume_path"],
    "lora": [f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj,nothing]"],
    "lora without a rank": [f"{MODEL}.exclude_modules=[x]", f"{MODEL}.target_modules=all-linear"],
    "profiling without steps": ["global_profiler.tool=torch"],
    "overlong buffer": ["reward_model.reward_kwargs.overlong_buffer_cfg={enable:True,len:5}"],
    "vllm": [f"{ROLLOUT}.name=vllm", f"+{VLLM}.max_num_seq=4", f"+{VLLM}.swap_space=4"],
    "vllm arguments": [
        f"{ROLLOUT}.name=vllm",
        f"+{VLLM}.swap_space=4",
        f"{ROLLOUT}.multi_stage_wake_up=True",
    ],
    "plug-in": [f"{MODEL}.external_lib=frozen_plugin", "algorithm.adv_estimator=frozen_median"],
    "a plug-in that is not there": [f"{MODEL}.external_lib=no_such_plugin"],
    "a file": ["--config-path={inputs}", "--config-name=small"],
    "a file that is not there": ["--config-name=nothing"],
}

# Whole command lines: the module, then all words.
BARE: dict[str, tuple[str, list[str]]] = {
    "ppo": ("verl.trainer.main_ppo", []),
    "ppo megatron": ("verl.trainer.main_ppo", ["--config-name=ppo_megatron_trainer"]),
    "sft": ("verl.trainer.sft_trainer", []),
    "sft small": ("verl.trainer.sft_trainer", SFT_BASE),
    "sft wrong": ("verl.trainer.sft_trainer", [*SFT_BASE, "optim.lr=x", "data.train_bach_size=1"]),
    "sft aliases": (
        "verl.trainer.sft_trainer",
        [
            *SFT_BASE,
            "model.partial_pretrain=/no/such",
            "optim.clip_grad=2",
            "ulysses_sequence_parallel_size=1",
        ],
    ),
    "sft too few rows": ("verl.trainer.sft_trainer", [*SFT_BASE, "data.train_batch_size=28"]),
    "sft megatron": ("verl.trainer.sft_trainer", [*SFT_BASE, "engine.strategy=megatron"]),
    "fsdp sft": ("verl.trainer.fsdp_sft_trainer", SFT_BASE),
}
