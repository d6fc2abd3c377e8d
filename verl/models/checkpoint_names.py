"""A model's own memory under the names of its Hugging Face checkpoint: for reading and writing weights in place.

Some architectures hold tensors fused in memory that are apart on disk (the experts of a layer, gate and up
projections). transformers converts by copying; here each name becomes a strided view of the fused tensor instead.
Which view is found by converting a tensor of element numbers: the strides are read off the result and checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from verl.models.mtp import NAME

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Experts that are [E, in, out] in published checkpoints and [E, out, in] in the model. transformers (5.19) transposes
# them when it reads but, judging by the shape alone, not when it writes, which vLLM cannot read.
_TURNED = {"qwen3_vl_moe": (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")}


def checkpoint_parts(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors for these tensors of the model, by checkpoint name: views or new, maybe not contiguous.

    Square experts stay as they are: transformers cannot see that they were transposed.
    """
    from transformers.core_model_loading import revert_weight_conversion

    further = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{NAME}.") and hasattr(model, NAME)}
    if further:
        parts = checkpoint_parts(model, {name: tensor for name, tensor in tensors.items() if name not in further})
        return parts | {key: value for name in further for key, value in _further(model, name, tensors[name])}
    parts = revert_weight_conversion(model, dict(tensors))
    turned = _TURNED.get(model.config.model_type, ())
    for name in [name for name in parts if turned and name.endswith(turned) and name in tensors]:
        tensor = parts[name]
        if tensor.shape == tensors[name].shape and tensor.shape[1] != tensor.shape[2]:
            parts[name] = tensor.transpose(1, 2)
    return parts


def _further(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of the layer that predicts further tokens (`verl.models.mtp`)."""
    layer: Any = getattr(model, NAME)
    start, alike = layer.name_in_files(name.removeprefix(f"{NAME}."))
    if not alike:
        yield start, tensor
        return
    number = layer.pattern.rstrip(".").rpartition(".")[2]
    for key, value in checkpoint_parts(model, {alike: tensor}).items():
        yield start + key.partition(f"layers.{number}.")[2], value


# Where the numbers of a view are in the tensor that it shows: size, stride, offset.
_Place = tuple[tuple[int, ...], tuple[int, ...], int]


class CheckpointViews:
    """Names of the checkpoint → views of the model's tensors; found once, derived anew at each use.

    Raises ValueError for an architecture whose checkpoint is no rearrangement of its memory.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        # Checkpoint name → the model's tensor that it is in, and where.
        self._places: dict[str, tuple[str, _Place]] = {}
        for source, tensor in model.state_dict().items():
            for name, place in _parts(model, source, tensor):
                self._places[name] = source, place

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, view of the model's tensor), tied names too."""
        state = self._model.state_dict()
        for name, (source, (size, stride, offset)) in self._places.items():
            tensor = state[source]
            yield name, tensor.as_strided(size, stride, tensor.storage_offset() + offset)

    def missing(self, given: set[str]) -> list[str]:
        """Names that neither `given` nor another name of the same memory covers.

        `given` may hold names of the checkpoint and of the model's own (fused) tensors.
        """
        memory = {name: (view.data_ptr(), tuple(view.shape), view.stride()) for name, view in self.named()}
        covered = {memory[n] for n, (source, _) in self._places.items() if n in given or source in given}
        return [name for name, place in memory.items() if place not in covered]


def _parts(model: PreTrainedModel, source: str, tensor: torch.Tensor) -> Iterator[tuple[str, _Place]]:
    """The names that the model's tensor `source` has in a checkpoint, each with its place in it."""
    shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    names = checkpoint_parts(model, {source: shape})
    if len(names) == 1 and next(iter(names.values())) is shape:
        yield next(iter(names)), (tuple(tensor.shape), tensor.stride(), 0)
        return
    numbers = torch.arange(tensor.numel()).view(tensor.shape)
    for name, view in checkpoint_parts(model, {source: numbers}).items():
        origin = (0,) * view.ndim
        offset = int(view[origin]) if view.numel() else 0
        stride = tuple(
            int(view[tuple(int(d == axis) for d in range(view.ndim))]) - offset if view.shape[axis] > 1 else 0
            for axis in range(view.ndim)
        )
        if min(stride, default=0) < 0 or not torch.equal(view, numbers.view(-1).as_strided(view.shape, stride, offset)):
            raise ValueError(
                f"{type(model).__name__}: {name} of the checkpoint is not a part of {source} that can be written "
                "in place"
            )
        yield name, (tuple(view.shape), stride, offset)
