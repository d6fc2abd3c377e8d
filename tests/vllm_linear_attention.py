"""Gated delta nets (Qwen3-Next, Qwen3.5) in float32 for vLLM's processes in tests: its kernels on a CPU compute in
bfloat16 alone, which hides whether all around them is right.

    S_t = exp(g_t)·S_{t-1} + β_t·(v_t − exp(g_t)·S_{t-1}·k_t)⊗k_t      o_t = S_t·q_t / √Dk

with q and k of length 1, g = −exp(A)·softplus(a + dt), β = sigmoid(b) (Gated Delta Networks, 2412.06464), and before it
a causal convolution over the last inputs. Written here token by token, from the formula.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus


@functools.cache
def add_float32() -> None:
    """Have vLLM compute such layers here where they are in float32; in bfloat16 its own kernels do."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import _resolve_layer_name

    kernel = gdn_attention.cpu_gdn_attention_core

    def attend(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:
        if mixed_qkv.dtype != torch.float32:
            return kernel(mixed_qkv, b, a, core_attn_out, layer_name)
        context = get_forward_context()
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        if context.attn_metadata is not None:
            metadata: Any = context.attn_metadata
            for rows, slots, accepted, drafts in _sequences(metadata[layer.prefix]):
                inputs = mixed_qkv[rows], a[rows], b[rows]
                core_attn_out[rows] = _sequence(layer, *inputs, slots, accepted, drafts)
        return None

    attend.__annotations__ = get_type_hints(kernel) | {"return": None}  # vLLM makes an operator of it by these
    gdn_attention.cpu_gdn_attention_core = attend


def _sequences(metadata: Any) -> Iterator[tuple[Tensor, list[int], int, bool]]:
    """Of each sequence of a batch: the rows of its tokens; the slots of its state, after each of its tokens where they
    are drafts; the number of its last tokens that were kept (0: it begins here); whether its tokens are drafts."""
    count, known = metadata.num_decodes + metadata.num_prefills, metadata.has_initial_state
    if count:
        starts = metadata.non_spec_query_start_loc.tolist()
        rows = metadata.non_spec_token_indx
        rows = torch.arange(starts[count]) if rows is None else rows
        for n in range(count):
            slot, kept = int(metadata.non_spec_state_indices_tensor[n]), known is None or bool(known[n])
            yield rows[starts[n] : starts[n + 1]], [slot], int(kept), False
    if metadata.num_spec_decodes:
        starts = metadata.spec_query_start_loc.tolist()
        for n in range(metadata.num_spec_decodes):
            rows = metadata.spec_token_indx[starts[n] : starts[n + 1]]
            slots = metadata.spec_state_indices_tensor[n].tolist()
            yield rows, slots, int(metadata.num_accepted_tokens[n]), True


def _sequence(layer: Any, mixed: Tensor, a: Tensor, b: Tensor, slots: list[int], accepted: int, drafts: bool) -> Tensor:
    """Outputs [S, heads, Dv] of a sequence's next S tokens; its states in the layer's cache go on."""
    convolved = _convolve(layer, mixed, slots[0], accepted, drafts)
    wide, states = layer.head_k_dim * layer.num_k_heads, layer.kv_cache[1]
    query, key, value = (
        part.unflatten(-1, (-1, size)).repeat_interleave(layer.num_v_heads // heads, 1)
        for part, size, heads in (
            (convolved[:, :wide], layer.head_k_dim, layer.num_k_heads),
            (convolved[:, wide : 2 * wide], layer.head_k_dim, layer.num_k_heads),
            (convolved[:, 2 * wide :], layer.head_v_dim, layer.num_v_heads),
        )
    )
    query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    decay, beta = (-layer.A_log.exp() * softplus(a + layer.dt_bias)).exp(), b.sigmoid()
    state = states[slots[accepted - 1]].clone() if accepted else torch.zeros_like(states[0])
    outputs = []
    for t in range(len(mixed)):
        state = state * decay[t, :, None, None]
        change = beta[t, :, None] * (value[t] - torch.einsum("hvk,hk->hv", state, key[t]))
        state = state + torch.einsum("hv,hk->hvk", change, key[t])
        outputs.append(torch.einsum("hvk,hk->hv", state, query[t]) * layer.head_k_dim**-0.5)
        if drafts:
            states[slots[t]] = state
    if not drafts:
        states[slots[0]] = state
    return torch.stack(outputs)


def _convolve(layer: Any, mixed: Tensor, slot: int, accepted: int, drafts: bool) -> Tensor:
    """The causal convolution of inputs [S, channels] and those before them. The cache holds the inputs before the next
    token; where the last ones are drafts, all that are before the next one if the first draft alone is kept, and on."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    weight, cache = layer.conv1d.weight, layer.kv_cache[0]
    cache = cache.transpose(1, 2) if is_conv_state_dim_first() else cache
    before = weight.shape[-1] - 1
    earlier = cache[slot, accepted - 1 : accepted - 1 + before] if accepted else mixed.new_zeros(before, mixed.shape[1])
    inputs = torch.cat((earlier, mixed))
    kept = inputs[1:] if drafts else inputs[-before:]
    cache[slot, : len(kept)] = kept
    return silu(conv1d(inputs.T[None], weight, groups=weight.shape[0]))[0].T
