"""What the training engine reads from the configuration, in one place."""

from __future__ import annotations

from typing import Any

import torch

from verl.config.schema.base import setting
from verl.engine.registry import FLOATS, Placement, float_name
from verl.engine.training.packing import MicroBatching
from verl.errors import UserError
from verl.platform import Platform


def micro_batching(
    group: Any, prefix: str, *, share_prompt: bool | None, preferred: int | None = None
) -> MicroBatching:
    """The micro-batches asked for by `{prefix}_micro_batch_size_per_gpu`, `…_max_token_len_per_gpu` and the
    dynamic-batch switch. The token budget is a limit: where smaller packs are `preferred`, they are smaller."""
    switch = "use_dynamic_bsz" if prefix == "ppo" else f"{prefix}_use_dynamic_bsz"
    rows = None if setting(group, switch) else setting(group, f"{prefix}_micro_batch_size_per_gpu")
    limit = int(setting(group, f"{prefix}_max_token_len_per_gpu", 16384))
    tokens = limit if preferred is None else min(limit, preferred)
    whole = bool(setting(group, "whole_groups", False))
    return MicroBatching(tokens, None if rows is None else int(rows), share_prompt, limit=limit, whole_groups=whole)


def preferred_tokens(platform: Platform, bytes_per_token: int) -> int | None:
    """Tokens of a micro-batch that suit a device, from what the model's activations take per token.

    Not from the memory that happens to be free: the same run must be cut the same way again.
    """
    if platform.preferred_tokens is None:
        return None
    least, most = platform.preferred_tokens
    return max(least, min(most, platform.preferred_activations // max(1, bytes_per_token)))


def compute_dtype(placement: Placement, platform: Platform) -> torch.dtype:
    """Data type of the matrix products; UserError for a name that is no floating type."""
    if placement.dtype is None:
        return platform.default_dtype
    return named_dtype(placement.dtype, placement.key("dtype"))


def named_dtype(name: str, key: str) -> torch.dtype:
    """The floating type of that name. UserError, naming the key, for any other."""
    dtype = float_name(name)
    if dtype is None:
        raise UserError(f"{key}={name!r} is not known; choose one of {', '.join(FLOATS)}")
    return getattr(torch, dtype)
