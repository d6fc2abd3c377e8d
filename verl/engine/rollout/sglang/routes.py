"""The experts that tokens went to, as SGLang returns them."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Routing:
    """config: of the model's text part; weight_names: of the model, which tell the layers with experts."""

    def __init__(self, config: PreTrainedConfig, weight_names: Iterable[str]):
        found = (re.search(r"layers\.(\d+)\..*experts\.", name) for name in weight_names)
        self._layers = sorted({int(match[1]) for match in found if match})
        self._shape = -1, int(config.num_hidden_layers), int(config.num_experts_per_tok)

    def routes(self, meta: Mapping[str, Any]) -> np.ndarray | None:
        """See `Completion.routed_experts`; None of a response that SGLang returns none for (one that was aborted)."""
        if not (encoded := meta.get("routed_experts")):
            return None
        every_layer = np.frombuffer(base64.b64decode(encoded), np.int32).reshape(self._shape)
        return every_layer[:, self._layers].astype(np.int16)
