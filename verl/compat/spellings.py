"""Names and values of the public system beside the schema's, as data for `verl.config`: old spellings, keys without
effect, group choices, configurations known by name, what this release does not have."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from verl.compat import asynchronous
from verl.config import command_line
from verl.config.matching import Spellings
from verl.config.release import OFF, Absent

_EVERYWHERE = {
    "*.optim.{warmup_style, lr_scheduler, lr_decay_style}": r"\1optim.lr_scheduler_type",
    "*.model.lora.{rank, alpha, adapter_path}": r"\1model.lora_\2",
    "*.model.lora.{target_modules, exclude_modules}": r"\1model.\2",
    "ray_init": "ray_kwargs.ray_init",
    # Backends that are FSDP2 under another name: their group, then their keys in it.
    "*.{veomni, torchtitan, automodel, automodel_config}": r"\1fsdp_config",
    "*.{fsdp_config, engine}.turbo_config.{distributed, memory}": r"\1\2",
    "*.{fsdp_config, engine}.tp_size": r"\1\2.tensor_parallel_size",
    "*.{fsdp_config, engine}.ep_size": r"\1\2.expert_parallel_size",
    "*.{fsdp_config, engine}.{data_parallel_shard_size, fully_shard_parallel_size}": r"\1\2.fsdp_size",
    "*.{fsdp_config, engine}.enable_full_shard": r"\1\2.reshard_after_forward",
    "*.{fsdp_config, engine}.enable_fsdp_offload": r"\1\2.offload_policy",
    "engine.ulysses_parallel_size": "engine.ulysses_sequence_parallel_size",
    "engine.{activation_checkpoint, activation_checkpointing, recompute}": "model.enable_gradient_checkpointing",
    "actor_rollout_ref.actor.{fsdp_config, megatron}.{activation_checkpoint, activation_checkpointing, recompute}": (
        "actor_rollout_ref.model.enable_gradient_checkpointing"
    ),
    "critic.{model.fsdp_config, megatron}.{activation_checkpoint, activation_checkpointing, recompute}": (
        "critic.model.enable_gradient_checkpointing"
    ),
    "*.optim.min_lr_factor": r"\1optim.min_lr_ratio",
    "*.optim.name": r"\1optim.optimizer",
    "*.optim.eps": r"\1optim.override_optimizer_config.eps",
    "*.optim.muon_{momentum, nesterov, scale_mode, extra_scale_factor, match_adamw_update_rms}": (
        r"\1optim.override_optimizer_config.\2"
    ),
    "*.optim.muon_num_ns_steps": r"\1optim.override_optimizer_config.ns_steps",
    # Megatron-lite's short names.
    "*.{megatron, engine}.tp": r"\1\2.tensor_model_parallel_size",
    "*.{megatron, engine}.pp": r"\1\2.pipeline_model_parallel_size",
    "*.{megatron, engine}.vpp": r"\1\2.virtual_pipeline_model_parallel_size",
    "*.{megatron, engine}.cp": r"\1\2.context_parallel_size",
    "*.{megatron, engine}.ep": r"\1\2.expert_model_parallel_size",
    "*.{megatron, engine}.etp": r"\1\2.expert_tensor_parallel_size",
    "*.{megatron, engine}.attention_backend_override": r"\1\2.override_transformer_config.attention_backend",
}
RENAMES: dict[str, dict[str, str]] = {
    "ppo": {
        "reward.reward_manager.{source, name, module}": r"reward_manager.\1",
        "reward_model.overlong_buffer": "reward_model.reward_kwargs.overlong_buffer_cfg",
        "{actor_rollout_ref.actor, critic}.checkpoint.contents": r"\1.checkpoint.save_contents",
        "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
        "reward_model.reward_loop_source": "reward_manager.source",
        "reward_model.reward_loop_class_name": "reward_manager.name",
        "reward_model.reward_loop_module_path": "reward_manager.module.path",
        "reward.custom_reward_function": "custom_reward_function",
        "{reward.reward_model.model_path, reward_model.model_path}": "reward_model.model.path",
        "{reward.reward_model.inference, reward_model.inference}": "reward_model.rollout",
        "reward.reward_model.{enable, enable_resource_pool, nnodes, n_gpus_per_node, rollout}": r"reward_model.\1",
        "{reward.sandbox_fusion, sandbox_fusion}": "reward_model.sandbox_fusion",
        "reward.{num_workers, reward_kwargs, timeout, max_*, estimated_tokens_per_request}": r"reward_model.\1",
        "critic.{fsdp, fsdp_config}": "critic.model.fsdp_config",
        "{actor_rollout_ref.actor, critic}.optim.{clip_grad, grad_clip}": r"\1.grad_clip",
        "actor_rollout_ref.{actor, ref}.fsdp_config.{ulysses_sequence_parallel_size, ulysses_parallel_size}": (
            r"actor_rollout_ref.\1.ulysses_sequence_parallel_size"
        ),
        "critic.model.{fsdp_config.ulysses_parallel_size, ulysses_sequence_parallel_size}": (
            "critic.ulysses_sequence_parallel_size"
        ),
        "{actor_rollout_ref.actor, actor_rollout_ref.ref, critic}.engine": r"\1.megatron",
        "{actor_rollout_ref.actor, actor_rollout_ref.ref, critic}.mindspeed": r"\1.megatron.mindspeed",
        "actor_rollout_ref.actor.{tau_pos, tau_neg}": r"actor_rollout_ref.actor.policy_loss.\1",
        "actor_rollout_ref.rollout.enable_sleep_mode": "actor_rollout_ref.rollout.free_cache_engine",
        "actor_rollout_ref.model.lora.fully_sharded_loras": (
            "actor_rollout_ref.rollout.engine_kwargs.vllm.fully_sharded_loras"
        ),
        "skip.{async_rollout, rollout_tq}": "skip.rollout",
        "actor_rollout_ref.{actor, ref}.model_engine": r"actor_rollout_ref.\1.strategy",
        "actor_rollout_ref.actor.{use_remove_padding, use_fused_kernels}": r"actor_rollout_ref.model.\1",
        "actor_rollout_ref.{router_replay, actor.fsdp_config.router_replay, actor.megatron.router_replay, "
        "actor.veomni.router_replay}": "actor_rollout_ref.actor.router_replay",
        "actor_rollout_ref.rollout.skip_rollout": "skip.rollout.enable",
        "actor_rollout_ref.rollout.skip_dump_dir": "skip.rollout.dump_dir",
        "rollout.{nnodes, n_gpus_per_node, n}": r"actor_rollout_ref.rollout.\1",
        "rollout.total_epochs": "trainer.total_epochs",
        "async_training.partial_rollout": "trainer.partial_rollout",
        "{rollout, async_training}.{concurrent_samples_per_replica, max_concurrent_samples_per_replica}": (
            "actor_rollout_ref.rollout.max_num_seqs"
        ),
        "{actor_rollout_ref.actor, async_training}.use_rollout_log_probs": "algorithm.rollout_correction.bypass_mode",
        **_EVERYWHERE,
    },
    "sft": {
        "model.partial_pretrain": "model.path",
        "model.strategy": "engine.strategy",
        "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
        "model.fsdp_config.{cpu_offload, offload_params}": "engine.param_offload",
        "model.fsdp_config": "engine",
        "data.multiturn.{messages_key, tools_key, enable_thinking_key}": r"data.\1",
        "use_remove_padding": "model.use_remove_padding",
        "optim.clip_grad": "optim.grad_clip",
        "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
        **_EVERYWHERE,
    },
    "eval": _EVERYWHERE,
    "generation": {
        "actor_rollout_ref.{model, rollout}": r"\1",  # main_generation_server's
        "data.train_files": "data.path",
        **_EVERYWHERE,
    },
}
"""By entry point: an old spelling, and the schema's, in which \\1 and \\2 stand for the glob's variable parts."""

FSDP2_NAMES = ("veomni", "fsdp_turbo", "torchtitan", "automodel")
"""Training backends of the public system that are FSDP2 with other spellings."""

VALUE_SYNONYMS: dict[str, dict[str, str]] = {
    "algorithm.adv_estimator": {"reinforce": "reinforce_plus_plus"},
    "*.rollout.name": {"hf": "native"},
    "reward_model.reward_manager": {"limited": "rate_limited"},
    "actor_rollout_ref.rollout.multi_turn.format": {"qwen": "hermes"},
    "trainer.logger": {"tracking": "wandb"},
    "custom_reward_function.name": {"None": "compute_score", "null": "compute_score"},
    "*.strategy": {"dp": "fsdp", **dict.fromkeys(FSDP2_NAMES, "fsdp2"), "mlite": "megatron"},
    "*.optim.optimizer": {"muon": "Muon"},
    "*.reshard_after_forward": {"default": "True", "always": "True", "never": "False"},
    "*.model.enable_gradient_checkpointing": {"selective": "True", "full": "True", "none": "False"},
}
MEGATRON_MODULES = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_q": ["q_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}

NO_EFFECT: dict[str, str] = {
    "{*._target_, hydra, data.multiturn.enable}": "not needed",
    "{transfer_queue, *.model.mtp.{method, speculative_*}, *.rollout.mtp, *.router_replay.{record_file, replay_file}, "
    "*.qat, actor_rollout_ref.partition, *.rollout.disaggregation, *.rollout.trace, "
    "global_profiler.global_tool_config, actor_rollout_ref.rollout.agent.custom_async_server}": "of what is off",
    "{data.pad_mode, *.pad_to_length*, *.padding_mode, *.megatron.use_remove_padding, engine.use_remove_padding, "
    "*.megatron.{pad_bshd_to_minibatch_max, max_seqlen_per_dp_cp_rank}}": (
        "sequences are packed without padding; results are the same"
    ),
    "trainer.master_{addr, port}": "ranks meet through Ray or torchrun; for many nodes start Ray on each",
    "{actor_rollout_ref.actor, critic}.sync_gradients": "gradients are always synchronised",
    "{trainer.use_legacy_worker_impl, trainer.use_v1, reward_model.use_reward_loop, "
    "reward_model.launch_reward_fn_async}": ("one implementation; rewards always overlap sampling"),
    "*.rollout.mode": "one asynchronous engine interface; `sync` gives the same responses",
    "{*.rollout.layered_summon, *.entropy_checkpointing, *.entropy_from_logits_with_chunking, "
    "*.entropy_from_logits_chunk_size, actor_rollout_ref.actor.calculate_entropy}": (
        "weights are streamed and entropy is chunked always"
    ),
    "actor_rollout_ref.actor.state_masking": "tokens that the policy did not write never have a gradient",
    "data.val_batch_size": "validation is one stream, scheduled by the engine",
    "data.{return_raw_chat, return_full_prompt, return_raw_input_ids, return_multi_modal_inputs}": (
        "all forms are available to plugins"
    ),
    "*.multi_turn.{tokenization_sanity_check_mode, num_repeat_rollouts}": ("tokens are never re-tokenised"),
    "{*.megatron.forward_only, *.fsdp_config.use_orig_params, *.fsdp_config.forward_only, *.engine.use_orig_params, "
    "*.engine.forward_only, "
    "*.fsdp_config.strategy, *.fsdp_config.use_torch_compile, *.rollout_n}": "set by the system",
    "reward_model.{micro_batch_size*, max_length, forward_max_token_len_per_gpu, use_dynamic_bsz, strategy, ulysses_*, "
    "model.use_remove_padding, model.fsdp_config, model.input_tokenizer}": (
        "the reward model scores in packed batches on the policy's devices"
    ),
    "reward_manager.module.name": "the class is `reward_manager.name`",
    "distillation.{teacher_backend, teacher_chunk_size, teacher_fsdp_config}": (
        "every teacher is a training engine without an optimizer, set by actor_rollout_ref.ref"
    ),
    "async_training.{checkpoint_engine, compute_prox_log_prob}": (
        "see rollout.checkpoint_engine, and algorithm.rollout_correction for the old log-probs"
    ),
    "async_training.dynamic_schedule_*": "samplers on the trainers' devices begin with new weights and stop when a "
    "batch is there",
    "async_training.parallel_validate_and_rollout": "validation is one stream beside the groups in flight",
    "*.{fsdp_config, engine}.{*_implementation, attn_type, backend_config, ckpt_manager, data_parallel_mode, "
    "data_parallel_replicate_size, data_parallel_size, distributed_strategy, enable_compile, enable_reentrant, "
    "activation_gpu_limit, force_use_huggingface, init_device, max_seq_len, spmd_backend, fsdp_plan, ep_plan, cp_plan, "
    "turbo_config, basic_modules, moe_config, mp_*, dp_replicate_size, defer_fsdp_grad_sync, activation_offload_*, "
    "enable_async_activation_offload, expert_fully_shard_parallel_size, use_no_sync_for_gradient_accumulation}": (
        "kernels and settings of that backend; FSDP2's are used"
    ),
    "{*.megatron, engine}.impl_cfg": "kernels of Megatron-lite; megatron-core's are used",
    "{*.fsdp_config, *.megatron, engine}.recompute_plan": "what is recomputed is every layer of the decoder",
    "actor_rollout_ref.ref.{optim, {fsdp_config, megatron}.{activation_checkpoint*, recompute}}": (
        "the reference is not trained"
    ),
    "*.megatron.{dist_checkpointing_prefix, dist_ckpt_optim_fully_reshardable, distrib_optim_*}": (
        "checkpoints are Hugging Face directories and resharded state"
    ),
    "{actor_rollout_ref.actor, actor_rollout_ref.ref, actor_rollout_ref.rollout, critic}.profiler.{tool, save_path, "
    "relocate_results, finish_hook_*}": "one profiler for all roles: global_profiler.*",
    "global_profiler.relocate_results": "profiles are written to save_path; nsys's, which Ray places, by "
    "finish_hook_cmd",
    "critic.nccl_timeout": "actor_rollout_ref.nccl_timeout counts for all process groups",
    "trainer.profile_interval": "global_profiler.steps chooses the steps",
    "*.mixed_precision": "compute is in dtype, sums over ranks in float32 (mixed_precision.{param, reduce}_dtype)",
    "*.optim.{init_lr_ratio, lr_start, lr_min, wd_incr_style, master_weight*, store_param_remainders, exp_avg_*, "
    "main_grads_dtype, use_precision_aware_optimizer, lr_decay_ratio, decay_type}": (
        "of another backend's optimizer; master weights and its state are float32"
    ),
    "*.optim.{muon_split_qkv, muon_tp_mode, muon_fp32_matmul_prec, use_layer_wise_distributed_optimizer}": (
        "Muon steps whole matrices, query, key and value each as one; weights and its state are sharded by FSDP2"
    ),
    "*.model.lora.{lora_A_init_method, lora_B_init_method, dropout_position, a2a_experimental, dtype, "
    "freeze_*}": "with LoRA only the adapter is trained; it starts as in peft",
}
"""Keys that are accepted and change nothing, with the reason that is printed."""
SILENT = ("not needed", "of what is off")
"""Reasons that are not worth a line."""
SWITCHES: dict[str, str] = {
    "transfer_queue.enable": "trajectories live on the driver, tensors travel by reference",
    "async_training.use_trainer_do_validate": "validation is sampled on the devices of the samplers",
}
"""Switches that change nothing, also where they are on."""


_ONE = (*OFF, "1", "-1")
_OWN = "*.{fsdp_config, engine}."
_SHARD = "set it to 1: fsdp_size=-1 saves the same memory"
_ROWS = "set it to 1: ulysses_sequence_parallel_size splits rows as well"


REFUSED = {
    "reward_model.{enable, model.path, weights}": Absent(
        "a reward model or weights of rewards outside training",
        "main_ppo with trainer.val_only=True and data.val_files",
    ),
    "*.qat.enable": Absent("quantisation-aware training", "actor.fsdp_config.dtype=bfloat16"),
    _OWN + "{pipeline_parallel_size, pp_size}": Absent("pipeline parallelism with FSDP2", _SHARD, _ONE),
    _OWN + "{context_parallel_size, cp_size}": Absent("context parallelism with FSDP2", _ROWS, _ONE),
    "*.rollout.moe_tensor_parallel_size": Absent("a size of its own for experts", "set it to 1", _ONE),
    _OWN + "enable_fp8": Absent("training in FP8", "dtype=bfloat16"),
    "*.{megatron, engine}.use_megatron_fsdp": Absent("Megatron's FSDP", "strategy=fsdp2"),
    _OWN + "load_checkpoint_path": Absent("weights from a place of the engine's own", "model.path"),
    "*.megatron.dynamic_context_parallel": Absent("context parallelism by length", "megatron.context_parallel_size"),
    "*.optim.muon_coefficient_type": Absent("other coefficients of Muon", "quintic", (*OFF, "quintic")),
    "*.optim.muon_scalar_optimizer": Absent("another optimizer beside Muon", "adam", (*OFF, "adam", "adamw")),
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module": Absent(
        "a way of weights of your own", "naive"
    ),
    "actor_rollout_ref.rollout.router_config_path": Absent("a router of your own", "an agent loop of your own"),
    "actor_rollout_ref.rollout.moe_load_balance_metrics_interval": Absent(
        "metrics of the experts' load", "actor.router_replay"
    ),
    "*.rollout.full_determinism": Absent("a switch for it", "trainer.seed, which seeds every response"),
    "critic.model.lora.merge": Absent("a sampler of values", "set it to False"),
    "data.balance_dp_token": Absent("balancing by tokens", "data.use_dynamic_bsz=True"),
    "*.model.lora.type": Absent("an adapter of another kind", "type=lora", (*OFF, "lora")),
    "*.model.lora.dropout": Absent("dropout in adapters", "set it to 0"),
    "trainer.checkpoint_callback_class": Absent("a callback for checkpoints", "trainer.default_hdfs_dir"),
    "async_training.hybrid_res_pool": Absent("a pool on a part of a node", "pools of whole nodes"),
    "actor_rollout_ref.rollout.disaggregation.enabled": Absent(
        "prefill and decode on separate devices", "rollout.nnodes for a pool of its own"
    ),
    "{actor_rollout_ref.ref, critic, critic.model, engine}.{router_replay, fsdp_config.router_replay, "
    "megatron.router_replay}.mode": Absent("replay of its routes", "disabled"),
    "actor_rollout_ref.rollout.agent.custom_async_server.path": Absent(
        "a server class of your own", "an agent loop of your own: rollout.agent.agent_loop_config_path"
    ),
    "actor_rollout_ref.rollout.use_fire_sampling": Absent("a hotter first token", "rollout.temperature"),
    "actor_rollout_ref.rollout.chat_scheduler": Absent(
        "a chat scheduler", "rollout.agent.default_agent_loop, or multi_turn.enable=True with tools"
    ),
    "trainer.remove_previous_ckpt_in_save": Absent(
        "removal of the checkpoint before", "trainer.max_actor_ckpt_to_keep=1"
    ),
    "data.chat_template": Absent("a template among the data's keys", "model.custom_chat_template"),
    "actor_rollout_ref.rollout.over_sample_rate": Absent("over-sampling", "algorithm.filter_groups.enable"),
}
"""Keys outside the schema that switch something on."""
_BACKENDS = ("dp", "megatron", "mlite", "mindspeed", *FSDP2_NAMES)
GROUP_CHOICES: dict[str, dict[str, str | None]] = {
    "actor_rollout_ref.actor": {f"{name}_actor": name for name in _BACKENDS},
    "actor_rollout_ref.ref": {f"{name}_ref": name for name in _BACKENDS},
    "critic": {f"{name}_critic": name for name in _BACKENDS},
    "engine": {name: name for name in ("fsdp", "fsdp2", *_BACKENDS[1:])},
    "model_engine": {name: name for name in ("fsdp", *_BACKENDS)},
    "data": {"legacy_data": None},
    "actor_rollout_ref.model": {"hf_model": None, "torchtitan_model": None},
    "model": {"hf_model": None},
    "actor_rollout_ref.rollout": {"rollout": None},
    "critic.model": {"hf_model": None},
    "reward_model": dict.fromkeys(
        ("dp_reward_loop", "dp_reward_model", "megatron_reward_loop", "megatron_reward_model")
    ),
    "optim": dict.fromkeys(("fsdp", "megatron", *FSDP2_NAMES)),
}
"""`group@package=choice`: what `strategy` becomes; None: nothing, there is one implementation of the group."""
_MEGATRON = {"actor_rollout_ref.actor.strategy": "megatron", "critic.strategy": "megatron"}
_POOL: dict[str, Any] = {
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 8,
}
_ONE_STEP_OFF = _POOL | {"trainer.max_staleness": 1}
_FULLY_ASYNC = _POOL | {
    "actor_rollout_ref.rollout.n": 4,
    "algorithm.rollout_correction.bypass_mode": True,
    "async_training.staleness_threshold": 0.1,
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.require_batches": 1,
    "data.train_batch_size": 0,
    "rollout.total_rollout_steps": 100,
}
CONFIGURATIONS: dict[str, tuple[str, Mapping[str, Any]]] = {
    **Spellings().configurations,
    "ppo_megatron_trainer": ("ppo", _MEGATRON),
    "fully_async_ppo_trainer": ("ppo", _FULLY_ASYNC),
    "fully_async_ppo_megatron_trainer": ("ppo", _FULLY_ASYNC | _MEGATRON),
    "one_step_off_ppo_trainer": ("ppo", _ONE_STEP_OFF),
    "one_step_off_ppo_megatron_trainer": ("ppo", _ONE_STEP_OFF | _MEGATRON),
    "sft_trainer_engine": ("sft", {}),
}
"""Configurations known by name: their entry point, the keys they set."""

PUBLIC = Spellings(
    renames=RENAMES,
    synonyms=VALUE_SYNONYMS,
    modules=MEGATRON_MODULES,
    no_effect=NO_EFFECT,
    silent=SILENT,
    switches=SWITCHES,
    refused=REFUSED,
    choices=GROUP_CHOICES,
    configurations=CONFIGURATIONS,
    computed=asynchronous.KEYS,
    settle=asynchronous.settle,
)
load = functools.partial(command_line.load, spellings=PUBLIC)
"""`verl.config.load` of arguments in these spellings."""
