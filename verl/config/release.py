"""What this release does not have yet: a later release deletes rows here, and nothing else changes.

`FEATURES` are problems of the configuration. What stands under `rules/machine.py` (engines, more than one device,
vision) counts as "this machine lacks", so that a command written for a cluster passes its check up to the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_DEVICES = 1
"""Training devices of one run."""
ESTIMATORS = ("grpo", "grpo_vectorized")
POLICY_LOSSES = ("vanilla",)
ENGINES = ("native",)
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
_CORRECTION = "algorithm.rollout_correction"
FEATURES: tuple[Feature, ...] = (
    Feature("actor_rollout_ref.model.lora_rank", _positive, "LoRA", "set it to 0"),
    Feature("actor_rollout_ref.model.lora_adapter_path", _given, "LoRA", "leave it null"),
    Feature("model.lora_rank", _positive, "LoRA", "set it to 0"),
    Feature("model.lora_adapter_path", _given, "LoRA", "leave it null"),
    Feature("actor_rollout_ref.model.tiled_mlp.enabled", _true, "the MLP in slices", "set it to False"),
    Feature("actor_rollout_ref.model.use_liger", _true, "liger kernels", "set it to False"),
    Feature(f"{_ROLLOUT}.multi_turn.enable", _true, "tools and turns", "set it to False"),
    Feature(f"{_ROLLOUT}.nnodes", _positive, "a pool of its own for sampling", "set it to 0"),
    Feature(f"{_ROLLOUT}.quantization", _given, "quantised sampling", "leave it null"),
    Feature(f"{_ROLLOUT}.prometheus.enable", _true, "engine metrics over HTTP", "set it to False"),
    Feature(f"{_ROLLOUT}.trace.backend", _given, "traces", "leave it null"),
    Feature("critic.enable", _true, "the critic", "use algorithm.adv_estimator=grpo, which needs none"),
    Feature("algorithm.filter_groups.enable", _true, "dynamic sampling", "set it to False"),
    Feature("algorithm.use_pf_ppo", _true, "PF-PPO", "set it to False"),
    Feature(
        f"{_CORRECTION}.rollout_is", _given, "importance weights", "leave it null; the metrics are logged"
    ),
    Feature(
        f"{_CORRECTION}.rollout_rs", _given, "rejection of answers", "leave it null; the metrics are logged"
    ),
    Feature(f"{_CORRECTION}.bypass_mode", _true, "bypass mode", "set it to False"),
    Feature("reward_model.enable", _true, "reward models", "score with custom_reward_function.path"),
    Feature(
        "reward_manager.source",
        lambda value: value == "importlib",
        "a manager class of your own",
        "score with custom_reward_function.path",
    ),
    Feature("trainer.max_staleness", _positive, "asynchronous training", "set it to 0"),
    Feature("skip.rollout.enable", _true, "replay of recorded samples", "set it to False"),
    Feature("global_profiler.tool", _given, "profiling", "leave it null; timings are in metrics.jsonl"),
)
