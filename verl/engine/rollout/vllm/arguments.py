"""From the configuration of a run to the arguments of vLLM's engine and of one request. Imports no vllm."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from verl.config import Config
from verl.config.layout import samplers_per_node
from verl.engine.registry import sampler_dtype
from verl.engine.rollout.base import SamplingParams
from verl.engine.rollout.settings import longest
from verl.engine.rollout.vllm import ENGINE
from verl.engine.rollout.vllm.kwargs import OURS, translate
from verl.errors import UserError
from verl.models.layers import attention_sizes, state_numbers
from verl.versions import version

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WORKER_EXTENSION = "verl.engine.rollout.vllm.worker.WorkerWeights"
_UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_CPU_BLOCK = 32  # vLLM's CPU default, 128, is longer than most prompts here: a group would share nothing
# The kernels for AMX give up the weights that the next transfer goes to, and compute in bfloat16 alone; vLLM's kernel
# that rotates positions in place is off by up to 0.3 nats there.
_CPU_LATENT = {"attention_backend": "CPU_MLA", "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
_CUTTING = ("long_prefill_", "max_long_partial_", "max_num_partial_", "max_num_scheduled_")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is built with; see `VLLMEngine` for the meaning of each."""

    model_path: str
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
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
    record_routes: bool = False
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
    limit_images: int | None = None
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    engines: int = 1
    draft_tokens: int = 0

    @property
    def copies(self) -> int:
        """Copies of all but the experts, which they share. Copies that share nothing are engines of their own."""
        return self.data_parallel_size if self.expert_parallel else 1

    @property
    def ranks(self) -> int:
        """Devices of the engine."""
        return self.tensor_parallel_size * self.copies


# vLLM's arguments that are settings of the same name.
_SHARED = tuple(f.name for f in fields(EngineSettings) if f.name in OURS and f.name != "seed")


def engine_settings(config: Config, trainer_dtype: str) -> dict[str, Any]:
    """Keyword arguments of VLLMEngine for `actor_rollout_ref.rollout`. UserError for a data type it does not have.

    config: typed groups or the same keys in mappings. trainer_dtype: what the trainer computes in, taken where
    rollout.dtype is not set.
    """
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    return {name: rollout[OURS[name]] for name in _SHARED} | {
        "model_path": model.path,
        "bucket_bytes": rollout.checkpoint_engine.update_weights_bucket_megabytes << 20,
        "notice": lambda text: print(f"verl: {text}", flush=True),
        "tensor_parallel_size": rollout.tensor_model_parallel_size or 1,
        "dtype": sampler_dtype("vllm", rollout.dtype, trainer_dtype),
        "max_model_len": longest(config),
        "expert_parallel": rollout.expert_parallel_size > 1,
        "record_routes": config.actor_rollout_ref.actor.router_replay.mode == "R3",
        "free_cache_engine": rollout.free_cache_engine,
        "tokenizer_path": config.data.tokenizer or model.tokenizer_path,
        # Stop strings and grammars, which programs may ask for, need the tokenizer.
        "skip_tokenizer_init": rollout.skip_tokenizer_init
        and not (rollout.stop or rollout.val_kwargs.stop or rollout.agent.environment.name),
        "trust_remote_code": model.trust_remote_code,
        "hf_config_path": model.hf_config_path,
        "override_config": dict(model.override_config),
        "seed": rollout.seed if rollout.seed is not None else config.trainer.seed,
        "engine_kwargs": dict(rollout.engine_kwargs.vllm),
        "limit_images": rollout.limit_images,
        "mm_processor_kwargs": dict(config.data.mm_processor_kwargs),
        "engines": samplers_per_node(config),
        "draft_tokens": model.mtp.num_speculative_tokens if model.mtp.enable and model.mtp.enable_rollout else 0,
    }


def engine_arguments(
    settings: EngineSettings,
    known: Collection[str],
    *,
    cpu: bool,
    sleeps: bool,
    vision: bool = False,
    linear: bool = False,
    latent: bool = False,
    notice: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs. UserError lists every engine_kwargs key that cannot be passed.

    known: the installed vLLM's argument names. cpu, sleeps: what its platform is, and whether it can sleep. vision: the
    model takes images. linear: some of its layers are linear attention. latent: it keeps keys and values as
    latent vectors.
    """
    s = settings
    arguments: dict[str, Any] = {name: getattr(s, name) for name in _SHARED} | {
        "model": s.model_path,
        "data_parallel_size": s.copies,
        "tokenizer": s.tokenizer_path or s.model_path,
        "trust_remote_code": s.trust_remote_code,
        "hf_config_path": s.hf_config_path,
        "seed": s.seed & 0x7FFFFFFF,
        "generation_config": "vllm",  # sampling settings come with each request, end tokens too
        "worker_extension_cls": WORKER_EXTENSION,
        # Requests then carry their preemptions. vLLM prints statistics only on request, which nobody makes here.
        "disable_log_stats": False,
        "enable_expert_parallel": s.expert_parallel,
        "enable_sleep_mode": s.free_cache_engine and sleeps,
    }
    if s.lora is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1}
        # What it sets room aside for is one of a list; a rank above the largest is refused with the configuration.
        rank, known_ranks = int(s.lora["r"]), ENGINE.capabilities.lora_ranks
        arguments["max_lora_rank"] = next((size for size in known_ranks if size >= rank), rank)
    if s.draft_tokens:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": s.draft_tokens}
    if s.record_routes:
        arguments["enable_return_routed_experts"] = True
    if "structured_outputs_config" in known:
        arguments["structured_outputs_config"] = {"backend": "guidance"}  # its grammars are those of llguidance
    if s.tensor_parallel_size > 1:
        # Inside a Ray actor vLLM would ask Ray for workers, and for devices that are given out already.
        arguments["distributed_executor_backend"] = "mp"
    if version("vllm-ascend"):
        arguments["additional_config"] = {"rl_config": {"enabled": True}}  # its weights may change
    if vision:
        arguments |= _image_defaults(s, known)
    if cpu:
        arguments |= _cpu_defaults(s) | (_CPU_LATENT if latent else {})
    run_values = {OURS[name]: getattr(s, name) for name in (*_SHARED, "seed")}
    run_values |= {"pipeline_model_parallel_size": 1, "disable_log_stats": True}
    translated = translate(s.engine_kwargs, known, run_values, text_only=not vision)
    if translated.problems:
        raise UserError("; ".join(f"{key}: {message}" for key, message in translated.problems))
    for text in translated.notices:
        notice(text)
    arguments |= translated.arguments
    if cpu and linear and arguments["enable_prefix_caching"]:
        # vLLM keeps the state after a prefix only where it cuts prompts, which a CPU must not.
        notice("enable_prefix_caching=False: on a CPU vLLM computes each prompt of a model with linear attention anew")
        arguments["enable_prefix_caching"] = False
    return _whole_prompts(s, arguments, notice) if cpu else arguments


def _image_defaults(s: EngineSettings, known: Collection[str]) -> dict[str, Any]:
    """How much room vLLM sets aside for images (its own processor, which needs the tokenizer, determines the largest),
    and that vLLM receives pixels as the model sees them."""
    limits = {"video": 0} | ({} if s.limit_images is None else {"image": s.limit_images})
    more = {"mm_processor_kwargs": dict(s.mm_processor_kwargs)} if s.mm_processor_kwargs else {}
    normalization = {name: False for name in ("mm_device_do_normalize",) if name in known}
    return {"limit_mm_per_prompt": limits, "skip_tokenizer_init": False} | more | normalization


def _cpu_defaults(s: EngineSettings) -> dict[str, Any]:
    """What is chosen on a CPU unless engine_kwargs say otherwise."""
    # Nothing is captured there, and compiling needs a C++ compiler and most of a minute.
    eager = s.enforce_eager or "compilation_config" not in s.engine_kwargs
    chosen: dict[str, Any] = {"block_size": _CPU_BLOCK, "enforce_eager": eager}
    if s.tensor_parallel_size == 1:
        # One process less, with its own import and its busy waiting, than vLLM's default there.
        chosen["distributed_executor_backend"] = _UNIPROC
    return chosen


def _whole_prompts(s: EngineSettings, arguments: Mapping[str, Any], notice: Callable[[str], None]) -> dict[str, Any]:
    """The arguments, such that no prompt is cut in parts on a CPU: vLLM would turn the request's generator back after
    each part, which a CPU's cannot ("CPU Generator does not use offset"), and every request here has its own seed."""
    whole = {name: value for name, value in arguments.items() if not name.startswith(_CUTTING)}
    for name in sorted(arguments.keys() - whole.keys()):
        notice(f"dropped: engine_kwargs.vllm.{name}: on a CPU vLLM takes a prompt whole")
    # Without a length of ours vLLM makes room for a prompt of the model's own.
    tokens = None if s.max_model_len is None else max(s.max_num_batched_tokens, s.max_model_len)
    if tokens is not None and tokens > s.max_num_batched_tokens:
        notice(
            f"max_num_batched_tokens={tokens} instead of {s.max_num_batched_tokens}: on a CPU vLLM takes a prompt "
            f"whole, and max_model_len={s.max_model_len}"
        )
    return whole | {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}


def cache_bytes(config: PreTrainedConfig, settings: EngineSettings, available: int) -> int:
    """Bytes of KV cache per rank on a CPU: max_num_seqs full sequences, at most the share of `available` memory,
    which the machine's engines divide among them.

    On a CPU vLLM would take gpu_memory_utilization of the whole machine, whatever else runs there.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    parts = settings.tensor_parallel_size
    sizes = attention_sizes(text)
    per_token = sum(max(1, s.kv_heads // parts) * (s.key_width + s.value_width) for s in sizes)
    item = 4 if settings.dtype == "float32" else 2
    length = settings.max_model_len or text.max_position_embeddings
    blocks = -(-length // _CPU_BLOCK) + 1
    # where layers have states, a block of any layer has room for one
    states = 4 * state_numbers(text) * int(text.num_hidden_layers)
    needed = (per_token * item * blocks * _CPU_BLOCK + states) * (settings.max_num_seqs + 1)
    sharing = settings.ranks * settings.engines
    return min(needed, int(available * settings.gpu_memory_utilization) // sharing)


def request_seed(sampling: SamplingParams) -> int:
    """A request's seed. vLLM's generator begins anew with each request, so `start` (tokens written already) and the
    number of the call are mixed in: neither a response that goes on nor a later call repeats draws."""
    if not sampling.start and not sampling.call:
        return sampling.seed & 0x7FFFFFFFFFFFFFFF
    call = f"/{sampling.call}" if sampling.call else ""
    digest = hashlib.blake2b(f"{sampling.seed}+{sampling.start}{call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def request_arguments(
    sampling: SamplingParams, *, room: int, end_ids: Iterable[int], forbidden: Iterable[int] = ()
) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams. room: tokens the prompt leaves of max_model_len. forbidden: tokens that get
    no probability.

    End tokens are named here, with vLLM's own ones off: then both ways of stopping are the same.
    """
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(end_ids))
    arguments: dict[str, Any] = {
        "max_tokens": min(sampling.max_tokens, room),
        "temperature": sampling.temperature,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": sorted(ends),
        "ignore_eos": True,
        "logprobs": 0,
        "flat_logprobs": True,  # a fifth of the time of one dict and one object per token
        "detokenize": bool(sampling.stop),
    }
    if sampling.grammar:
        arguments["grammar"] = sampling.grammar
    if bias := dict.fromkeys(forbidden, -math.inf):
        arguments["logit_bias"] = bias
    if sampling.stop:
        # The string may be a special token, which vLLM's text leaves out else.
        arguments |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        arguments["skip_special_tokens"] = False
    if sampling.temperature > 0:
        arguments |= {"top_p": sampling.top_p, "top_k": max(sampling.top_k, 0), "min_p": sampling.min_p}
        arguments["seed"] = request_seed(sampling)
    return arguments
