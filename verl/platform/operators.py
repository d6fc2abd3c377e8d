"""Our own operators `torch.ops.verl.*`, computed by Triton on CUDA devices.

They are torch operators so that whatever watches torch's operators sees them: profilers, and the pretend device of the
tests, which counts them and computes them with references of its own.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

LIBRARY = torch.library.Library("verl", "DEF")
ops: Any = torch.ops.verl


def define(module: str, *schemas: str) -> None:
    """Define operators that the functions of the same names in a module compute. The module is imported at their first
    call: ImportError where Triton is not installed."""
    for schema in schemas:
        name = schema.partition("(")[0]

        def compute(*arguments: Any, name: str = name) -> Any:
            return getattr(importlib.import_module(module), name)(*arguments)

        LIBRARY.define(schema)
        LIBRARY.impl(name, compute, "CUDA")
