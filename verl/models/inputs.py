"""The keyword arguments of a Hugging Face model's forward, made of packed tokens: the one place that builds them."""

from __future__ import annotations

from typing import Any

import torch


def model_inputs(input_ids: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
    """Tokens int64 [S] and positions int64 [S], or [3, S] where a model has one for time, height and width.

    What the tokens see of each other is the attention plan's (`verl.models.attention.use`), so there is no mask; keys and
    values are nobody's to keep.
    """
    return {"input_ids": input_ids[None], "position_ids": positions.unsqueeze(-2), "use_cache": False}
