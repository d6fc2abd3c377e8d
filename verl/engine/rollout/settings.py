"""What sampling engines read from the configuration of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.config import Config
from verl.engine.registry import ROLLOUT_ENGINES, placement

if TYPE_CHECKING:
    from verl.engine.training.lora import LoraSettings
    from verl.platform import Platform


def longest(config: Config) -> int:
    """Most tokens of prompt and response together."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    return int(rollout.max_model_len or data.max_prompt_length + data.max_response_length)


def trainer_dtype(config: Config, platform: Platform) -> str:
    """The data type that the policy is trained in, as torch prints it."""
    from verl.engine.training.settings import compute_dtype

    return str(compute_dtype(placement(config.actor_rollout_ref.actor), platform))


def moving_adapter(config: Config) -> LoraSettings | None:
    """The adapter's settings if a sampler with weights of its own holds base and adapter apart, so that a sync is the
    adapter's alone.

    None without LoRA, and where the engine cannot add the adapter itself (at all, experts, output layer) or its
    `engine_kwargs` say enable_lora=False: then it is sent merged weights.
    """
    from verl.engine.training.lora import LoraSettings
    from verl.models.layers import expert_count
    from verl.models.pretrained import load_config

    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    engine = ROLLOUT_ENGINES[rollout.name].capabilities
    settings = LoraSettings.of(model, str(model.path))
    if (
        settings is None
        or not engine.lora
        or (rollout.engine_kwargs.get(rollout.name) or {}).get("enable_lora") is False
    ):
        return None
    if not engine.lora_head and "lm_head" in str(settings.described().get("target_modules")):
        return None
    dense = engine.lora_experts or not expert_count(load_config(str(model.path), model))
    return settings if dense else None
