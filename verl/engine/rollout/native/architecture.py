"""What the embedded sampler asks of an architecture: said before the first response, measured once, checked in each pass."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from verl.config.layout import ATTENTION_LAYERS
from verl.errors import UserError
from verl.models import attention
from verl.models.attention import AttentionOptions
from verl.models.inputs import model_inputs
from verl.models.layers import is_recurrent
from verl.platform import platform_of

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


class _Measure:
    """An `AttentionPlan` that counts the numbers of keys and values that one token brings."""

    keys = 0
    values = 0

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
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
    device, plan = next(model.parameters()).device, _Measure()
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    with attention.sampling_mode(model), attention.use(plan):
        model(**model_inputs(zero, zero))
    if not plan.keys:
        raise UserError(
            f"the embedded sampler cannot sample from {type(model).__name__}: it never asks for the attention function that "
            f"is set, so its tokens would not see each other; {INSTEAD}"
        )
    key_bytes = platform_of(device).key_dtype(compute).itemsize
    return plan.keys * key_bytes + plan.values * compute.itemsize


class AttentionCalls:
    """Numbers the attention calls of a pass: the cache has a layer for each.

    Not the architecture's own numbers, because some attend twice in a layer (DiffLlama), go through their layers several
    times (HRM), or number nothing. Every pass makes the same calls in the same order, which is checked.
    """

    def __init__(self) -> None:
        self._modules: list[torch.nn.Module] = []
        self._whole = False
        self._next = 0

    def start(self) -> None:
        """A pass begins."""
        self._next = 0

    def number(self, module: torch.nn.Module) -> int:
        """The number of this call. RuntimeError if another module made it in earlier passes."""
        at, self._next = self._next, self._next + 1
        if at == len(self._modules) and not self._whole:
            self._modules.append(module)
        if at >= len(self._modules) or self._modules[at] is not module:
            raise RuntimeError(self._changed(module, f"makes attention call {at}"))
        return at

    def finish(self) -> None:
        """A pass is over. RuntimeError if it made fewer calls than earlier ones."""
        if self._next != len(self._modules):
            module = self._modules[self._next]
            raise RuntimeError(self._changed(module, f"stops after {self._next} attention calls"))
        self._whole = True

    @staticmethod
    def _changed(module: torch.nn.Module, what: str) -> str:
        return (
            f"{type(module).__name__}: a pass {what}, unlike the passes before it, so the embedded sampler cannot tell "
            f"whose keys it stored: {INSTEAD}"
        )
