"""Low-rank adapters beside megatron-core's layers, under the names and with the start values of the Hugging Face
model's.

    column-parallel   y_i = W_i·x + s·B_i·(A·x)              B cut as the output is, A whole on every rank
    row-parallel      y = Σ_i W_i·x_i + s·B·(Σ_i A_i·x_i)    A cut as the input is, B whole

A layer that is several in a Hugging Face model (queries, keys and values; gate and up) has an adapter for each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mbridge.core.util import broadcast_from_megatron_pp
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from verl.config import model_facts
from verl.engine.training import lora
from verl.engine.training.megatron import bridge as bridges
from verl.engine.training.process_group import all_gather_json, on_all_ranks
from verl.errors import UserError
from verl.models import adapters

_COLUMN, _ROW = 0, 1


class LayerAdapters(torch.nn.Module):
    """The adapters of a chunk of layers, a child of it. They are added while `is_on`."""

    def __init__(self, chunk: Any, bridge: Any, adapter: lora.Adapter, source: lora.AdapterSource, dtype: torch.dtype):
        super().__init__()
        self.is_on = True
        self.weights = torch.nn.ParameterList()
        self.names: list[str] = []  # of `weights` in PEFT's files, without their prefix
        self._config = chunk.config
        self._device, self._dtype, self._source = next(chunk.parameters()).device, dtype, source
        outline = adapter._module
        wanted, of = adapters.adapted_layers(outline), bridge._weight_name_mapping_mcore_local_to_global(chunk)
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        if (groups := chunk.config.num_query_groups) % ranks:
            raise UserError(
                f"megatron.tensor_model_parallel_size={ranks} does not divide the model's {groups} key-value heads, by "
                "which adapters of attention are cut: set a size that does, or use strategy=fsdp2"
            )
        for path, layer in chunk.named_modules():
            weight = getattr(layer, "weight", None)
            dim = getattr(weight, "partition_dim", -1)
            if f"{path}.weight" not in of or dim not in (_COLUMN, _ROW) or ".experts." in path:
                continue
            parts = [n.removesuffix(".weight") for n in bridge._weight_name_mapping_mcore_to_hf(of[f"{path}.weight"])]
            if any(name in wanted for name in parts):
                places = {name: self._add(name, wanted[name], dim) for name in parts if name in wanted}
                widths = [
                    outline.get_submodule(name).out_features // (ranks if dim == _COLUMN else 1) for name in parts
                ]
                layer.register_forward_hook(
                    partial(self._added, [*zip(map(places.get, parts), widths, strict=True)], dim)
                )

    def _add(self, name: str, layer: Any, dim: int) -> tuple[int, float]:
        """(place of A in `weights`, followed by B; scale)."""
        place = len(self.weights)
        for part in ("lora_A", "lora_B"):
            full = f"{name}.{part}.weight"
            like = getattr(layer, part)[adapters.NAME].weight
            cut = _cut_dim(part, dim)
            value = _share(self._source.read(full, torch.empty(like.shape, device="meta")), cut)
            parameter = torch.nn.Parameter(value.to(self._device, self._dtype))
            set_tensor_model_parallel_attributes(parameter, cut is not None, -1 if cut is None else cut, 1)
            # Of a part of the sequence: megatron-core adds such gradients over tensor-parallel ranks.
            parameter.sequence_parallel = cut is None and self._config.sequence_parallel  # type: ignore[attr-defined]
            self.weights.append(parameter)
            self.names.append(full)
        return place, float(layer.scaling[adapters.NAME])

    def _added(self, parts: Sequence[tuple[Any, int]], dim: int, layer: Any, args: Any, out: Any) -> Any:
        """Forward hook of an adapted layer: its output with the adapters' added. parts: (place and scale, or None;
        width) of each Hugging Face layer in it."""
        if not self.is_on:
            return None
        inputs = args[0]
        if (scale := getattr(layer, "layer_norm_weight", None)) is not None:  # TransformerEngine's, fused with a norm
            scale = scale + 1 if self._config.layernorm_zero_centered_gamma else scale
            inputs = rms_norm(inputs, scale.shape, scale, self._config.layernorm_epsilon)
        nothing = out[0].new_zeros(()).expand(*out[0].shape[:-1], 1)
        deltas = [
            nothing.expand(*nothing.shape[:-1], n) if at is None else self._delta(inputs, dim, *at) for at, n in parts
        ]
        # Queries, keys and values lie side by side for each group of heads.
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        groups = self._config.num_query_groups // ranks if len(parts) == 3 else 1
        return out[0] + torch.cat([d.unflatten(-1, (groups, -1)) for d in deltas], -1).flatten(-2), *out[1:]

    def _delta(self, inputs: Tensor, dim: int, place: int, scale: float) -> Tensor:
        low, sequence = linear(inputs, self.weights[place]), self._config.sequence_parallel
        if dim == _COLUMN:
            share = tensor_parallel.gather_from_sequence_parallel_region
            low = share(low) if sequence else tensor_parallel.copy_to_tensor_model_parallel_region(low)
        else:
            add = tensor_parallel.reduce_scatter_to_sequence_parallel_region
            low = add(low) if sequence else tensor_parallel.reduce_from_tensor_model_parallel_region(low)
        return linear(low, self.weights[place + 1]) * scale

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """For megatron-core's checkpoints of the optimizer."""
        cuts = {name: w.partition_dim for name, w in self.named() if w.tensor_model_parallel}
        return make_sharded_tensors_for_checkpoint(dict(self.named()), prefix, cuts, sharded_offsets)

    def named(self) -> Iterator[tuple[str, Any]]:
        """(name in PEFT's files, this rank's share)."""
        return zip(self.names, self.weights, strict=True)


def _cut_dim(part: str, dim: int) -> int | None:
    """The dimension of A or B that tensor-parallel ranks have parts of; None if each has the whole."""
    return {("lora_A", _ROW): 1, ("lora_B", _COLUMN): 0}.get((part, dim))


def _share(tensor: Tensor, cut: int | None) -> Tensor:
    if cut is None:
        return tensor
    size = parallel_state.get_tensor_model_parallel_world_size()
    return tensor.chunk(size, cut)[parallel_state.get_tensor_model_parallel_rank()].contiguous()


class MegatronAdapter(lora.Adapter):
    """The adapter in a model's chunks of layers."""

    def __init__(
        self,
        outline: Any,
        settings: lora.LoraSettings,
        seed: int,
        bridge: Any,
        chunks: Sequence[Any],
        dtype: torch.dtype,
    ):
        """Put it in, and freeze everything else. chunks: not wrapped yet. UserError for layers that are neither column-
        nor row-parallel. Collective."""
        injected = on_all_ranks(lambda: lora.inject(outline, settings))
        super().__init__(outline, injected._config, settings)
        source = on_all_ranks(lambda: lora.AdapterSource(outline, settings, seed, None))
        self._bridge, self._chunks = bridge, [unwrap_model(chunk) for chunk in chunks]
        for chunk in self._chunks:
            chunk.requires_grad_(False)
            chunk.adapters = LayerAdapters(chunk, bridge, injected, source, dtype)
            if chunk.pre_process:  # layers that are computed again need an input with a gradient
                chunk.embedding.register_forward_hook(lambda _module, _args, states: states.requires_grad_())
        put_in = {
            name for part in all_gather_json([n for c in self._chunks for n in c.adapters.names]) for name in part
        }
        if absent := sorted(adapters.adapted_layers(outline).keys() - {n.rpartition(".lora_")[0] for n in put_in}):
            raise UserError(
                f"model.target_modules: strategy=megatron has adapters of attention and dense layers, {absent[0]} is "
                "none: set model.target_modules=[q_proj,k_proj,v_proj,o_proj]"
            )

    @property
    def is_on(self) -> bool:
        """See `lora.Adapter.is_on`."""
        return all(chunk.adapters.is_on for chunk in self._chunks)

    @contextmanager
    def off(self) -> Iterator[None]:
        """See `lora.Adapter.off`."""
        for chunk in self._chunks:
            chunk.adapters.is_on = False
        try:
            yield
        finally:
            for chunk in self._chunks:
                chunk.adapters.is_on = True

    @torch.no_grad()
    def fill(self, value: float, layers: Collection[str] | None = None) -> list[str]:
        """See `lora.Adapter.fill`; the names of this rank's layers."""
        factors = [(n, w) for chunk in self._chunks for n, w in chunk.adapters.named() if ".lora_B" in n]
        names = [name.partition(".lora_B")[0] for name, _ in factors]
        for name, (_, weight) in zip(names, factors, strict=True):
            weight.fill_(value if layers is None or name in layers else 0.0)
        return names

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `lora.Adapter.tensors`; float32, every rank gets every tensor. Collective."""
        mine = {name: weight for chunk in self._chunks for name, weight in chunk.adapters.named()}
        for name in adapters.PlainView(self._module).adapter_state():
            tensor = mine.get(name)
            if tensor is not None and tensor.tensor_model_parallel:
                parts = [torch.empty_like(tensor) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
                dist.all_gather(parts, tensor.data, group=parallel_state.get_tensor_model_parallel_group())
                tensor = torch.cat(parts, tensor.partition_dim)
            yield name, broadcast_from_megatron_pp(tensor).detach().float()

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Weights with the adapter added, float32, under Hugging Face names on every rank. Collective."""
        adapter, layers = dict(self.tensors()), adapters.adapted_layers(self._module)
        for name, weight in bridges.export(self._bridge, self._chunks):
            layer = name.removesuffix(".weight")
            full = weight.float()
            if layer in layers:
                a, b = (adapter[f"{layer}.{part}.weight"] for part in ("lora_A", "lora_B"))
                full = full + (b @ a).mul_(float(layers[layer].scaling[adapters.NAME]))
            yield name, full

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """See `lora.Adapter.load`."""
        state = adapters.PlainView(self._module).adapter_state()
        saved = on_all_ranks(lambda: lora.read_tensors(directory / model_facts.ADAPTER_FOLDER, state))
        for chunk in self._chunks:
            for name, weight in chunk.adapters.named():
                weight.copy_(_share(saved[name], weight.partition_dim if weight.tensor_model_parallel else None))
        if any((directory / name).is_file() for name in bridges.WEIGHT_FILES):
            files = on_all_ranks(lambda: self._bridge.files(directory))
            for name, weight in self.merged():
                self.refuse_other_base(directory, name, weight.cpu(), files.read(name).float())
