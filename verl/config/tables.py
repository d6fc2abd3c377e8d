"""Names that are not the schema's own: renamed keys, keys without effect, keys that are refused, value synonyms."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_ARR = r"actor_rollout_ref"


@dataclass(frozen=True, slots=True)
class Rename:
    """A spelling that is also accepted: `pattern` matched at the start of the path, replaced by `canonical`."""

    pattern: re.Pattern[str]
    canonical: str


def _rename(pattern: str, canonical: str) -> Rename:
    return Rename(re.compile(f"(?:{pattern})(?=\\.|$)"), canonical)


_EVERYWHERE = (
    _rename(r"(.*\boptim)\.(?:warmup_style|lr_scheduler|lr_decay_style)", r"\1.lr_scheduler_type"),
    _rename(r"(.*\bmodel)\.lora\.(rank|alpha|adapter_path)", r"\1.lora_\2"),
    _rename(r"(.*\bmodel)\.lora\.(target_modules|exclude_modules)", r"\1.\2"),
    _rename(r"ray_init", "ray_kwargs.ray_init"),
)

RENAMES: dict[str, tuple[Rename, ...]] = {
    "ppo": (
        _rename(r"reward\.reward_manager\.(source|name|module)", r"reward_manager.\1"),
        _rename(r"reward_model\.reward_loop_source", "reward_manager.source"),
        _rename(r"reward_model\.reward_loop_class_name", "reward_manager.name"),
        _rename(r"reward_model\.reward_loop_module_path", "reward_manager.module.path"),
        _rename(r"reward\.custom_reward_function", "custom_reward_function"),
        _rename(r"reward\.reward_model\.model_path", "reward_model.model.path"),
        _rename(
            r"reward\.reward_model\.(enable|enable_resource_pool|nnodes|n_gpus_per_node|rollout)",
            r"reward_model.\1",
        ),
        _rename(r"(?:reward\.)?sandbox_fusion", "reward_model.sandbox_fusion"),
        _rename(
            r"reward\.(num_workers|reward_kwargs|timeout|max_\w+|estimated_tokens_per_request)",
            r"reward_model.\1",
        ),
        _rename(r"critic\.(?:fsdp|fsdp_config)", "critic.model.fsdp_config"),
        _rename(rf"({_ARR}\.actor|critic)\.optim\.(?:clip_grad|grad_clip)", r"\1.grad_clip"),
        _rename(
            rf"{_ARR}\.actor\.fsdp_config\.ulysses_sequence_parallel_size",
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        ),
        _rename(
            rf"{_ARR}\.ref\.fsdp_config\.ulysses_sequence_parallel_size",
            "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
        ),
        _rename(rf"{_ARR}\.actor\.(use_remove_padding|use_fused_kernels)", r"actor_rollout_ref.model.\1"),
        _rename(rf"{_ARR}\.rollout\.skip_rollout", "skip.rollout.enable"),
        _rename(rf"{_ARR}\.rollout\.skip_dump_dir", "skip.rollout.dump_dir"),
        *_EVERYWHERE,
    ),
    "sft": (
        _rename(r"model\.partial_pretrain", "model.path"),
        _rename(r"model\.strategy", "engine.strategy"),
        _rename(r"(?:engine\.)?ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size"),
        _rename(r"model\.fsdp_config\.(?:cpu_offload|offload_params)", "engine.param_offload"),
        _rename(r"model\.fsdp_config", "engine"),
        _rename(r"data\.multiturn\.(messages_key|tools_key|enable_thinking_key)", r"data.\1"),
        _rename(r"use_remove_padding", "model.use_remove_padding"),
        _rename(r"optim\.clip_grad", "optim.grad_clip"),
        *_EVERYWHERE,
    ),
    "eval": _EVERYWHERE,
    "generation": _EVERYWHERE,
}

GLOBAL_MICRO = re.compile(
    r"(actor_rollout_ref\.actor\.ppo_micro_batch_size|actor_rollout_ref\.(?:ref|rollout)\.log_prob_micro_batch_size"
    r"|critic\.(?:ppo|forward)_micro_batch_size|data\.micro_batch_size)"
)
"""Deprecated: a micro-batch size over all devices. The canonical key ends in `_per_gpu`."""

VALUE_SYNONYMS: dict[str, dict[str, str]] = {
    "algorithm.adv_estimator": {"reinforce": "reinforce_plus_plus"},
    "actor_rollout_ref.rollout.name": {"hf": "native"},
    "rollout.name": {"hf": "native"},
    "reward_model.rollout.name": {"hf": "native"},
    "reward_model.reward_manager": {"limited": "rate_limited"},
    "actor_rollout_ref.rollout.multi_turn.format": {"qwen": "hermes"},
    "trainer.logger": {"tracking": "wandb"},
}

MEGATRON_MODULES = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_q": ["q_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}


def _paths(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{p})" for p in patterns))


_MODEL_RUNS = "the reward model runs in the sampling engine"
NO_EFFECT: tuple[tuple[re.Pattern[str], str], ...] = (
    (_paths(r"(.*\.)?_target_", r"hydra(\..*)?", r"data\.multiturn\.enable"), "not needed"),
    (
        _paths(r"data\.pad_mode", r".*\.pad_to_length\w*", r"(.*\.)?padding_mode"),
        "sequences are packed without padding; results are the same",
    ),
    (
        _paths(r"trainer\.master_(addr|port)"),
        "ranks find each other through Ray or torchrun; for many nodes start Ray on each",
    ),
    (_paths(r"(actor_rollout_ref\.actor|critic)\.sync_gradients"), "gradients are always synchronised"),
    (
        _paths(
            r"trainer\.(use_legacy_worker_impl|use_v1)",
            r"reward_model\.(use_reward_loop|launch_reward_fn_async)",
        ),
        "one implementation; rewards always overlap sampling",
    ),
    (_paths(r"(.*\.)?rollout\.mode"), "one asynchronous engine interface; `sync` gives the same answers"),
    (
        _paths(
            r".*\brollout\.layered_summon",
            r".*\b(entropy_checkpointing|entropy_from_logits_with_chunking|entropy_from_logits_chunk_size)",
            r"actor_rollout_ref\.actor\.calculate_entropy",
        ),
        "weights are streamed and entropy is chunked always",
    ),
    (_paths(r"data\.val_batch_size"), "validation is one stream, scheduled by the engine"),
    (
        _paths(r"data\.(return_raw_chat|return_full_prompt|return_raw_input_ids|return_multi_modal_inputs)"),
        "all forms are available to plugins",
    ),
    (
        _paths(
            r".*\bmulti_turn\.(use_inference_chat_template|tokenization_sanity_check_mode|num_repeat_rollouts)"
        ),
        "tokens are never re-tokenised",
    ),
    (
        _paths(
            r".*\b(fsdp_config|engine)\.(use_orig_params|forward_only)",
            r".*\bfsdp_config\.(strategy|use_torch_compile)",
            r".*\b(actor|ref|critic)\.rollout_n",
            r"rollout_n",
        ),
        "set by the system",
    ),
    (
        _paths(
            r"reward_model\.(micro_batch_size\w*|max_length|forward_max_token_len_per_gpu|use_dynamic_bsz|strategy)",
            r"reward_model\.ulysses_\w+",
            r"reward_model\.model\.(use_remove_padding|fsdp_config(\..*)?|input_tokenizer)",
        ),
        _MODEL_RUNS,
    ),
    (_paths(r"reward_manager\.module\.name"), "the class is `reward_manager.name`"),
)
"""Keys that are accepted and change nothing, with the reason that is printed."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A known feature that is not here: its switch, the values that leave it off, what it is, what comes closest.

    Further keys below `family` are accepted while the switch is off.
    """

    family: str
    switch: str
    off: tuple[Any, ...]
    what: str
    closest: str


REFUSED: tuple[Refused, ...] = (
    Refused(
        "distillation",
        "enabled",
        (False, None),
        "distillation from a teacher",
        "supervised fine-tuning on the teacher's answers",
    ),
    Refused(
        r"(.*\.)?model\.mtp",
        "enable",
        (False, None),
        "multi-token prediction",
        "train without the extra heads",
    ),
    Refused(
        r"actor_rollout_ref\.actor\.qat",
        "enable",
        (False, None),
        "quantisation-aware training",
        "actor.fsdp_config.dtype=bfloat16",
    ),
    Refused(
        "transfer_queue",
        "enable",
        (False, None),
        "a transfer queue between processes",
        "leave it off: the driver holds the trajectories",
    ),
    Refused(
        r"actor_rollout_ref\.rollout\.disaggregation",
        "enabled",
        (False, None),
        "prefill and decode on separate devices",
        "rollout.nnodes for a pool of its own",
    ),
    Refused(
        r"(actor_rollout_ref|critic)(\.(actor|ref))?\.router_replay",
        "mode",
        ("disabled", None),
        "replay of expert routing",
        "algorithm.rollout_correction.rollout_is=token",
    ),
    Refused(
        r"actor_rollout_ref\.rollout\.agent\.custom_async_server",
        "path",
        (None, ""),
        "a server class of your own",
        "an agent loop of your own: rollout.agent.agent_loop_config_path",
    ),
)
REFUSED_KEYS: tuple[Refused, ...] = (
    Refused(
        r"actor_rollout_ref\.rollout\.enable_rollout_routing_replay",
        "",
        (False, None),
        "replay of expert routing",
        "algorithm.rollout_correction.rollout_is=token",
    ),
    Refused(
        r"actor_rollout_ref\.rollout\.over_sample_rate",
        "",
        (0, 0.0, None),
        "over-sampling of prompts",
        "algorithm.filter_groups.enable",
    ),
)
REFUSED_VALUES: dict[str, dict[str, tuple[str, str]]] = {
    "name": {"trtllm": ("TensorRT-LLM as sampling engine", "rollout.name=vllm or native")},
    "strategy": {
        "veomni": ("the VeOmni trainer", "strategy=fsdp2"),
        "torchtitan": ("the TorchTitan trainer", "strategy=fsdp2"),
        "automodel": ("the NeMo AutoModel trainer", "strategy=fsdp2"),
        "mindspeed": ("the MindSpeed trainer", "strategy=megatron"),
    },
    "backend": {"nixl": ("NIXL for the weight transfer", "rollout.checkpoint_engine.backend=nccl")},
}
"""By the last part of the key: values of other systems, what they are, what comes closest."""

GROUP_CHOICES: dict[str, dict[str, str]] = {
    "actor_rollout_ref.actor": {"dp_actor": "fsdp", "megatron_actor": "megatron"},
    "actor_rollout_ref.ref": {"dp_ref": "fsdp", "megatron_ref": "megatron"},
    "critic": {"dp_critic": "fsdp", "megatron_critic": "megatron"},
    "engine": {"fsdp": "fsdp", "fsdp2": "fsdp2", "megatron": "megatron"},
}
"""`group@package=choice`: what `strategy` becomes."""

PLAIN_CHOICES = {
    "data": ("legacy_data",),
    "actor_rollout_ref.model": ("hf_model",),
    "model": ("hf_model",),
    "actor_rollout_ref.rollout": ("rollout",),
    "critic.model": ("hf_model",),
    "reward_model": ("dp_reward_loop", "dp_reward_model", "megatron_reward_loop", "megatron_reward_model"),
    "optim": ("fsdp", "megatron"),
}
"""Group choices that change nothing: there is one implementation of the group."""

MODEL_ENGINES = {"dp": "fsdp", "fsdp": "fsdp", "megatron": "megatron"}

BUILT_IN = {
    "ppo_trainer": ("ppo", None),
    "ppo_megatron_trainer": ("ppo", "megatron"),
    "sft_trainer": ("sft", None),
    "sft_trainer_engine": ("sft", None),
    "evaluation": ("eval", None),
    "generation": ("generation", None),
}
"""Configurations known by name: their entry point, the strategy they set."""
DEFAULT_NAME = {"ppo": "ppo_trainer", "sft": "sft_trainer", "eval": "evaluation", "generation": "generation"}


def canonical(path: str, entry: str) -> str:
    """The schema's spelling of a path (the path itself if it is no old name)."""
    for rename in RENAMES[entry]:
        found = rename.pattern.match(path)
        if found:
            return found.expand(rename.canonical) + path[found.end() :]
    return path


def no_effect(path: str) -> str | None:
    """Why a key changes nothing, or None."""
    return next((reason for pattern, reason in NO_EFFECT if pattern.fullmatch(path)), None)
