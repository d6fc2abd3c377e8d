"""What the embedded sampler asks of an architecture, said before the first response."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from verl.config.layout import ATTENTION_LAYERS
from verl.errors import UserError
from verl.models.layers import is_recurrent

INSTEAD = "use another rollout engine (rollout.name=vllm)"


def refuse_unfit(model: Any) -> None:
    """UserError for a model whose tokens see each other in a way that the cache does not keep."""
    if why := _unfit(model):
        kind = getattr(model.config, "model_type", "?")
        raise UserError(
            f"the embedded sampler cannot sample from {type(model).__name__} ({kind}): {why}; {INSTEAD}"
        )


def _unfit(model: Any) -> str:
    if not getattr(model, "_supports_attention_backend", False):
        return "it has its own attention that cannot be replaced"
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if others := sorted(kinds - ATTENTION_LAYERS):
        return f"its layers of kind {', '.join(others)} are no attention over all tokens or a window of them"
    if is_recurrent(model):
        return "it carries a state along the row beside keys and values"
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        return "its forward takes no position_ids, which say where in its sequence a token stands"
    return ""


def takes_logits_to_keep(model: torch.nn.Module) -> bool:
    """Whether the model can be told which rows' logits are wanted."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters
