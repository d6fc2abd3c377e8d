"""Training engines, chosen by the `strategy` of a role."""

from __future__ import annotations

from typing import Any


def get_engine(strategy: str) -> Any:
    """The class of training engines with that name; see `verl.engine.training.base.TrainingEngine`.

    UserError for a strategy that is not here (megatron).
    """
    from verl.engine.training import fsdp_engine  # noqa: F401, registers itself
    from verl.engine.training.base import registered_strategy

    return registered_strategy(strategy)
