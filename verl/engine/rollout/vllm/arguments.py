"""From this package's settings to the arguments of vLLM's engine and of one request. Imports no vllm."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.config.engine_kwargs import LORA_RANKS, translate
from verl.engine.rollout.base import SamplingParams
from verl.errors import UserError
from verl.models.layers import attention_sizes

WORKER_EXTENSION = "verl.engine.rollout.vllm.worker.WeightReceiver"
_UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_CPU_BLOCK = 32  # vLLM's CPU default, 128, is longer than most prompts here: a group would share nothing
_CUTTING = {
    "long_prefill_token_threshold",
    "max_long_partial_prefills",
    "max_num_partial_prefills",
    "max_num_scheduled_tokens",
}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is built with; see `VLLMEngine` for the meaning of each."""

    model_path: str
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    cudagraph_capture_sizes: list[int] | None = None
    expert_parallel: bool = False
    load_format: str = "auto"
    logprobs_mode: str = "processed_logprobs"
    free_cache_engine: bool = False
    quantization: str | None = None
    scheduling_policy: str = "fcfs"
    tokenizer_path: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    hf_config_path: str | None = None
    override_config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] | None = None
    engines: int = 1


def engine_arguments(
    settings: EngineSettings,
    known: Collection[str],
    *,
    cpu: bool,
    sleeps: bool,
    notice: Callable[[str], None] = lambda text: None,
    text_only: bool = True,
) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs. UserError lists every engine_kwargs key that cannot be passed.

    known: the installed vLLM's argument names. cpu, sleeps: what its platform is, and whether it can sleep.
    """
    s = settings
    translated = translate(s.engine_kwargs, known, _set_by_us(s), text_only=text_only)
    if translated.problems:
        raise UserError("; ".join(f"{key}: {message}" for key, message in translated.problems))
    for text in translated.notices:
        notice(text)
    arguments: dict[str, Any] = {
        "model": s.model_path,
        "tokenizer": s.tokenizer_path or s.model_path,
        "skip_tokenizer_init": s.skip_tokenizer_init,
        "trust_remote_code": s.trust_remote_code,
        "dtype": s.dtype,
        "tensor_parallel_size": s.tensor_parallel_size,
        "gpu_memory_utilization": s.gpu_memory_utilization,
        "max_model_len": s.max_model_len,
        "max_num_seqs": s.max_num_seqs,
        "max_num_batched_tokens": s.max_num_batched_tokens,
        "enable_chunked_prefill": s.enable_chunked_prefill,
        "enable_prefix_caching": s.enable_prefix_caching,
        "enforce_eager": s.enforce_eager,
        "load_format": s.load_format,
        "logprobs_mode": s.logprobs_mode,
        "scheduling_policy": s.scheduling_policy,
        "seed": s.seed & 0x7FFFFFFF,
        "generation_config": "vllm",  # sampling settings come with each request, end tokens too
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
    }
    if s.hf_config_path:
        arguments["hf_config_path"] = s.hf_config_path
    if s.quantization:
        arguments["quantization"] = s.quantization
    if s.cudagraph_capture_sizes is not None:
        arguments["cudagraph_capture_sizes"] = s.cudagraph_capture_sizes
    if s.expert_parallel:
        arguments["enable_expert_parallel"] = True
    if s.free_cache_engine and sleeps:
        arguments["enable_sleep_mode"] = True
    if s.lora is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1}
        arguments["max_lora_rank"] = lora_room(int(s.lora["r"]))
    if s.tensor_parallel_size > 1:
        # Inside a Ray actor vLLM would ask Ray for workers, and for devices that are given out already.
        arguments["distributed_executor_backend"] = "mp"
    if cpu:
        arguments |= _cpu_defaults(s)
    arguments |= translated.arguments
    if cpu:
        arguments = _whole_prompts(s, arguments, notice)
    lacking = sorted(set(arguments) - set(known)) if known else []
    if lacking:
        raise UserError(
            f"the installed vLLM has no argument {', '.join(lacking)}; see docs/vllm.md for versions"
        )
    return arguments


def _cpu_defaults(s: EngineSettings) -> dict[str, Any]:
    """What is chosen on a CPU unless engine_kwargs say otherwise."""
    # Nothing is captured there, and compiling needs a C++ compiler and most of a minute.
    eager = s.enforce_eager or "compilation_config" not in s.engine_kwargs
    chosen: dict[str, Any] = {"block_size": _CPU_BLOCK, "enforce_eager": eager}
    if s.tensor_parallel_size == 1:
        # One process less, with its own import and its busy waiting, than vLLM's default there.
        chosen["distributed_executor_backend"] = _UNIPROC
    return chosen


def _whole_prompts(
    s: EngineSettings, arguments: Mapping[str, Any], notice: Callable[[str], None]
) -> dict[str, Any]:
    """The arguments, such that no prompt is cut in parts on a CPU: vLLM would turn the request's generator back after each
    part, which a CPU's cannot ("CPU Generator does not use offset"), and every request here has a seed of its own."""
    for name in sorted(_CUTTING & set(arguments)):
        notice(f"dropped: engine_kwargs.vllm.{name}: on a CPU vLLM takes a prompt whole")
    whole = {name: value for name, value in arguments.items() if name not in _CUTTING}
    whole |= {"enable_chunked_prefill": False, "max_num_batched_tokens": None}
    if s.max_model_len is None:  # vLLM makes room for a prompt of the model's own length then
        return whole
    tokens = max(s.max_num_batched_tokens, s.max_model_len)
    if tokens > s.max_num_batched_tokens:
        notice(
            f"max_num_batched_tokens={tokens} instead of {s.max_num_batched_tokens}: on a CPU vLLM takes a prompt whole, "
            f"and max_model_len={s.max_model_len}"
        )
    return whole | {"max_num_batched_tokens": tokens}


def lora_room(rank: int) -> int:
    """The rank that vLLM sets room aside for: the next of its list. UserError above the largest."""
    room = next((known for known in LORA_RANKS if known >= rank), None)
    if room is None:
        raise UserError(f"model.lora_rank={rank}: vllm takes at most {LORA_RANKS[-1]}")
    return room


def _set_by_us(s: EngineSettings) -> dict[str, Any]:
    """The values of `rollout.*` keys that an engine_kwargs key must not contradict."""
    return {
        "tensor_model_parallel_size": s.tensor_parallel_size,
        "data_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "gpu_memory_utilization": s.gpu_memory_utilization,
        "dtype": s.dtype,
        "max_model_len": s.max_model_len,
        "max_num_seqs": s.max_num_seqs,
        "max_num_batched_tokens": s.max_num_batched_tokens,
        "seed": s.seed,
        "enforce_eager": s.enforce_eager,
        "enable_chunked_prefill": s.enable_chunked_prefill,
        "enable_prefix_caching": s.enable_prefix_caching,
        "cudagraph_capture_sizes": s.cudagraph_capture_sizes,
        "load_format": s.load_format,
        "logprobs_mode": s.logprobs_mode,
        "quantization": s.quantization,
        "scheduling_policy": s.scheduling_policy,
        "disable_log_stats": True,
        "skip_tokenizer_init": s.skip_tokenizer_init,
    }


def cache_bytes(config: Any, settings: EngineSettings, available: int) -> int:
    """Bytes of key/value cache per rank on a CPU: max_num_seqs full sequences, at most the share of `available` memory,
    which the machine's engines divide among them.

    On a CPU vLLM would take gpu_memory_utilization of the whole machine, whatever else runs there.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    parts = settings.tensor_parallel_size
    per_token = sum(
        max(1, s.kv_heads // parts) * (s.key_width + s.value_width) for s in attention_sizes(text)
    )
    item = _DTYPE_BYTES.get(settings.dtype, 2)
    length = settings.max_model_len or text.max_position_embeddings
    blocks = -(-length // _CPU_BLOCK) + 1
    wanted = per_token * item * blocks * _CPU_BLOCK * (settings.max_num_seqs + 1)
    sharing = parts * settings.engines
    return min(wanted, int(available * settings.gpu_memory_utilization) // sharing)


def cpu_binding(ranks: int, allowed: Iterable[int]) -> str:
    """VLLM_CPU_OMP_THREADS_BIND for several ranks: the allowed CPUs dealt out evenly, shared when there are too few."""
    cpus = sorted(allowed)
    if len(cpus) < ranks:
        return "|".join(str(cpus[rank % len(cpus)]) for rank in range(ranks))
    share = len(cpus) // ranks
    return "|".join(",".join(map(str, cpus[rank * share : (rank + 1) * share])) for rank in range(ranks))


def request_seed(sampling: SamplingParams) -> int:
    """A request's seed. vLLM's generator begins anew with each request, so `start` (tokens written already) and the
    number of the call are mixed in: neither a response that goes on nor a later call repeats draws."""
    if not sampling.start and not sampling.call:
        return sampling.seed & 0x7FFFFFFFFFFFFFFF
    import hashlib

    call = f"/{sampling.call}" if sampling.call else ""
    digest = hashlib.blake2b(f"{sampling.seed}+{sampling.start}{call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def request_arguments(
    sampling: SamplingParams,
    *,
    room: int,
    end_ids: Iterable[int],
    final_only: Any,
    known: Collection[str] = (),
) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams. room: tokens the prompt leaves of max_model_len. known: the names that the
    installed version has.

    End tokens are named here, with vLLM's own ones off: then both ways of stopping are the same in every version.
    """
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(end_ids))
    greedy = sampling.temperature == 0
    arguments: dict[str, Any] = {
        "max_tokens": min(sampling.max_tokens, room),
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": max(sampling.top_k, 0) if not greedy else 0,
        "min_p": 0.0 if greedy else sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": sorted(ends),
        "ignore_eos": True,
        "logprobs": 0,
        "output_kind": final_only,
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        # The string may be a special token, which vLLM's text leaves out else.
        arguments |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        arguments["skip_special_tokens"] = False
    if "flat_logprobs" in known:  # a fifth of the time of one dict and one object per token
        arguments["flat_logprobs"] = True
    if not greedy:
        arguments["seed"] = request_seed(sampling)
    return arguments


def check_request(request_id: str, length: int, sampling: SamplingParams, max_model_len: int) -> None:
    """ValueError for a request that cannot be sampled, naming the numbers."""
    where = f"request {request_id!r}"
    if length == 0:
        raise ValueError(f"{where}: the prompt must be a non-empty list of token ids")
    if length + 1 > max_model_len:
        raise ValueError(
            f"{where}: a prompt of {length} tokens leaves no room for a response in max_model_len={max_model_len}: "
            "shorten the prompt or raise max_model_len"
        )
    s = sampling
    if s.max_tokens < 1 or s.temperature < 0 or not 0 < s.top_p <= 1:
        raise ValueError(
            f"{where}: max_tokens={s.max_tokens} must be ≥ 1, temperature={s.temperature} ≥ 0, top_p={s.top_p} in (0, 1]"
        )
    if not 0 <= s.min_p <= 1 or s.repetition_penalty <= 0:
        raise ValueError(
            f"{where}: min_p={s.min_p} must be in [0, 1], repetition_penalty={s.repetition_penalty} > 0"
        )
    if 0 < s.temperature < 0.01:
        raise ValueError(
            f"{where}: temperature={s.temperature}: vLLM samples at 0.01 or above, or at 0 (greedy)"
        )


_BATCH_DEFAULTS = {"max_tokens": 512, "n": 1, "seed": None}
_BATCH_NAMES = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "seed",
    "n",
)


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """What the dict of the batch call asks for: `sampling` of each response, n responses per prompt, a seed or None.

    keep_stop: a stop string that ended a response stays in its text.
    """

    sampling: SamplingParams
    n: int = 1
    seed: int | None = None
    keep_stop: bool = False


def batch_sampling(given: Mapping[str, Any] | None) -> BatchSampling:
    """The dict of the batch call, read. ValueError for unknown names."""
    values = dict(_BATCH_DEFAULTS) | dict(given or {})
    for name in values:
        if name not in _BATCH_NAMES:
            near = difflib.get_close_matches(name, _BATCH_NAMES, n=1, cutoff=0.5)
            hint = f"; nearest: {near[0]}" if near else f"; known: {', '.join(_BATCH_NAMES)}"
            raise ValueError(f"sampling_params has no {name!r}{hint}")
    n, seed = int(values.pop("n") or 1), values.pop("seed")
    if n < 1:
        raise ValueError(f"sampling_params: n={n} must be at least 1")
    stop = values.pop("stop", None) or ()
    values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    values["stop_token_ids"] = tuple(values.pop("stop_token_ids", None) or ())
    values["max_tokens"] = int(values["max_tokens"] or 512)
    keep_stop = bool(values.pop("include_stop_str_in_output", False))
    return BatchSampling(SamplingParams(**values), n, None if seed is None else int(seed), keep_stop)


def allowed_cpus() -> set[int]:
    """CPUs this process may run on."""
    return (
        set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    )
