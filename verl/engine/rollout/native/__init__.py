"""The embedded sampler: continuous batching in the trainer's process, on the trainer's weights."""

from __future__ import annotations

from typing import Any

from verl.config.model_facts import QWEN3_5, QWEN_VISION, VISION_MODELS
from verl.config.schema.entries import Config
from verl.engine.registry import Capabilities, RolloutEngineRecord


class Native(RolloutEngineRecord):
    """See `RolloutEngineRecord`."""

    name = "native"
    builder = "verl.engine.rollout.native.build:build"
    capabilities = Capabilities(
        dtypes=("float32", "bfloat16"),
        in_place_weights=True,
        tensor_parallel=False,
        images=VISION_MODELS,
        videos=QWEN_VISION + QWEN3_5,
        image_transformers=">=5.18",
        routes=True,
        sampling_mask=True,
        grammars=True,
    )
    unread = {  # noqa: RUF012
        "data_parallel_size expert_parallel_size pipeline_model_parallel_size": "a native engine runs on one device",
        "enable_chunked_prefill enable_prefix_caching cudagraph_capture_sizes load_format scheduling_policy "
        "disable_log_stats skip_tokenizer_init multi_stage_wake_up calculate_log_probs logprobs_mode": (
            "the native engine decides it by itself"
        ),
    }

    def attach(self, config: Config, tokenizer: Any, trainer: Any) -> Any:
        """See `RolloutEngineRecord.attach`."""
        from verl.engine.rollout.native.build import on_tensors

        return on_tensors(config, tokenizer, trainer.module, str(trainer.compute_dtype))


ENGINE = Native()
