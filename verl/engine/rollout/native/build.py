"""The embedded sampler from the configuration of a run."""

from __future__ import annotations

from typing import Any

from verl.config import Config
from verl.config.layout import samplers_per_node
from verl.engine.registry import sampler_dtype
from verl.engine.rollout.native.engine import NativeEngine
from verl.engine.rollout.settings import longest, moving_adapter, trainer_dtype
from verl.engine.training.lora import AdapterSource, inject
from verl.models.pretrained import end_token_ids, load_model
from verl.platform import Platform


def on_tensors(
    config: Config, tokenizer: Any, module: Any, trainer_dtype: str, *, owns_weights: bool = False
) -> NativeEngine:
    """The sampler on a Hugging Face model's tensors; owns_weights: they are nobody else's."""
    rollout = config.actor_rollout_ref.rollout
    return NativeEngine(
        module,
        eos_token_ids=end_token_ids(module.config, module.generation_config, tokenizer),
        max_model_len=longest(config),
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        dtype=sampler_dtype("native", rollout.dtype, trainer_dtype),
        enforce_eager=rollout.enforce_eager,
        tokenizer=tokenizer,
        engines=samplers_per_node(config),
        record_routes=config.actor_rollout_ref.actor.router_replay.mode == "R3",
        owns_weights=owns_weights,
    )


def build(config: Config, tokenizer: Any, platform: Platform) -> NativeEngine:
    """The sampler with weights of its own."""
    model = config.actor_rollout_ref.model
    platform.prepare()
    module = load_model(model.path, model).to(platform.device())  # type: ignore[arg-type]
    module.requires_grad_(False)
    if lora := moving_adapter(config):
        inject(module, lora).materialise(AdapterSource(module, lora, 0, None), platform.device())
        module.requires_grad_(False)
    return on_tensors(config, tokenizer, module, trainer_dtype(config, platform), owns_weights=True)
