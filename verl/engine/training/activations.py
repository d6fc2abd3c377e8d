"""What a pass with gradients keeps for its backward pass: estimated, or measured on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from verl.engine.training.process_group import local
from verl.platform import Platform

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PROBED = (64, 576)
"""Tokens of the passes that are measured."""


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """Bytes that a pass keeps until its backward pass has run.

    token   bytes of one token
    fixed   bytes of a pass of any size: copies of weights in the compute type
    share   of the free memory that activations may take before layers are recomputed: less for an estimate
    """

    token: float
    fixed: float = 0.0
    share: float = 0.4

    def fits(self, tokens: int, free: float) -> bool:
        """Whether a pass over so many tokens may keep its activations, with `free` bytes of the device to spare."""
        return self.fixed + self.token * tokens <= self.share * free

    def may_be_measured(self, config: PreTrainedConfig, copied: int, free: float) -> bool:
        """Whether, by this estimate, `measured` fits into `free` bytes, and its passes into the model's positions.
        Where it does not fit, layers are recomputed anyway. copied: weights that a pass keeps a half-precision copy
        of."""
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or _PROBED[1]
        return positions >= _PROBED[1] and replace(self, fixed=2.0 * copied).fits(_PROBED[1], free)

    @classmethod
    def measured(cls, run: Callable[[int], Any], platform: Platform, index: int) -> ActivationMemory | None:
        """Measured on two passes, run(tokens), each let go before the next; None where the device's tensors are not
        counted."""
        kept = []
        for tokens in _PROBED:
            before = platform.allocated(index)
            outputs = run(tokens)
            kept.append(platform.allocated(index) - before)
            del outputs
        small, large = kept
        token = (large - small) / (_PROBED[1] - _PROBED[0])
        return cls(token, max(0.0, small - _PROBED[0] * token), share=0.7) if token > 0 else None


def missing_gradients(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Bytes of the gradients that the next backward pass allocates."""
    return sum(local(p).numel() * p.element_size() for p in parameters if p.grad is None)
