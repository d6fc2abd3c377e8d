"""`rollout.engine_kwargs.sglang`: passed on or refused (docs/sglang.md). Imports neither torch nor sglang."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

from verl.config.matching import nearest
from verl.engine.registry import EngineCheck, EnginePackageError
from verl.versions import package_folder

KEY = "rollout.engine_kwargs.sglang"

FIXED: dict[str, str] = {
    "model_path": "actor_rollout_ref.model.path names it",
    "tokenizer_path": "data.tokenizer names it",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code sets it",
    "json_model_override_args": "actor_rollout_ref.model.override_config sets it",
    "skip_tokenizer_init": "a tokenizer is loaded for stop strings (rollout.stop)",
    "tp_size": "rollout.tensor_model_parallel_size sets it",
    "dp_size": "copies of a model are engines of their own",
    "attn_dp_size": "rollout.data_parallel_size sets it, with expert_parallel_size",
    "pp_size": "rollout.pipeline_model_parallel_size sets it",
    "ep_size": "rollout.expert_parallel_size sets it",
    "dtype": "rollout.dtype sets it",
    "context_length": "rollout.max_model_len sets it",
    "max_running_requests": "rollout.max_num_seqs sets it",
    "mem_fraction_static": "rollout.gpu_memory_utilization sets it",
    "chunked_prefill_size": "rollout.max_num_batched_tokens and enable_chunked_prefill set it",
    "disable_radix_cache": "rollout.enable_prefix_caching sets it",
    "disable_cuda_graph": "rollout.enforce_eager sets it",
    "load_format": "rollout.load_format sets it",
    "quantization": "rollout.quantization sets it, where an engine has it",
    "random_seed": "rollout.seed sets it",
    "enable_memory_saver": "rollout.free_cache_engine sets it",
    "enable_return_routed_experts": "rollout.enable_rollout_routing_replay sets it",
    "sampling_mask_max_tokens": "it is the size of the vocabulary",
}
"""SGLang's arguments that other keys set."""


_CPU_ATTENTION = ("torch_native", "intel_amx")
NO_PENALTY = "SGLang's penalty is not the one of the other engines; set 1"
_MERGED = "set {key}.engine_kwargs.sglang.enable_lora=False, so that it gets merged weights"


def problems(arguments: Mapping[str, Any], accepted: Collection[str]) -> list[tuple[str, str]]:
    """What is wrong with engine_kwargs.sglang, as (key, message).

    accepted: names of the installed SGLang's arguments (empty: unknown, nothing is refused for its name).
    """
    out = []
    for name, value in arguments.items():
        if name in FIXED:
            out.append((f"{KEY}.{name}={value}", f"{FIXED[name]}; remove this key"))
        elif accepted and name not in accepted:
            out.append((f"{KEY}.{name}", f"the installed SGLang has no such argument{nearest(name, accepted)}"))
    return out


@cache
def sglang_arguments() -> frozenset[str]:
    """Names of all arguments of the installed SGLang's engine, read from its source; empty if that cannot be read."""
    folder = package_folder("sglang")
    if folder is None:
        return frozenset()
    try:
        sources = [path.read_text(encoding="utf-8") for path in (folder / "srt/arg_groups/fields").glob("*.py")]
        return frozenset().union(*map(arguments_in, sources))
    except (OSError, SyntaxError):
        return frozenset()


def arguments_in(source: str) -> frozenset[str]:
    """Annotated fields of all classes in Python source text. SyntaxError if it is none."""
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    fields = (item for node in classes for item in node.body if isinstance(item, ast.AnnAssign))
    names = (item.target.id for item in fields if isinstance(item.target, ast.Name))
    return frozenset(name for name in names if not name.startswith("_"))


def check(c: EngineCheck, installed: Callable[[], str]) -> None:
    """See `EngineRecord.check`. installed: raises EnginePackageError where SGLang cannot be used."""
    key, rollout, accepted = c.rollout_key, c.rollout, frozenset[str]()
    try:
        installed()
        accepted = sglang_arguments()
    except EnginePackageError as error:
        c.lacks(f"{key}.name=sglang", str(error))
    for where, message in problems(rollout.engine_kwargs.sglang, accepted):
        c.refuse(where.replace("rollout.", f"{key}.", 1), message)
    model, cpu = c.config.select(f"{key.removesuffix('rollout')}model"), c.config.select("trainer.device") == "cpu"
    if cpu and rollout.expert_parallel_size > 1:
        c.refuse(f"{key}.expert_parallel_size", "on a CPU SGLang does not spread experts; set 1")
    attention = rollout.engine_kwargs.sglang.get("attention_backend")
    if cpu and attention not in (None, *_CPU_ATTENTION):
        message = f"SGLang has no such attention for a CPU; leave it out, or set {' or '.join(_CPU_ATTENTION)}"
        c.refuse(f"{key}.engine_kwargs.sglang.attention_backend={attention}", message)
    copies = rollout.data_parallel_size if rollout.expert_parallel_size > 1 else 1
    if (model.lora_rank or model.lora_adapter_path) and rollout.engine_kwargs.sglang.get("enable_lora") is not False:
        for applies, place in (
            (cpu, "on a CPU, whose memory it cannot pin"),
            (copies > 1, "to several copies of attention"),
            (c.facts is not None and c.facts.vision, "to a model that sees images"),
        ):
            if applies:
                c.refuse(f"{key}.name=sglang", f"SGLang adds no adapters {place}: {_MERGED.format(key=key)}")
    deterministic = bool(rollout.engine_kwargs.sglang.get("enable_deterministic_inference"))
    if not deterministic:
        c.notice(
            "SGLang's draws do not follow seeds: two runs differ "
            f"({key}.engine_kwargs.sglang.enable_deterministic_inference=True, on a GPU, makes them follow)"
        )
    elif rollout.min_p or rollout.val_kwargs.min_p:
        c.refuse(f"{key}.min_p", "SGLang cannot combine min_p with enable_deterministic_inference; set 0")
    if {rollout.repetition_penalty, rollout.val_kwargs.repetition_penalty} != {1}:
        c.refuse(f"{key}.repetition_penalty", NO_PENALTY)
