"""What of the installed vLLM is used: found once, by name, with the supported range named when something is missing."""

from __future__ import annotations

import importlib
import inspect
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from verl.config.engine_packages import VLLM_RANGE, EnginePackageError, check_vllm, vllm_arguments

_QUIET = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "TOKENIZERS_PARALLELISM": "true",
}


@dataclass(frozen=True, slots=True)
class Vllm:
    """The installed vLLM's parts. `cpu`, `sleeps`: whether it runs on a CPU; whether memory can be given back."""

    version: str
    engine: Any
    engine_args: Any
    sampling_params: Any
    final_only: Any
    arguments: frozenset[str]
    sampling_arguments: frozenset[str]
    stat_logger: Any
    cpu: bool
    sleeps: bool
    lora_request: Any

    def lora_requests(self, path: str) -> tuple[Any, Any]:
        """The name under which requests ask for the adapter, and the order to load it again in place (None where the
        version has no such order). EnginePackageError if adapters are not to be had at all."""
        if self.lora_request is None:
            raise _lacks(self.version, "vllm.lora.request.LoRARequest")
        given = {"lora_name": "policy", "lora_int_id": 1, "lora_path": path}
        in_place = "load_inplace" in getattr(self.lora_request, "__struct_fields__", ())
        again = self.lora_request(**given, load_inplace=True) if in_place else None
        return self.lora_request(**given), again


@cache
def vllm() -> Vllm:
    """Import the installed vLLM. EnginePackageError if it is absent, out of range, or lacks a part."""
    version = check_vllm()
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    engine = _part(version, "vllm.v1.engine.async_llm", "AsyncLLM")
    args = _part(version, "vllm.engine.arg_utils", "AsyncEngineArgs")
    sampling = _part(version, "vllm", "SamplingParams")
    kinds = _part(version, "vllm.sampling_params", "RequestOutputKind")
    platform = _part(version, "vllm.platforms", "current_platform")
    for owner, method in (
        (engine, "from_engine_args"),
        (engine, "generate"),
        (engine, "abort"),
        (engine, "collective_rpc"),
        (engine, "reset_prefix_cache"),
        (engine, "pause_generation"),
        (engine, "resume_generation"),
        (engine, "shutdown"),
    ):
        if not callable(getattr(owner, method, None)):
            raise _lacks(version, f"{owner.__name__}.{method}")
    parameters = frozenset(inspect.signature(args).parameters)
    return Vllm(
        version=version,
        engine=engine,
        engine_args=args,
        sampling_params=sampling,
        final_only=kinds.FINAL_ONLY,
        arguments=parameters or vllm_arguments(),
        sampling_arguments=frozenset(getattr(sampling, "__struct_fields__", ()))
        or frozenset(inspect.signature(sampling).parameters),
        stat_logger=_optional("vllm.v1.metrics.loggers", "StatLoggerBase"),
        cpu=bool(platform.is_cpu()),
        lora_request=_optional("vllm.lora.request", "LoRARequest"),
        sleeps=bool(getattr(platform, "is_sleep_mode_available", bool)()),
    )


def _part(version: str, module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError) as error:
        raise _lacks(version, f"{module}.{name}", error) from error


def _optional(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _lacks(version: str, what: str, error: Exception | None = None) -> EnginePackageError:
    why = f" ({type(error).__name__}: {error})" if error else ""
    return EnginePackageError(
        f"vLLM {version} cannot be used: {what} is not there or cannot be imported{why}; supported is {VLLM_RANGE}"
    )
