"""One attention function for every Hugging Face architecture, registered with transformers once.

A model set to the implementation name `IMPLEMENTATION` asks the plan that is current on this thread how to
attend. The training engine's plan knows packed segments and shared prompts; the sampler's plan knows its
key/value cache. The architectures' own code stays unpatched.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

IMPLEMENTATION = "verl"


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer attends. sliding_window: a query sees so many keys at most, its own included; softcap: bound of
    scores, by tanh; sinks [Hq]: a score of each head that takes weight and has no value."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens [start, end) of the pack. `prefix` are the spans before it that it attends to, as a whole each, in the
    order of the sequence: its prompt, say, or the way to it in a tree of segments."""

    start: int
    end: int
    prefix: tuple[tuple[int, int], ...] = ()


class AttentionPlan(Protocol):
    """How the tokens of the current forward pass see each other."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """query [1, Hq, S, D], key and value [1, Hkv, S, D] of the packed tokens → output [1, S, Hq, D].

        `module` is the layer that asks; it may ask more than once in a pass.
        """

    def mix(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """hidden [1, S, H] of the packed tokens → output [1, S, H] of a layer that carries a state along each sequence
        (`verl.models.recurrent`)."""


_current = threading.local()


@contextmanager
def use(plan: AttentionPlan) -> Iterator[None]:
    """Make `plan` the one that attention asks, on this thread, until the block ends."""
    before = getattr(_current, "plan", None)
    _current.plan = plan
    try:
        yield
    finally:
        _current.plan = before


def in_use() -> bool:
    """True inside of `use`."""
    return getattr(_current, "plan", None) is not None


def current() -> AttentionPlan:
    """The plan in force. RuntimeError outside of `use`."""
    plan: AttentionPlan | None = getattr(_current, "plan", None)
    if plan is None:
        raise RuntimeError("attention called outside of verl.models.attention.use(plan)")
    return plan


def product_dtype(x: Tensor) -> torch.dtype:
    """The data type in which products with x run here: autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if is_causal is False:
        # a vision tower: patches of one image or window all see each other, and no cache holds them
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
        return out.transpose(1, 2), None
    options = AttentionOptions(scaling, sliding_window, softcap, s_aux)
    return current().attend(module, query, key, value, options), None


def register() -> None:
    """Register the function with transformers (again is harmless).

    No mask builder: without one transformers makes no mask, and does not ask the device where packed sequences begin.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)


@contextmanager
def sampling_mode(model: Any) -> Iterator[None]:
    """The model in evaluation mode and with this attention, until the block ends."""
    register()
    training, before = model.training, model.config._attn_implementation
    if training:
        model.eval()
    if before != IMPLEMENTATION:
        model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        if before != IMPLEMENTATION:
            model.set_attn_implementation(before)
        if training:
            model.train()
