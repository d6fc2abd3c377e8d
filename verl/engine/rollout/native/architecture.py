"""What the embedded sampler asks of an architecture: checked and measured once, before the first response."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verl.config.model_facts import ATTENTION_LAYERS
from verl.errors import UserError
from verl.models import attention
from verl.models.attention import AttentionOptions
from verl.models.inputs import model_inputs
from verl.models.layers import is_recurrent
from verl.models.recurrent import run, takes_attention
from verl.platform import platform_of

INSTEAD = "use another rollout engine (rollout.name=vllm)"


def refuse_unfit(model: Any) -> None:
    """UserError for a model whose tokens see each other in a way that the cache does not keep."""
    if why := _unfit(model):
        name = f"{type(model).__name__} ({getattr(model.config, 'model_type', '?')})"
        raise UserError(f"the embedded sampler cannot sample from {name}: {why}; {INSTEAD}")


def _unfit(model: Any) -> str:
    if not takes_attention(model):
        return "it has its own attention that cannot be replaced"
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if is_recurrent(model) and (other_kinds := sorted(kinds - ATTENTION_LAYERS)):
        return f"its layers of kind {', '.join(other_kinds)} are no attention over all tokens or a window of them"
    if is_recurrent(model):
        return "it carries a state along the row beside keys and values"
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        return "its forward takes no position_ids, which say where in its sequence a token stands"
    return ""


Heads = tuple[int, int, int, int]
"""Of an attention call: heads of queries and of keys, widths of keys and of values."""


class _Measure:
    """An `AttentionPlan` that counts the numbers of keys and values that one token brings, and the bytes of a state."""

    keys = 0
    values = 0
    state_bytes = 0

    def __init__(self) -> None:
        self.heads: set[Heads] = set()

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.keys += key.shape[1] * key.shape[3]
        self.values += value.shape[1] * value.shape[3]
        self.heads.add((query.shape[1], key.shape[1], key.shape[3], value.shape[3]))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def mix(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        out, state = run(layer, hidden, None)
        self.state_bytes += sum(x.nbytes for x in state)
        return out


def bytes_to_come(model: nn.Module, compute: torch.dtype) -> int:
    """Bytes that a device will hold for the model beside its weights: float32 gradients and AdamW's state of the
    weights trained there, and the sampler's copies of those in another data type."""
    weights = list(model.parameters())
    trained = sum(w.numel() for w in weights if w.requires_grad)
    copied = sum(w.numel() for w in weights if compute not in (torch.float32, w.dtype))
    return 12 * trained + compute.itemsize * copied


class CacheNeeds(NamedTuple):
    """What a model keeps while it samples: bytes of a token's keys and values in all attention calls of a pass, bytes
    of a sequence's state in all layers of linear attention, and the heads of the attention calls."""

    token: int
    state: int
    heads: set[Heads]


@torch.no_grad()
def cache_needs(model: Any, compute: torch.dtype) -> CacheNeeds:
    """What a model keeps while it samples, seen in a pass of one token.

    The configuration would not do: layers differ in their sizes (Gemma 4, MiMo), some architectures repeat keys before
    they attend (JetMoE), attend twice in a layer or go through their layers several times. UserError for a model that
    never asks for attention.
    """
    device, plan = next(model.parameters()).device, _Measure()
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    with attention.sampling_mode(model), attention.use(plan):
        model(**model_inputs(zero, zero))
    if not plan.keys:
        raise UserError(
            f"the embedded sampler cannot sample from {type(model).__name__}: it never asks for the attention "
            f"function that is set, so its tokens would not see each other; {INSTEAD}"
        )
    key_bytes = platform_of(device).key_dtype(compute).itemsize
    return CacheNeeds(plan.keys * key_bytes + plan.values * compute.itemsize, plan.state_bytes, plan.heads)
