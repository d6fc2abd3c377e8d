"""Stands in for SGLang's kernel package, which has no build that runs here: its names exist, and a call raises."""

from __future__ import annotations

import multiprocessing
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


# Without a device there is no memory to pin, which SGLang's LoRA layers and its record of routes do in any case. The process
# of the tests, where transformers builds models, keeps its torch.
if getattr(multiprocessing.current_process(), "_inheriting", False):
    for _name in ("tensor", "zeros", "empty"):
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
