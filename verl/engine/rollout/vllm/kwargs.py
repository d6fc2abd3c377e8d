"""`rollout.engine_kwargs.vllm`: passed on, translated, dropped or refused (docs/vllm.md, "Settings"). Imports no
torch."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from verl.config.matching import nearest
from verl.engine.registry import EngineCheck, EnginePackageError, float_name
from verl.platform.host_resources import processor
from verl.versions import NO_TORCHVISION, package_folder

KEY = "rollout.engine_kwargs.vllm"

_SAME = (
    "data_parallel_size gpu_memory_utilization dtype max_model_len max_num_seqs max_num_batched_tokens seed "
    "enforce_eager enable_chunked_prefill enable_prefix_caching cudagraph_capture_sizes load_format logprobs_mode "
    "quantization scheduling_policy disable_log_stats skip_tokenizer_init"
)
OURS: dict[str, str] = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    **{name: name for name in _SAME.split()},
}
"""vLLM's argument → the key under `rollout.` that sets it."""

FIXED: dict[str, str] = {
    "model": "actor_rollout_ref.model.path names it",
    "tokenizer": "data.tokenizer names it",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code sets it",
    "hf_config_path": "actor_rollout_ref.model.hf_config_path names it",
    "generation_config": "sampling settings come from rollout.*",
    "worker_extension_cls": "weights reach vLLM's workers through ours",
    "weight_transfer_config": "weights reach vLLM's workers through shared memory",
    "mm_device_do_normalize": "pixels come to vLLM as the model sees them",
    "mm_processor_kwargs": "data.mm_processor_kwargs sets it",
    "enable_sleep_mode": "rollout.free_cache_engine sets it",
    "enable_expert_parallel": "rollout.expert_parallel_size sets it",
    "enable_return_routed_experts": "actor_rollout_ref.actor.router_replay.mode=R3 sets it",
}
"""Arguments that this engine sets for itself."""

_GONE = (
    "swap_space disable_log_requests use_v2_block_manager num_scheduler_steps preemption_mode max_seq_len_to_capture"
)
DROPPED: dict[str, str] = {
    "padding_mode": "sequences are packed without padding; results are the same",
    "image_processor_type": "the processor comes with the model (data.mm_processor_kwargs changes it)",
    **dict.fromkeys(_GONE.split(), "vLLM does not have it any more"),
}
"""Arguments that are left out, and why."""
_MULTIMODAL = ("mm_", "limit_mm_per_prompt", "disable_mm_preprocessor_cache", "interleave_mm_strings")


@dataclass(slots=True)
class Translated:
    """arguments: for vLLM. notices: what was dropped or renamed. problems: what is refused, as (key, message)."""

    arguments: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)


def translate(
    arguments: Mapping[str, Any], accepted: Collection[str], rollout: Mapping[str, Any], *, text_only: bool
) -> Translated:
    """Turn engine_kwargs.vllm into arguments of the installed vLLM.

    accepted: its argument names (empty: unknown, nothing is refused for its name). rollout: the values of `rollout.*`
    keys by name; an argument of OURS with another value is refused. text_only: the model sees no images.
    """
    out = Translated()
    for name, value in arguments.items():
        key, rollout_key = f"{KEY}.{name}", OURS.get(name, "")
        if value is None:
            continue
        if name in DROPPED:
            out.notices.append(f"dropped: {key}: {DROPPED[name]}")
        elif text_only and name.startswith(_MULTIMODAL):
            out.notices.append(f"dropped for a model that sees no images: {key}")
        elif name in FIXED:
            out.problems.append((f"{key}={value}", f"{FIXED[name]}; remove this key"))
        elif rollout_key:
            if rollout_key in rollout and not _same(value, rollout[rollout_key]):
                message = f"rollout.{rollout_key}={rollout[rollout_key]} sets it; set rollout.{rollout_key} instead"
                out.problems.append((f"{key}={value}", message))
        elif name in accepted or not accepted:
            out.arguments[name] = value
        elif name == "disable_mm_preprocessor_cache":
            if value:
                out.arguments["mm_processor_cache_gb"] = 0
                out.notices.append(f"renamed: {key}=True is mm_processor_cache_gb=0")
        elif name == "cuda_graph_sizes":
            out.arguments["cudagraph_capture_sizes"] = value if isinstance(value, list) else [value]
            out.notices.append(f"renamed: {key} is cudagraph_capture_sizes (rollout.cudagraph_capture_sizes)")
        else:
            out.problems.append((key, f"the installed vLLM has no such argument{nearest(name, accepted)}"))
    return out


def _same(left: Any, right: Any) -> bool:
    """Equal, or two names of one floating type."""
    return bool(left == right) or (float_name(left) is not None and float_name(left) == float_name(right))


@cache
def vllm_arguments() -> frozenset[str]:
    """Names of all arguments of the installed vLLM's engine, read from its source; empty if that cannot be read."""
    folder = package_folder("vllm")
    if folder is None:
        return frozenset()
    try:
        return arguments_in((folder / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return frozenset()


def arguments_in(source: str) -> frozenset[str]:
    """Fields of the classes EngineArgs and AsyncEngineArgs in Python source text. SyntaxError if it is none."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs"):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    names.add(item.target.id)
    return frozenset(name for name in names if not name.startswith("_"))


def check_images() -> None:
    """EnginePackageError where vLLM could not serve a model that sees images.

    vLLM loads such a model's processor, whose part for videos imports torchvision.
    """
    if importlib.util.find_spec("torchvision") is None:
        raise EnginePackageError(f"vLLM reads images with {NO_TORCHVISION}, or set rollout.name=native")


def check(c: EngineCheck, installed: Callable[[], str]) -> None:
    """See `EngineRecord.check`: the version and the arguments, both looked up without importing vLLM.

    installed: raises EnginePackageError where vLLM cannot be used.
    """
    key, accepted = c.rollout_key, frozenset[str]()
    text_only = c.facts is None or not c.facts.vision
    try:
        installed()
        accepted = vllm_arguments()
        if not text_only:
            check_images()
    except EnginePackageError as error:
        c.lacks(f"{key}.name=vllm", str(error))
    values = {name: c.rollout.get(name) for name in OURS.values()}
    values["tensor_model_parallel_size"] = values["tensor_model_parallel_size"] or 1
    translated = translate(c.rollout.engine_kwargs.vllm, accepted, values, text_only=text_only)
    for where, message in translated.problems:
        c.refuse(where.replace("rollout.", f"{key}.", 1), message)
    for text in translated.notices:
        c.notice(text)
    quantization = c.rollout.quantization
    if quantization is not None and c.config.select("trainer.device") == "cpu":
        if quantization != "fp8_per_block":
            c.lacks(f"{key}.quantization={quantization}", "on a CPU vLLM has no kernel for it but for fp8_per_block")
        elif "amx_tile" not in processor()[1]:
            c.lacks(f"{key}.quantization={quantization}", "vLLM's kernel for it needs a processor with AMX")
    attention = str(c.rollout.engine_kwargs.vllm.get("attention_backend") or "CPU_ATTN")
    if c.config.select("trainer.device") == "cpu" and not attention.upper().startswith(("CPU_", "AMX_")):
        at = f"{key}.engine_kwargs.vllm.attention_backend={attention}"
        c.notice(f"no effect: {at}: on a CPU vLLM takes CPU_ATTN, or CPU_MLA and AMX_MLA for latent attention")
    cache = str(c.rollout.engine_kwargs.vllm.get("kv_cache_dtype") or "")
    if cache.startswith("fp8") and c.config.select("trainer.device") == "cpu" and "avx512f" not in processor()[1]:
        c.lacks(f"{key}.engine_kwargs.vllm.kv_cache_dtype={cache}", "vLLM's cache in fp8 needs a processor with AVX512")
    if c.rollout.enable_rollout_routing_replay and not c.rollout.enable_prefix_caching:
        c.refuse(
            f"{key}.enable_prefix_caching", "vLLM keeps the routes of tokens by their cache blocks; set it to True"
        )
