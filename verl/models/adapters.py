"""A model with low-rank adapters in it, seen as the model without: its names, its weights merged, its adapters off.

    y = W·x + s·B·(A·x)        merged weight: W + s·B·A        (LoRA, 2106.09685)

The layers are peft's, put in place of the model's own (`verl.engine.training.lora`); they are known here by their
parts, so that nothing of peft is imported. For a model without adapters everything is as if this were not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl.models.checkpoint_names import checkpoint_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "default"
"""What peft calls the one adapter that a model has here."""
_BASE = ".base_layer"
_PARTS = (".lora_A.", ".lora_B.")

Gather = Callable[[torch.Tensor], torch.Tensor]
"""Makes a tensor whole: sharding's gathering, or nothing."""


def as_is(tensor: torch.Tensor) -> torch.Tensor:
    """The `Gather` of tensors that are whole."""
    return tensor


def is_adapted(module: nn.Module) -> bool:
    """True for a layer that has an adapter."""
    return isinstance(getattr(module, "lora_A", None), nn.ModuleDict) and hasattr(module, "base_layer")


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Name → layer, for all layers with an adapter. Names are those of peft's files."""
    return {name: part for name, part in module.named_modules() if is_adapted(part)}


def plain_name(name: str) -> str | None:
    """A `state_dict` name as it is in the model without adapters; None for a tensor of an adapter."""
    return None if any(part in name for part in _PARTS) else name.replace(_BASE, "")


def adapter_name(name: str) -> str:
    """The name of an adapter's tensor in peft's files, less their prefix: without the adapter's own name."""
    return name.replace(f".{NAME}.", ".")


class PlainView:
    """The tensors of a model under the names that they have without adapters, and their merged values."""

    def __init__(self, module: nn.Module):
        self._module = module
        self.layers = adapted_layers(module)
        self._of: dict[str, list[Any]] = {}
        for path, layer in self.layers.items():
            name = path.replace(_BASE, "") + "." + getattr(layer, "parameter_name", "weight")
            self._of.setdefault(name, []).append(layer)

    def state(self) -> dict[str, torch.Tensor]:
        """`state_dict` without the adapters' tensors: weights as they were loaded."""
        state = self._module.state_dict()
        if not self.layers:
            return state
        return {plain: tensor for name, tensor in state.items() if (plain := plain_name(name)) is not None}

    def merged(self, name: str, tensor: torch.Tensor, whole: Gather = as_is) -> torch.Tensor:
        """The whole tensor of a name of `state`, with its adapter added: a new tensor then, otherwise the same."""
        full = whole(tensor).detach()
        for layer in self._of.get(name, ()):
            full = full + delta(layer, whole)
        return full

    def adapter_state(self) -> dict[str, torch.Tensor]:
        """Every adapter's tensors (not copies) under `adapter_name`."""
        if not self.layers:
            return {}
        state = self._module.state_dict()
        return {adapter_name(name): tensor for name, tensor in state.items() if plain_name(name) is None}


@torch.no_grad()
def delta(layer: Any, whole: Gather = as_is) -> torch.Tensor:
    """s·B·A in the shape of the weight that the layer adapts: [out, in], or [experts, …] for experts in one tensor.

    peft keeps the adapters of E experts as A [E·r, in] and B [out, r·E], the latter with experts innermost.
    """
    a = whole(layer.lora_A[NAME].weight).detach()
    b = whole(layer.lora_B[NAME].weight).detach()
    scale = float(layer.scaling[NAME])
    experts = int(getattr(layer, "num_experts", 1))
    if experts == 1:
        product = (b @ a).mul_(scale)
        return product.t() if getattr(layer, "fan_in_fan_out", False) else product
    per_a = a.reshape(experts, -1, a.shape[-1])
    per_b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    product = torch.bmm(per_b, per_a).mul_(scale)
    # Experts stored as [in, out] are not swapped in peft's words.
    return product if layer._did_swap_in_out_features else product.transpose(1, 2)


def merged_weight(layer: Any) -> torch.Tensor:
    """The weight that a linear layer computes with, its adapter added where it has one."""
    if not is_adapted(layer):
        return layer.weight.detach()
    return layer.base_layer.weight.detach() + delta(layer)


def exported(module: PreTrainedModel, whole: Gather = as_is) -> Iterator[tuple[str, torch.Tensor]]:
    """Merged weights under the names of a Hugging Face checkpoint, tied ones too, one parameter at a time."""
    view = PlainView(module)
    for name, tensor in view.state().items():
        yield from checkpoint_parts(module, {name: view.merged(name, tensor, whole)}).items()
