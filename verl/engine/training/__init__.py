"""Training engines, chosen by the `strategy` of a role."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from verl.errors import UserError

_FSDP = ("verl.engine.training.fsdp_engine", "FSDPEngine")
STRATEGIES = {"fsdp": _FSDP, "fsdp2": _FSDP}
"""Strategy → module and class, a `verl.engine.training.base.TrainingEngine`."""


def get_engine(strategy: str) -> Any:
    """The class of training engines with that name. UserError for a strategy that is not here (megatron)."""
    if strategy not in STRATEGIES:
        names = ", ".join(STRATEGIES)
        raise UserError(f"strategy={strategy}: there is no such training engine here; choose one of {names}")
    module, name = STRATEGIES[strategy]
    return getattr(import_module(module), name)
