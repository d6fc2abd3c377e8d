"""Stands in for SGLang's kernel package, which has no build that runs here: its names exist, and a call raises."""

from __future__ import annotations

import importlib.abc
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable
from types import SimpleNamespace
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
    """What modules look up in torch.ops when they are imported; by other names SGLang asks whether there are kernels."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.endswith("_cpu"):
            return __getattr__(name)
        raise AttributeError(name)


torch.ops.sgl_kernel = _Operators()


def _unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        return function(*arguments, **options)

    return made


class _Experts(importlib.abc.MetaPathFinder):
    """Gives SGLang's torch-native experts what they lack for experts of other processes, whose ids are -1."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "sglang.srt.layers.moe.fused_moe_native":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(fullname)
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            plain = module.moe_forward_native

            def spread(layer: Any, x: Any, topk: Any, config: Any) -> Any:
                weights, ids = topk[:2]
                return _own_experts(layer, x, weights, ids) if (ids < 0).any() else plain(layer, x, topk, config)

            module.moe_forward_native = spread

        spec.loader.exec_module = exec_module
        return spec


def _own_experts(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for expert, (gate_up, down) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
        gate, up = (x @ gate_up.t()).chunk(2, -1)
        share = (weights * (ids == expert)).sum(-1, keepdim=True).to(x.dtype)
        out += share * ((torch.nn.functional.silu(gate) * up) @ down.t())
    return out


# Without a device there is no memory to pin, which SGLang's LoRA layers and its record of routes do in any case. The process
# of the tests, where transformers builds models, keeps its torch.
if getattr(multiprocessing.current_process(), "_inheriting", False):
    sys.meta_path.insert(0, _Experts())
    for _name in ("tensor", "zeros", "empty"):
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
