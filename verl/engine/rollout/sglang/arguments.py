"""From the configuration of a run to the arguments of SGLang's engine and of its requests. Imports no sglang before
`EngineSettings.payloads` is called."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.config import Config
from verl.engine.registry import sampler_dtype
from verl.engine.rollout.base import SamplingParams
from verl.engine.rollout.settings import longest
from verl.engine.rollout.sglang.adapter import adapter_arguments
from verl.errors import UserError

_MARGIN = 8  # SGLang keeps some tokens of its context length for itself


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is built with; see `SGLangEngine`."""

    model_path: str
    max_model_len: int
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    dtype: str = "auto"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    load_format: str = "auto"
    free_cache_engine: bool = False
    tokenizer_path: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    override_config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] | None = None
    record_routes: bool = False

    @property
    def copies(self) -> int:
        """Copies of all but the experts, which they share. Copies that share nothing are engines of their own."""
        return self.data_parallel_size if self.expert_parallel_size > 1 else 1

    @property
    def devices(self) -> int:
        """Devices of the engine, with a process for each."""
        return self.tensor_parallel_size * self.copies

    def payloads(self, tensors: Any) -> list[bytes]:
        """Tensors for each of these processes: their handles in shared memory or, for an engine on several nodes, the
        numbers themselves, which go through SGLang's messages."""
        if self.engine_kwargs.get("nnodes", 1) > 1:
            return [pickle.dumps(tensors)] * self.devices
        from sglang.srt.utils import MultiprocessingSerializer

        return [MultiprocessingSerializer.serialize(tensors) for _ in range(self.devices)]


def engine_settings(config: Config, trainer_dtype: str) -> dict[str, Any]:
    """Keyword arguments of SGLangEngine for `actor_rollout_ref.rollout`. UserError for a data type it does not have.

    trainer_dtype: what the trainer computes in, taken where rollout.dtype is not set.
    """
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    same = (
        "gpu_memory_utilization max_num_seqs max_num_batched_tokens enable_chunked_prefill enable_prefix_caching "
        "enforce_eager load_format free_cache_engine data_parallel_size expert_parallel_size"
    )
    return {name: rollout[name] for name in same.split()} | {
        "model_path": str(model.path),
        "max_model_len": longest(config),
        "tensor_parallel_size": rollout.tensor_model_parallel_size or 1,
        "dtype": sampler_dtype("sglang", rollout.dtype, trainer_dtype),
        "tokenizer_path": config.data.tokenizer or model.tokenizer_path,
        "skip_tokenizer_init": not (rollout.stop or rollout.val_kwargs.stop),
        "trust_remote_code": model.trust_remote_code,
        "override_config": dict(model.override_config),
        "seed": rollout.seed if rollout.seed is not None else config.trainer.seed,
        "engine_kwargs": dict(rollout.engine_kwargs.sglang),
        "record_routes": config.actor_rollout_ref.actor.router_replay.mode == "R3",
        "bucket_bytes": rollout.checkpoint_engine.update_weights_bucket_megabytes << 20,
    }


def engine_arguments(s: EngineSettings, *, vocabulary: int, cpu: bool) -> dict[str, Any]:
    """Arguments of SGLang's ServerArgs. vocabulary: number of its tokens."""
    arguments: dict[str, Any] = {
        "model_path": s.model_path,
        "tokenizer_path": s.tokenizer_path or s.model_path,
        "skip_tokenizer_init": s.skip_tokenizer_init,
        "trust_remote_code": s.trust_remote_code,
        "json_model_override_args": json.dumps(dict(s.override_config)),
        "load_format": s.load_format,
        "dtype": s.dtype,
        "context_length": s.max_model_len + _MARGIN,
        # SGLang counts all devices of an engine here, those of its copies too; dp_size would be copies that take no new
        # weights.
        "tp_size": s.devices,
        "attn_dp_size": s.copies,
        "ep_size": s.expert_parallel_size,
        "max_running_requests": s.max_num_seqs,
        "mem_fraction_static": s.gpu_memory_utilization,
        "chunked_prefill_size": s.max_num_batched_tokens if s.enable_chunked_prefill else -1,
        "disable_radix_cache": not s.enable_prefix_caching,
        "disable_cuda_graph": s.enforce_eager,
        "enable_memory_saver": s.free_cache_engine and not cpu,
        "enable_weights_cpu_backup": s.load_format != "dummy",
        "enable_return_routed_experts": s.record_routes,
        "random_seed": s.seed & 0x7FFFFFFF,
        "sampling_mask_max_tokens": vocabulary,
        "log_level": "error",
    }
    if cpu:
        check_cpu_experts(s)
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            # SGLang would size the cache by the whole machine.
            "max_total_tokens": (s.max_num_seqs + 1) * (s.max_model_len + _MARGIN),
        }
    if s.lora is not None:
        arguments |= adapter_arguments(s.lora, cpu=cpu)
    return arguments | dict(s.engine_kwargs)


def check_cpu_experts(s: EngineSettings) -> None:
    """UserError for experts over several processes of a CPU: its experts there take those of others for -1, and it
    ends."""
    if s.expert_parallel_size > 1:
        raise UserError("on a CPU SGLang does not spread experts: set rollout.expert_parallel_size=1")


def request_arguments(
    sampling: SamplingParams, *, room: int, end_ids: Iterable[int], vocabulary: int
) -> tuple[dict[str, Any], bool]:
    """(arguments of SGLang's SamplingParams, whether the distribution is cut). room: tokens the prompt leaves of
    max_model_len.

    Of a distribution that is cut SGLang reports the log-probs on request, and only with a limit for top_k.
    """
    s = sampling
    ends = sorted({*s.stop_token_ids, *(() if s.ignore_eos else end_ids)})
    arguments: dict[str, Any] = {
        "max_new_tokens": min(s.max_tokens, room),
        "temperature": s.temperature,
        "ignore_eos": s.ignore_eos,
        "stop_token_ids": ends,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if s.stop:
        arguments["stop"] = list(s.stop)
    if s.temperature <= 0:
        return arguments, False
    arguments["sampling_seed"] = request_seed(s)
    cut = s.top_k > 0 or s.top_p < 1 or s.min_p > 0
    if cut:
        top_k = min(s.top_k, vocabulary) if s.top_k > 0 else vocabulary
        arguments |= {"top_k": top_k, "top_p": s.top_p, "min_p": s.min_p}
    return arguments, cut


def request_seed(sampling: SamplingParams) -> int:
    """SGLang's draws depend on the seed and the token's position in the whole sequence: a response that goes on repeats
    none. A later call may have a shorter prompt, so its number is mixed in."""
    if not sampling.call:
        return sampling.seed & 0x7FFFFFFFFFFFFFFF
    digest = hashlib.blake2b(f"{sampling.seed}/{sampling.call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
