"""Stands in for SGLang's kernel package, which has no build that runs here: its names exist, and a call raises."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

__path__: list[str] = []


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: this package only stands in for the kernels")

    return missing


class _Operators:
    """What modules look up in torch.ops when they are imported; by other names SGLang asks whether there are
    kernels."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.endswith("_cpu"):
            return __getattr__(name)
        raise AttributeError(name)


torch.ops.sgl_kernel = _Operators()


def _unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        return function(*arguments, **options)

    return made


def _skip_experts_of_others(module: ModuleType) -> None:
    """What kernels on other devices do: an expert of another process, whose number is -1, adds nothing here."""
    # The second one takes an expert twice for a token.
    native, repeats = module.moe_forward_native, module.fused_moe_forward_native

    def moe_forward_native(layer: Any, x: torch.Tensor, chosen: Any, config: Any) -> torch.Tensor:
        here = chosen.topk_ids >= 0
        if bool(here.all()):
            return native(layer, x, chosen, config)
        chosen = chosen._replace(topk_weights=chosen.topk_weights * here, topk_ids=chosen.topk_ids.clamp_min(0))
        return repeats(layer, SimpleNamespace(hidden_states=x, topk_output=chosen)).hidden_states

    module.moe_forward_native = moe_forward_native  # type: ignore[attr-defined]


class _WithExperts(MetaPathFinder):
    """Changes SGLang's module of experts when it is imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != "sglang.srt.layers.moe.fused_moe_native":
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _skip_experts_of_others(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# Without a device there is no memory to pin, which SGLang's LoRA layers and its record of routes do in any case. The
# process of the tests, where transformers builds models, keeps its torch.
if getattr(multiprocessing.current_process(), "_inheriting", False):
    for _name in ("tensor", "zeros", "empty"):
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda self, *_: self
    sys.meta_path.insert(0, _WithExperts())
    torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
