"""How large the cache is when nobody says so: a function of the model, the limits and the machine, not of the hour.

Free memory is never asked on a CPU: a resumed run must schedule exactly as the first one did.
"""

from __future__ import annotations

import torch

from verl.platform.memory import total_memory

_SHARE = 0.25


def bytes_per_token(model: torch.nn.Module, compute: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key = 4 if next(model.parameters()).device.type == "cpu" else compute.itemsize
    return int(config.num_hidden_layers * heads * dim * (key + compute.itemsize))


def default_cache_tokens(
    model: torch.nn.Module, max_num_seqs: int, max_model_len: int, compute: torch.dtype, engines: int = 1
) -> int:
    """Room for max_num_seqs sequences of max_model_len tokens, or a quarter of the device's memory. On a CPU `engines`
    samplers divide that quarter: its memory is one for all."""
    device = next(model.parameters()).device
    # whole tiles of at most 16 × 128 tokens, and both books as if all their sequences were longest
    wanted = 2 * (-(-max_num_seqs // 16) * 16) * (-(-max_model_len // 128) * 128)
    total = total_memory() // engines
    if device.type != "cpu":
        from verl.platform import detect

        # twice: half of what is free
        total = 2 * detect(device.type).room(device.index or 0)
    most = int(total * _SHARE) // bytes_per_token(model, compute)
    return min(wanted, max(most, max_model_len))
