"""From the configuration of a run to the arguments of VLLMEngine. Imports no vllm."""

from __future__ import annotations

from typing import Any

from verl.config.dtypes import sampler_dtype
from verl.config.layout import samplers_per_node


def engine_settings(config: Any, tokenizer: Any, trainer_dtype: str) -> dict[str, Any]:
    """Keyword arguments of VLLMEngine for `actor_rollout_ref.rollout`. UserError for a data type it does not have.

    config: typed groups or the same keys in mappings. tokenizer: of transformers. trainer_dtype: what the trainer
    computes in, taken where rollout.dtype is not set.
    """
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    return {
        "model_path": model.path,
        "eos_token_ids": _end_ids(model, tokenizer),
        "bucket_bytes": rollout.checkpoint_engine.update_weights_bucket_megabytes << 20,
        "notice": _say,
        "tensor_parallel_size": rollout.tensor_model_parallel_size or 1,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "dtype": sampler_dtype("vllm", rollout.dtype, trainer_dtype),
        "max_model_len": rollout.max_model_len
        or config.data.max_prompt_length + config.data.max_response_length,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": rollout.enforce_eager,
        "cudagraph_capture_sizes": rollout.cudagraph_capture_sizes,
        "expert_parallel": rollout.expert_parallel_size > 1,
        "load_format": rollout.load_format,
        "logprobs_mode": rollout.logprobs_mode,
        "free_cache_engine": rollout.free_cache_engine,
        "quantization": rollout.quantization,
        "scheduling_policy": rollout.scheduling_policy,
        "tokenizer_path": config.data.tokenizer or model.tokenizer_path,
        "skip_tokenizer_init": rollout.skip_tokenizer_init and not (rollout.stop or rollout.val_kwargs.stop),
        "trust_remote_code": model.trust_remote_code,
        "hf_config_path": model.hf_config_path,
        "override_config": dict(model.override_config),
        "seed": rollout.seed if rollout.seed is not None else config.trainer.seed,
        "engine_kwargs": dict(rollout.engine_kwargs.vllm),
        "engines": samplers_per_node(config),
    }


def _end_ids(model: Any, tokenizer: Any) -> list[int]:
    from verl.engine.rollout.vllm.batch import end_token_ids
    from verl.models.load import load_config

    return end_token_ids(load_config(model.path, model), model.path, tokenizer)


def _say(text: str) -> None:
    print(f"verl: {text}", flush=True)
