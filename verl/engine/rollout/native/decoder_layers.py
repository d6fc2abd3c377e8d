"""Decoder layers of the sampler in few kernel calls.

Through the modules of transformers a layer h = x + attention(norm(x)), y = h + mlp(norm(h)) is some forty calls of
torch's operators, which take a sixth of a decode step on a processor. Here it is about ten: a norm, one product for
queries, keys and values, which are normed and rotated where they lie, attention, and so on. As for single modules
(`verl.models.fused_layers`) a replacement is used only where a probe shows that it gives what the layer gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from verl.models.attention import AttentionOptions, current, in_use, use
from verl.models.fused_layers import Forward, FusedLayers, norm_constants, probe_rows, same
from verl.platform.device import FusedOperators, LayerOperators

Products = Callable[..., Tensor]
"""(x, *layers) → the outputs side by side of linear layers that read x."""


class SamplerLayers(FusedLayers):
    """The replacements that fit a model in sampling; made while the model attends by `attention.IMPLEMENTATION`."""

    def __init__(self, model: nn.Module, products: Products):
        self._products = products
        super().__init__(model)

    def forward_for(self, module: nn.Module, operators: FusedOperators | None) -> Forward | None:
        """See `FusedLayers`."""
        if operators is not None and operators.layer is not None and hasattr(module, "self_attn"):
            for gated in (True, False):
                try:
                    layer = _Layer(module, operators, operators.layer, self._products, gated)
                    if layer.fits():
                        return layer
                except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):
                    continue  # other parts, other inputs or other shapes: the layer keeps its own code
        return super().forward_for(module, operators)


class _Probe:
    """An `AttentionPlan` whose output shows queries, keys and values, and which notes how it was asked."""

    heads: tuple[int, int, int]
    options: AttentionOptions

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.heads, self.options = (query.shape[1], key.shape[1], query.shape[3]), options
        return (query + (2 * key - 3 * value).repeat_interleave(query.shape[1] // key.shape[1], 1)).transpose(1, 2)

    def mix(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        raise ValueError("a layer that carries a state")


class _Layer:
    """A decoder layer by a device's operators. AttributeError for a module without the parts of one, ValueError for
    parts of other kinds.

    gated: its MLP too is down(silu(gate(x))·up(x)), not a call of the module.
    """

    def __init__(self, module: Any, fused: FusedOperators, operators: LayerOperators, products: Products, gated: bool):
        self._module, self._attention, self._products = module, module.self_attn, products
        self._operators, self._rms_norm, self._swiglu = operators, fused.rms_norm, fused.swiglu
        self._inputs = self._attention.q_proj, self._attention.k_proj, self._attention.v_proj
        self._gates = (module.mlp.gate_proj, module.mlp.up_proj) if gated else None
        self._norms = [
            (norm, *self._constants(norm)) for norm in (module.input_layernorm, module.post_attention_layernorm)
        ]
        self._head_norms = [getattr(self._attention, name, None) for name in ("q_norm", "k_norm")]
        constants = {self._constants(norm) for norm in self._head_norms if norm is not None}
        if len(constants) > 1:
            raise ValueError("norms that differ")
        self._head_constants = constants.pop() if constants else (0.0, 0.0)

    def _constants(self, norm: nn.Module) -> tuple[float, float]:
        constants = norm_constants(norm, self._rms_norm)
        if constants is None:
            raise ValueError("a norm of another kind")
        return constants

    @torch.no_grad()
    def fits(self) -> bool:
        """Whether this gives what the module gives; tried once, before the first call."""
        weight, probe = self._norms[0][0].weight, _Probe()
        x = probe_rows(weight, len(weight))
        angles = probe_rows(weight, self._attention.head_dim)
        positions = angles.cos(), angles.sin()
        with use(probe):
            expected = self._module(x, position_embeddings=positions, attention_mask=None)
            self._heads, self._options = probe.heads, probe.options
            widths = {len(norm.weight) for norm in self._head_norms if norm is not None}
            if not widths <= {self._heads[2]} or self._options.sinks is not None:
                return False
            return same(self(x, position_embeddings=positions), expected)

    def __call__(self, hidden_states: Tensor, *more: Any, **named: Any) -> Any:
        """hidden_states [1, S, H] → [1, S, H]; named: position_embeddings, cos and sin [1, S, D]. Whatever the
        operators do not take goes to the module's own forward."""
        positions, shape = named.get("position_embeddings"), (1, hidden_states.shape[1], self._heads[2])
        fits = isinstance(positions, tuple) and all(x.shape == shape for x in positions) and len(hidden_states) == 1
        if not fits or more or named.get("past_key_values") is not None or torch.is_grad_enabled() or not in_use():
            return type(self._module).forward(self._module, hidden_states, *more, **named)
        (first, *constants), (second, *second_constants) = self._norms
        normed = self._rms_norm(hidden_states, first.weight, *constants)
        delta = self._products(self._attend(normed, *positions), self._attention.o_proj)
        residual, normed = self._operators.add_norm(hidden_states, delta, second.weight, *second_constants)
        return self._operators.add(residual, self._mlp(normed))

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        (queries, keys, width), joined = self._heads, self._products(x, *self._inputs)
        weights = [None if norm is None else norm.weight for norm in self._head_norms]
        self._operators.norm_rotate(joined, weights, *self._head_constants, cos, sin, queries, keys)
        q, k, v = joined.view(1, -1, queries + 2 * keys, width).transpose(1, 2).split((queries, keys, keys), 1)
        return current().attend(self._attention, q, k, v, self._options).flatten(2)

    def _mlp(self, x: Tensor) -> Tensor:
        if self._gates is None:
            return self._module.mlp(x)
        gate, up = self._products(x, *self._gates).chunk(2, -1)
        return self._products(self._swiglu(gate, up), self._module.mlp.down_proj)
