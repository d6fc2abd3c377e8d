"""Starting vLLM's engine and its processes, and making sure that none of them is left."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.engine.registry import EnginePackageError
from verl.engine.rollout.vllm import ENGINE
from verl.engine.rollout.vllm.arguments import EngineSettings
from verl.errors import UserError
from verl.models.inputs import sees_images
from verl.models.layers import layer_configs, state_numbers
from verl.platform.host_resources import cpu_binding, thread_limit
from verl.platform.processes import started_by

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_QUIET = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "TOKENIZERS_PARALLELISM": "true",
}


def platform() -> tuple[bool, bool]:
    """Whether the installed vLLM computes on a CPU, and whether it can release memory between steps.

    EnginePackageError if it is absent, of another version than those supported, or cannot be imported.
    """
    version = ENGINE.installed()
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        from vllm.platforms import current_platform
    except (ImportError, OSError) as error:
        raise EnginePackageError(f"vLLM {version} cannot be imported: {error}") from error
    return bool(current_platform.is_cpu()), bool(current_platform.is_sleep_mode_available())


def check_main_script() -> None:
    """UserError where vLLM's processes could not start: they import the main script anew."""
    importing = getattr(multiprocessing.process.current_process(), "_inheriting", False)
    path = Path(getattr(sys.modules.get("__main__"), "__file__", None) or sys.executable)
    if importing or not path.exists():
        raise UserError(
            "vLLM starts processes that import the main script: run a file, not standard input, and put what it "
            "does under if __name__ == '__main__':"
        )


def model_config(settings: EngineSettings, folder: str) -> Any:
    """The model's configuration as the trainer sees it. With overrides vLLM gets it as a file in `folder`. UserError
    for a configuration that cannot be read or overridden so."""
    from verl.models.pretrained import load_config

    names = ("override_config", "hf_config_path", "trust_remote_code")
    config = load_config(settings.model_path, {name: getattr(settings, name) for name in names})
    if settings.override_config:
        config.save_pretrained(folder)
    return config


def model_kind(config: PreTrainedConfig) -> dict[str, bool]:
    """What of a model's configuration decides arguments of the engine; see `engine_arguments`."""
    text = config.get_text_config()
    return {"vision": sees_images(config), "linear": state_numbers(text) > 0, "latent": _latent(text)}


def _latent(text: Any) -> bool:
    """Whether this is DeepSeek's attention by latent vectors, of version 2 or 3."""
    return bool(getattr(text, "kv_lora_rank", None)) and str(text.model_type).startswith("deepseek")


def check_router(config: PreTrainedConfig) -> None:
    """UserError where DeepSeek V3's experts would be chosen otherwise than in the trainer, which knows no other way."""
    text, expected = config.get_text_config(), {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    missing = {name: value for name, value in expected.items() if getattr(text, name, None) != value}
    if missing and text.model_type == "deepseek_v3":
        words = ", ".join(f"{name}: {value}" for name, value in missing.items())
        raise UserError(
            f"vLLM reads how DeepSeek V3 chooses experts from config.json, which lacks {words}: add it there"
        )


def check_cpu_model(config: PreTrainedConfig, dtype: str) -> None:
    """UserError for a model whose attention vLLM's CPU kernels do not have, in this data type."""
    text = config.get_text_config()
    if state_numbers(text) and dtype != "bfloat16":
        only = "on a CPU vLLM computes layers of linear attention in bfloat16 only"
        raise UserError(f"{only}: set rollout.dtype=bfloat16, or rollout.name=native")
    heads = int(getattr(text, "num_attention_heads", 1))
    sizes, latent = _cpu_head_sizes()
    if _latent(text):
        return _check_latent(text, latent)
    for layer in layer_configs(text):
        size = getattr(layer, "head_dim", None) or int(getattr(layer, "hidden_size", 0)) // heads
        if size and size not in sizes:
            kernels = f"on a CPU vLLM has kernels for {', '.join(map(str, sizes))}: set rollout.name=native"
            raise UserError(f"the model's attention heads have {size} elements; {kernels}")


def check_cpu_experts(settings: EngineSettings) -> None:
    """UserError for experts that are spread (vLLM 0.32 crashed, its kernel takes every expert for one of its own), and
    for their routes, which its first model runner, the only one there, does not return."""
    if settings.expert_parallel:
        raise UserError("on a CPU vLLM does not spread experts: set rollout.expert_parallel_size=1")
    if settings.record_routes:
        raise UserError("on a CPU vLLM returns no routes: set actor.router_replay.mode=R2, or rollout.name=native")


def check_cpu_drafts(settings: EngineSettings) -> None:
    """UserError for drafts: vLLM 0.32 reads the temperatures of draws beside them from memory that nothing has
    written."""
    if settings.draft_tokens or settings.engine_kwargs.get("speculative_config"):
        raise UserError("on a CPU vLLM draws wrongly beside drafts: set model.mtp.enable_rollout=False")


def _check_latent(text: Any, sizes: Sequence[int]) -> None:
    """vLLM 0.32 samples from a distribution other than the model's at other widths (measured: off by up to 3)."""
    width = int(text.kv_lora_rank) + int(getattr(text, "qk_rope_head_dim", None) or 0)
    if width not in sizes:
        raise UserError(
            f"on a CPU vLLM samples correctly from latent attention only with kv_lora_rank + qk_rope_head_dim in "
            f"{list(sizes)}, here it is {width}: set rollout.name=native"
        )


def _cpu_head_sizes() -> tuple[list[int], list[int]]:
    """Elements of a head that vLLM's kernels on a CPU take, of plain and of latent attention."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    return CPUAttentionBackend.get_supported_head_sizes(), CPUMLABackend.get_supported_head_sizes()


@contextlib.contextmanager
def environment(cpu: bool, ranks: int, folder: str, *, eager: bool = False) -> Iterator[None]:
    """Variables that vLLM's processes must start with; removed afterwards. folder: for their sockets."""
    variables = {"VLLM_RPC_BASE_PATH": folder}
    if cpu and eager:
        # Functions of its sampler are compiled all the same, which ends it where there is no C++ compiler.
        variables["TORCH_COMPILE_DISABLE"] = "1"
    bind = "VLLM_CPU_OMP_THREADS_BIND"
    limit = thread_limit() if cpu and bind not in os.environ else None
    if limit is not None:
        # A quota is of time, not of certain cores: vLLM would start a thread on each core that it sees.
        variables |= {"OMP_NUM_THREADS": str(max(1, limit // ranks)), bind: "nobind"}
    elif cpu and ranks > 1:
        variables[bind] = cpu_binding(ranks, sorted(os.sched_getaffinity(0)))
    added = variables.keys() - os.environ.keys()
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def start(arguments: dict[str, Any]) -> Any:
    """vLLM's asynchronous engine; of an engine on several nodes, on another than the first: the executor of the workers
    there. UserError or RuntimeError gives vLLM's message. Its processes end with this one."""
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    mark = started_by(os.getpid())
    try:
        os.environ |= mark
        if isinstance(form := arguments.get("structured_outputs_config"), dict):
            arguments = arguments | {"structured_outputs_config": StructuredOutputsConfig(**form)}
        parsed = AsyncEngineArgs(**arguments)
        if arguments.get("node_rank"):
            return MultiprocExecutor(parsed.create_engine_config(headless=True))
        return AsyncLLM.from_engine_args(parsed)
    except (ValueError, TypeError) as error:
        raise UserError(f"vLLM refuses its arguments: {str(error)[:1500]}") from error
    except RuntimeError as error:
        more = "its processes say why above; VLLM_LOGGING_LEVEL=INFO says more"
        raise RuntimeError(f"vLLM did not start: {str(error)[:1500]} ({more})") from error
    finally:
        for name in mark:
            os.environ.pop(name, None)


def request_parameters(arguments: dict[str, Any]) -> Any:
    """vLLM's SamplingParams of one request, whose whole response comes at its end."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    arguments = dict(arguments)
    if grammar := arguments.pop("grammar", ""):
        arguments["structured_outputs"] = StructuredOutputsParams(grammar=grammar)
    return SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)


def lora_requests(path: str) -> tuple[Any, Any]:
    """The name under which requests ask for the adapter, and the order to load it again in place."""
    from vllm.lora.request import LoRARequest

    request: dict[str, Any] = {"lora_name": "policy", "lora_int_id": 1, "lora_path": path}
    return LoRARequest(**request), LoRARequest(**request, load_inplace=True)
