"""Rotary frequencies that depend on the length of a sequence (longrope, dynamic NTK), chosen once for a run.

transformers chooses them anew in every pass, from the longest sequence in it. In a pack a response would then have
other log-probs beside a long neighbour than alone, the ranks that share a pack would rotate its parts differently,
and a sampler would look for keys of one choice with queries of another. Here the longest sequence that the run
allows decides, as vLLM decides for longrope.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def settle(model: torch.nn.Module, longest: int | None) -> None:
    """Fix the frequencies for sequences of up to `longest` tokens; None and a second call leave them as they are.

    Buffers are filled in place. Call it when they have their values.
    """
    if longest is None:
        return
    for part in model.modules():
        kinds = getattr(part, "rope_type", None)
        if isinstance(kinds, str):
            if _varies(kinds):
                _fill(part, "", kinds, longest)
                setattr(part, "rope_type", "default")  # noqa: B010
        elif isinstance(kinds, dict):
            for layer, kind in kinds.items():
                if _varies(kind):
                    _fill(part, f"{layer}_", kind, longest, layer_type=layer)
            settled = {layer: "default" if _varies(kind) else kind for layer, kind in kinds.items()}
            setattr(part, "rope_type", settled)  # noqa: B010


def _varies(kind: Any) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def _fill(part: Any, prefix: str, kind: str, longest: int, **which: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if "dynamic" in kind and (longest <= getattr(part, "original_max_seq_len", 0) or _has_own_base(part)):
        return
    buffer = getattr(part, f"{prefix}inv_freq")
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](part.config, buffer.device, seq_len=longest, **which)
    buffer.copy_(frequencies)
    setattr(part, f"{prefix}attention_scaling", scaling)


def _has_own_base(part: Any) -> bool:
    """True for frequencies that the model's code made from an `alpha` (Hunyuan): they do not depend on any length."""
    return bool((getattr(part.config, "rope_parameters", None) or {}).get("alpha"))
