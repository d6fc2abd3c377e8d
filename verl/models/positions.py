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
        # By the kind of layer, where layers differ; else one for all, whose names have no prefix.
        by_layer: dict[str, Any] = kinds if isinstance(kinds, dict) else {"": kinds}
        varying = {layer: kind for layer, kind in by_layer.items() if _varies(kind)}
        for layer, kind in varying.items():
            _fill(part, layer, kind, longest)
        if varying:
            settled = by_layer | dict.fromkeys(varying, "default")
            setattr(part, "rope_type", settled if isinstance(kinds, dict) else "default")  # noqa: B010


def _varies(kind: Any) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def _fill(part: Any, layer: str, kind: str, longest: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if "dynamic" in kind and (longest <= getattr(part, "original_max_seq_len", 0) or _has_own_base(part)):
        return
    prefix, which = (f"{layer}_", {"layer_type": layer}) if layer else ("", {})
    buffer = getattr(part, f"{prefix}inv_freq")
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](part.config, buffer.device, seq_len=longest, **which)
    buffer.copy_(frequencies)
    setattr(part, f"{prefix}attention_scaling", scaling)


def _has_own_base(part: Any) -> bool:
    """True for frequencies that the model's code made from an `alpha` (Hunyuan): they do not depend on any length."""
    return bool((getattr(part.config, "rope_parameters", None) or {}).get("alpha"))
