"""Starting vLLM's engine and its processes, and making sure that none of them is left."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.engine.rollout.vllm.adapter import Vllm
from verl.engine.rollout.vllm.arguments import EngineSettings, allowed_cpus, cache_bytes, cpu_binding
from verl.engine.rollout.vllm.worker import start_time
from verl.errors import UserError
from verl.models.layers import layer_configs
from verl.platform.host import available_memory, thread_limit

Process = tuple[int, str]
"""A process: its id and when it started."""


def check_main_script() -> None:
    """UserError where vLLM's processes could not start: they import the main script anew."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise UserError(
            "VLLMEngine is made while a process of vLLM imports your main script: put what runs under "
            "if __name__ == '__main__':"
        )
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is not None and not Path(path).exists():
        raise UserError(
            f"vLLM starts processes that import the main script, and {path} is no file: run a script file (with "
            "if __name__ == '__main__':) instead of standard input"
        )


def model_config(
    settings: EngineSettings, arguments: dict[str, Any]
) -> tuple[Any, tempfile.TemporaryDirectory[str] | None]:
    """The model's configuration as the trainer sees it. With overrides vLLM gets it as a file, in a folder that has to
    live as long as the engine. UserError for a configuration that cannot be read or overridden so."""
    from verl.models.load import load_config

    config = load_config(
        settings.model_path,
        {
            "override_config": settings.override_config,
            "hf_config_path": settings.hf_config_path,
            "trust_remote_code": settings.trust_remote_code,
        },
    )
    if not settings.override_config:
        return config, None
    folder = tempfile.TemporaryDirectory(prefix="verl-vllm-config-")
    config.save_pretrained(folder.name)
    arguments["hf_config_path"] = folder.name
    return config, folder


def check_model(config: Any, ranks: int, *, cpu: bool) -> None:
    """UserError for a model that cannot be split over `ranks`, or whose attention vLLM's CPU kernels do not have."""
    text = config.get_text_config()
    heads = int(getattr(text, "num_attention_heads", ranks))
    if heads % ranks:
        valid = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        raise UserError(
            f"rollout.tensor_model_parallel_size={ranks} does not divide the model's {heads} attention heads; use one of "
            f"{valid}"
        )
    if cpu and (latent := _latent_width(text)):
        _check_latent(text, latent)
        return
    sizes = _cpu_head_sizes("cpu_attn", "CPUAttentionBackend") if cpu else []
    for layer in layer_configs(text):
        size = getattr(layer, "head_dim", None) or int(getattr(layer, "hidden_size", 0)) // max(heads, 1)
        if sizes and size and size not in sizes:
            raise UserError(
                f"the model's attention heads have {size} elements; on a CPU vLLM has kernels for "
                f"{', '.join(map(str, sizes))}: set rollout.name=native"
            )


def _check_latent(text: Any, width: int) -> None:
    if (known := _cpu_head_sizes("mla.cpu_mla", "CPUMLABackend")) and width not in known:
        raise UserError(
            f"the model's latent attention keeps {width} elements a token (kv_lora_rank + qk_rope_head_dim); on a CPU vLLM "
            f"has kernels for {', '.join(map(str, known))}: set rollout.name=native"
        )
    if text.model_type == "deepseek_v3":
        raise UserError(
            "DeepSeek V3 on a CPU: vLLM 0.32 samples there from another distribution than the model's (seen, not explained); "
            "set rollout.name=native"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") == "default":
        raise UserError(
            "latent attention with plain rotary positions (rope_type=default): on a CPU vLLM 0.32 turns its keys wrongly "
            "and samples from another distribution than the model's; set rollout.name=native"
        )


def _latent_width(text: Any) -> int:
    """Elements per token in the cache of DeepSeek's latent attention, 0 for other models."""
    rank = int(getattr(text, "kv_lora_rank", None) or 0)
    if not rank or not str(getattr(text, "model_type", "")).startswith("deepseek"):
        return 0
    return rank + int(getattr(text, "qk_rope_head_dim", None) or 0)


def _cpu_head_sizes(module: str, name: str) -> list[int]:
    import importlib

    try:
        backend = getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), name)
        return [int(size) for size in backend.get_supported_head_sizes()]
    except (ImportError, AttributeError):
        return []  # a version that keeps it elsewhere says it itself, later


def cpu_arguments(settings: EngineSettings, model_config: Any, arguments: dict[str, Any]) -> None:
    """Fill in what vLLM would size by the whole machine: the cache."""
    if "kv_cache_memory_bytes" not in arguments:
        arguments["kv_cache_memory_bytes"] = cache_bytes(model_config, settings, available_memory())


@contextlib.contextmanager
def environment(cpu: bool, ranks: int) -> Iterator[None]:
    """Variables that vLLM's processes must be born with; taken back afterwards."""
    wanted: dict[str, str] = {}
    bind = "VLLM_CPU_OMP_THREADS_BIND"
    limit = thread_limit() if cpu and bind not in os.environ else None
    if limit is not None:
        # A quota is of time, not of certain cores: vLLM would start a thread on each core that it sees.
        wanted["OMP_NUM_THREADS"] = str(max(1, limit // ranks))
        wanted[bind] = "nobind"
    elif cpu and ranks > 1:
        wanted[bind] = cpu_binding(ranks, allowed_cpus())
    added = [name for name in wanted if name not in os.environ]
    for name in added:
        os.environ[name] = wanted[name]
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def start(api: Vllm, arguments: dict[str, Any]) -> Any:
    """vLLM's asynchronous engine. UserError or RuntimeError says what vLLM said."""
    try:
        args = api.engine_args(**arguments)
        return api.engine.from_engine_args(args, **_stat_loggers(api))
    except (ValueError, TypeError) as error:
        raise UserError(f"vLLM {api.version} refuses its arguments: {_short(error)}") from error
    except RuntimeError as error:
        raise RuntimeError(
            f"vLLM {api.version} did not start: {_short(error)} (its processes say why above; VLLM_LOGGING_LEVEL=INFO says more)"
        ) from error


def _short(error: Exception) -> str:
    text = str(error).strip()
    return text if len(text) < 1500 else text[:1500] + " …"


def _stat_loggers(api: Vllm) -> dict[str, Any]:
    """A logger that says nothing: with one, requests carry their preemptions, without vLLM's own log lines."""
    base = api.stat_logger
    if base is None:
        return {}

    class Silent(base):  # type: ignore[misc, valid-type]
        def __init__(self, vllm_config: Any, engine_index: int = 0):
            pass

        def record(self, *args: Any, **kwargs: Any) -> None:
            pass

        def log_engine_initialized(self) -> None:
            pass

    return {"stat_loggers": [Silent]}


def this_process() -> Process:
    """This process, as others can watch it."""
    return os.getpid(), start_time(os.getpid())


def end(processes: set[Process], patience: float = 5.0) -> None:
    """Wait for processes to be gone; kill those that are not. This process is never among them.

    One that a driver holds in the kernel cannot be killed: it is left, and named.
    """
    deadline, killed = time.monotonic() + patience, False
    left = {p for p in processes if p[0] != os.getpid()}
    while left := {p for p in left if p[1] and start_time(p[0]) == p[1]}:
        if time.monotonic() > deadline:
            if killed:
                named = ", ".join(str(pid) for pid, _ in sorted(left))
                print(f"verl: processes of vLLM that do not end: {named}", file=sys.stderr)
                return
            for pid, _ in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            deadline, killed = time.monotonic() + patience, True
        time.sleep(0.02)
