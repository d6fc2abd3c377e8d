"""What this release does not have yet: a later release deletes rows here, and nothing else changes.

`FEATURES` are problems of the configuration. What stands under `rules/machine.py` (engines, more than one device,
vision) counts as "this machine lacks", so that a command written for a cluster passes its check up to the machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ESTIMATORS = ("grpo", "grpo_vectorized")
POLICY_LOSSES = ("vanilla",)
STRATEGIES = ("fsdp", "fsdp2")
LOGGERS = ("console", "file", "tensorboard", "wandb")
VISION = False
CLOSED_REGISTRIES = ("reward_model.reward_manager", "actor_rollout_ref.rollout.multi_turn.format")
"""Lists that take no names of one's own yet."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A key that switches on what is not here. `on` says which values do."""

    key: str
    on: Callable[[Any], bool]
    what: str
    instead: str


def _given(value: Any) -> bool:
    return value is not None and value != "" and value != []


def _true(value: Any) -> bool:
    return value is True


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


_ROLLOUT = "actor_rollout_ref.rollout"
FEATURES: tuple[Feature, ...] = (
    Feature("actor_rollout_ref.model.tiled_mlp.enabled", _true, "the MLP in slices", "set it to False"),
    Feature("actor_rollout_ref.model.use_liger", _true, "liger kernels", "set it to False"),
    Feature(f"{_ROLLOUT}.multi_turn.enable", _true, "tools and turns", "set it to False"),
    Feature(f"{_ROLLOUT}.quantization", _given, "quantised sampling", "leave it null"),
    Feature(f"{_ROLLOUT}.prometheus.enable", _true, "engine metrics over HTTP", "set it to False"),
    Feature(f"{_ROLLOUT}.trace.backend", _given, "traces", "leave it null"),
    Feature(
        f"{_ROLLOUT}.agent.agent_loop_config_path",
        _given,
        "agent loops listed in a file",
        "register the loop in a module of model.external_lib",
    ),
    Feature(
        "data.datagen.path", _given, "a generator of rows", "write the rows to a file of data.train_files"
    ),
    Feature("critic.enable", _true, "the critic", "use algorithm.adv_estimator=grpo, which needs none"),
    Feature("algorithm.filter_groups.enable", _true, "dynamic sampling", "set it to False"),
    Feature("algorithm.use_pf_ppo", _true, "PF-PPO", "set it to False"),
    Feature("reward_model.enable", _true, "reward models", "score with custom_reward_function.path"),
    Feature("skip.rollout.enable", _true, "replay of recorded samples", "set it to False"),
)

_HINTS = (
    "enable_chunked_prefill|enable_prefix_caching|cudagraph_capture_sizes|load_format"
    "|gpu_memory_utilization|scheduling_policy|disable_log_stats|skip_tokenizer_init|multi_stage_wake_up"
    "|calculate_log_probs|logprobs_mode"
)
UNREAD_BY: dict[str, tuple[re.Pattern[str], str]] = {
    "native": (
        re.compile(rf"(actor_rollout_ref\.)?rollout\.({_HINTS})"),
        "the native engine decides it by itself",
    ),
    "vllm": (
        re.compile(
            r"(actor_rollout_ref\.)?rollout\.(multi_stage_wake_up|disable_log_stats|calculate_log_probs)"
        ),
        "the vllm engine always does what is best here",
    ),
}
"""The same for keys that one engine reads and another does not, by the engine's name."""

UNREAD: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"(actor_rollout_ref\.)?rollout\.checkpoint_engine\.engine_kwargs"),
        "the ways that weights travel here take no arguments",
    ),
    (
        re.compile(r"(actor_rollout_ref\.)?rollout\.checkpoint_engine\.backend"),
        "weights travel through shared memory; only nodes that sample and do not train get a broadcast",
    ),
    (
        re.compile(r"(.*\.fsdp_config|engine)\.model_dtype"),
        "master weights and the optimizer's state are float32; the precision of computation is dtype beside it",
    ),
    (
        re.compile(
            r"(.*\.)?model\.(enable_activation_offload|fused_kernel_options\.impl_backend)"
            r"|(.*\.)?optim\.(lr_decay_steps|min_lr|lr_warmup_init|lr_wsd_.*|weight_decay_incr_style)"
            r"|data\.(gen_batch_size|dataloader_num_workers|num_workers|mm_processor_kwargs|image_patch_size)"
            r"|trainer\.esi_redundant_time"
        ),
        "not in this release, the run is as without",
    ),
)
"""Keys that are accepted and nothing reads yet, with what is said when one is set to something else."""

UNREAD_ALONE: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"(.*\.fsdp_config|engine)\.(offload_policy|reshard_after_forward"
            r"|forward_prefetch|mixed_precision\.(reduce|buffer)_dtype|wrap_policy\..*)"
            r"|engine\.(param|optimizer)_offload"
        ),
        "on one device nothing is sharded or kept in host memory during a step",
    ),
)
"""Keys that only runs on more than one device read."""

UNREAD_TOGETHER: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"(actor_rollout_ref\.)?rollout\.checkpoint_engine\.update_weights_bucket_megabytes"
            r"|actor_rollout_ref\.actor\.fsdp_config\.param_offload"
        ),
        "in one process the native engine uses the trainer's own weights, which are not sent and stay where they are",
    ),
)
"""Keys that nothing reads where trainer and native sampler share one device."""
