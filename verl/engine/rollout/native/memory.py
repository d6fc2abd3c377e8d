"""How large the cache is when nobody says so: a function of the model, the limits and the machine, not of the hour.

Free memory is never asked on a CPU: a resumed run must schedule exactly as the first one did.
"""

from __future__ import annotations

from typing import Any

import torch

from verl.engine.rollout.native.supported import INSTEAD
from verl.errors import UserError
from verl.models import attention
from verl.models.inputs import model_inputs
from verl.platform.memory import total_memory

_SHARE = 0.25


class _Measure:
    """An `AttentionPlan` that counts the numbers of keys and values that one token brings."""

    keys = 0
    values = 0

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        self.keys += key.shape[1] * key.shape[3]
        self.values += value.shape[1] * value.shape[3]
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


@torch.no_grad()
def bytes_per_token(model: Any, compute: torch.dtype) -> int:
    """Keys and values of one token in all attention calls of a pass, seen in a pass of one token.

    The configuration would not do: layers differ in their sizes (Gemma 4, MiMo), some architectures repeat keys before
    they attend (JetMoE), attend twice in a layer or go through their layers several times. UserError for a model that
    never asks for attention.
    """
    attention.register()
    device, plan = next(model.parameters()).device, _Measure()
    training, before = model.training, model.config._attn_implementation
    model.eval()
    if before != attention.IMPLEMENTATION:
        model.set_attn_implementation(attention.IMPLEMENTATION)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    try:
        with attention.use(plan):
            model(**model_inputs(zero, zero))
    finally:
        if before != attention.IMPLEMENTATION:
            model.set_attn_implementation(before)
        model.train(training)
    if not plan.keys:
        raise UserError(
            f"the embedded sampler cannot sample from {type(model).__name__}: it never asks for the attention function that "
            f"is set, so its tokens would not see each other; {INSTEAD}"
        )
    key = 4 if device.type == "cpu" else compute.itemsize
    return plan.keys * key + plan.values * compute.itemsize


def default_cache_tokens(
    per_token: int, device: torch.device, max_num_seqs: int, max_model_len: int, engines: int = 1
) -> int:
    """Room for max_num_seqs sequences of max_model_len tokens, or a quarter of the device's memory, at `per_token`
    bytes. On a CPU `engines` samplers divide that quarter: its memory is one for all."""
    # whole blocks of at most 16 × 128 tokens, and both tables as if all their sequences were longest
    wanted = 2 * (-(-max_num_seqs // 16) * 16) * (-(-max_model_len // 128) * 128)
    total = total_memory() // engines
    if device.type != "cpu":
        from verl.platform import detect

        # twice: half of what is free
        total = 2 * detect(device.type).room(device.index or 0)
    most = int(total * _SHARE) // per_token
    return min(wanted, max(most, max_model_len))
