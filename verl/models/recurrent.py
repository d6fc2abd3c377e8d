"""Linear attention by the delta rule (gated delta net: Qwen3-Next, Qwen3.5, OLMo Hybrid; Kimi's delta attention).

Such a layer keeps two states of a sequence: the last inputs of its causal convolution, and a matrix for each head. The
layers stay transformers' own. They are called with the tokens of whole sequences and with the states that these tokens
follow, and the current attention plan says which those are (`AttentionPlan.mix`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from verl.models import attention
from verl.models.attention import TokenSpan

State = tuple[Tensor, Tensor]
"""Of n sequences in one layer: of the convolution [n, channels, kernel], and of the heads [n, heads, Dk, Dv]."""

_PADDING = 1.25  # most tokens that a batch computes for each of its sequences' own


def recurrent_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of a model that `run` can call, in order."""
    named = (part for part in module.modules() if "Delta" in type(part).__name__ and hasattr(part, "layer_idx"))
    return [part for part in named if "cache_params" in inspect.signature(type(part).forward).parameters]


def takes_attention(module: Any) -> bool:
    """True if a model asks for the attention function that is set. transformers leaves the flag for it unset where some
    layers are linear."""
    marked = getattr(module, "_supports_attention_backend", False)
    return marked or bool(recurrent_layers(module) and module._can_set_attn_implementation())


def attach(module: nn.Module) -> None:
    """Let a model's recurrent layers ask the plan in force. Without one they compute as transformers has them."""
    for layer in recurrent_layers(module):
        layer.__dict__["forward"] = partial(_forward, layer)


def _forward(layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not attention.in_use():
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    return attention.current().mix(layer, hidden_states)


def run(layer: Any, hidden: Tensor, state: State | None) -> tuple[Tensor, State]:
    """hidden [n, S, H] of n sequences after `state` (None: from their beginning) → output [n, S, H], the new state."""
    kept = _layer_class()(state)
    cache = _cache_class()(layers=[kept] * (layer.layer_idx + 1))
    out = type(layer).forward(layer, hidden, cache_params=cache)
    return out, (kept.conv_states[0], kept.recurrent_states[0])


@functools.cache
def _cache_class() -> Any:
    from transformers.cache_utils import Cache

    return Cache


@functools.cache
def _layer_class() -> Any:
    from transformers.cache_utils import LinearAttentionLayer

    class Kept(LinearAttentionLayer):  # type: ignore[misc]
        """One layer's state, never written in place, so that gradients pass from a response to its prompt."""

        def __init__(self, state: State | None):
            super().__init__()
            if state is not None:
                self.conv_states[0], self.recurrent_states[0] = state
                self.has_previous_state[0] = True

        def update_conv_state(
            self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
        ) -> Tensor:
            earlier = self.conv_states[state_idx]
            joined = conv_states if earlier is None else torch.cat((earlier.to(conv_states.dtype), conv_states), -1)
            size = conv_kernel_size or conv_states.shape[-1]
            missing = max(0, size - joined.shape[-1])
            self.conv_states[state_idx] = torch.nn.functional.pad(joined, (missing, 0))[..., -size:]
            return joined

        def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
            self.recurrent_states[state_idx] = recurrent_states
            return recurrent_states

    return Kept


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A span of a pack, computed after the state of `parent` (None: from the beginning) with `lead` tokens before it
    again."""

    span: TokenSpan
    parent: tuple[int, int] | None
    lead: tuple[int, ...]

    @classmethod
    def of(cls, span: TokenSpan) -> _Sequence:
        """A kernel for single tokens after a state has no backward pass: such spans are computed again with those that
        follow them."""
        path, lead = list(span.prefix), list[int]()
        while len(path) > 1 and path[-1][1] - path[-1][0] == 1:
            lead.insert(0, path.pop()[0])
        return cls(span, path[-1] if path else None, tuple(lead))

    def __len__(self) -> int:
        return len(self.lead) + self.span.end - self.span.start


class PackedStates:
    """The spans of a pack as batches: `segments` as `PackedPlan` has them. A span that others follow comes before them
    and gives them its state; a state that nobody follows is needed by nobody."""

    def __init__(self, segments: Sequence[TokenSpan], device: torch.device):
        self._device = device
        sequences = [_Sequence.of(span) for span in segments]
        parents = {sequence.parent for sequence in sequences}
        self._batches: list[list[_Sequence]] = []
        for depth in range(max((len(span.prefix) for span in segments), default=0) + 1):
            level = [sequence for sequence in sequences if len(sequence.span.prefix) == depth]
            for begins in (True, False):
                for followed, padding in ((True, 1.0), (False, _PADDING)):
                    # a state is true after a span's own tokens only: those that are followed are never padded
                    alike = [
                        s for s in level
                        if (s.parent is None) == begins and ((s.span.start, s.span.end) in parents) == followed
                    ]  # fmt: skip
                    self._batches += _alike(alike, padding)

    @cached_property
    def _indices(self) -> tuple[list[Tensor], Tensor]:
        """For each batch which tokens of the pack it computes, int64 [n, S], and where each token of the pack is among
        all those computed."""
        indices, at = [], 0
        spans = [sequence.span for batch in self._batches for sequence in batch]
        back = torch.zeros(sum(span.end - span.start for span in spans), dtype=torch.int64)
        for batch in self._batches:
            width = len(batch[0]) if batch[0].parent is None else max(2, len(batch[0]))
            index = torch.zeros(len(batch), width, dtype=torch.int64)
            for number, sequence in enumerate(batch):
                span, lead = sequence.span, len(sequence.lead)
                index[number, : len(sequence)] = torch.tensor([*sequence.lead, *range(span.start, span.end)])
                start = at + number * width + lead
                back[span.start : span.end] = torch.arange(start, start + span.end - span.start)
            at += index.numel()
            indices.append(index.to(self._device))
        return indices, back.to(self._device)

    def mix(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """See `AttentionPlan.mix`."""
        indices, back = self._indices
        states: dict[tuple[int, int], State] = {}
        outputs = []
        for batch, index in zip(self._batches, indices, strict=True):
            earlier = [states[s.parent] for s in batch if s.parent is not None]
            state = (torch.cat([e[0] for e in earlier]), torch.cat([e[1] for e in earlier])) if earlier else None
            tokens = hidden[0].index_select(0, index.flatten()).unflatten(0, index.shape)
            out, after = run(layer, tokens, state)
            outputs.append(out.flatten(0, 1))
            for n, sequence in enumerate(batch):
                states[sequence.span.start, sequence.span.end] = after[0][n : n + 1], after[1][n : n + 1]
        return torch.cat(outputs).index_select(0, back)[None]


def _alike(sequences: Sequence[_Sequence], padding: float) -> list[list[_Sequence]]:
    """Sequences of similar length together."""
    batches: list[list[_Sequence]] = []
    tokens = 0
    for sequence in sorted(sequences, key=len, reverse=True):
        longest = len(batches[-1][0]) if batches else 0
        tokens += len(sequence)
        if not batches or longest * (len(batches[-1]) + 1) > padding * tokens:
            batches.append([])
            tokens = len(sequence)
        batches[-1].append(sequence)
    return batches
