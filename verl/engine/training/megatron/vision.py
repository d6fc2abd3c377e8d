"""Models that see images: the image encoder of transformers before megatron-core's layers.

    images ── tower ──▶ features ──▶ in the place of the image tokens' embeddings
                        └── of its inner layers (Qwen3-VL) ──▶ added to what the first layers give

The tower is whole on each rank of the first stage; ranks with the same rows compute the same. Its weights are part of
the stage's chunk under the name `vision_model`. Layers of the language model may be computed again in the backward
pass, the tower not with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from torch import Tensor

from verl.engine.training.megatron.micro_batches import ModelBatch, Turns
from verl.engine.training.weight_files import FileSource, untied
from verl.errors import UserError
from verl.models.adapters import PlainView
from verl.models.checkpoint_names import checkpoint_parts
from verl.models.inputs import ImageFeatures, VisionInputs
from verl.models.pretrained import fill_buffers

TOWER, HF_TOWER, HF_TEXT = "vision_model.", "model.visual.", "model.language_model."
"""Prefixes of names: the tower's in a chunk, the tower's and the language model's in transformers."""


class VisionTower:
    """The image encoder of `outline`, the Hugging Face model, given memory and put into `chunk`, the first one. Its
    weights have no values yet. UserError where the layers that take more features lie on several pipeline stages."""

    def __init__(self, outline: Any, chunk: Any, dtype: torch.dtype, device: torch.device):
        self._base, self._inputs = outline.base_model, VisionInputs(outline)
        self._sequence: bool = chunk.config.sequence_parallel
        self._batch: ModelBatch | None = None
        self._trains = False
        depth = len(getattr(outline.config.vision_config, "deepstack_visual_indexes", None) or ())
        if depth > len(chunk.decoder.layers):
            raise UserError(
                f"megatron.pipeline_model_parallel_size: the first {depth} layers take features of images and must be "
                f"on the first stage (and in its first virtual chunk), which has {len(chunk.decoder.layers)}; set a "
                f"smaller size"
            )
        if unknown := [name for name in fill_buffers(outline) if name.startswith(HF_TOWER)]:
            raise UserError(
                f"strategy=megatron: {unknown[0]} has no value before the model is loaded; use strategy=fsdp2"
            )
        tower = chunk.vision_model = self._base.visual
        for part in tower.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = _parameter(parameter.shape, dtype, device, self._sequence)
        tower.to(device)
        chunk.embedding.register_forward_hook(self._put_in)
        self._turns = [Turns() for _ in range(depth)]
        for number in range(depth):
            chunk.decoder.layers[number].register_forward_hook(partial(self._add, number))

    @property
    def weights(self) -> Any:
        """The module of transformers."""
        return self._base.visual

    def begin(self, *, trains: bool) -> None:
        """Before all passes over some micro-batches."""
        self._trains = trains
        for turns in self._turns:
            turns.clear()

    def expect(self, batch: ModelBatch) -> None:
        """The next pass is over this micro-batch."""
        self._batch = batch

    def _put_in(self, _embedding: Any, _args: Any, states: Tensor) -> Tensor:
        """Forward hook of the embedding: states [S, B, H] with the features of images in the place of their tokens'."""
        batch = self._batch
        assert batch is not None
        if not batch.pack.media:
            if torch.is_grad_enabled() and self._trains:  # gradients that travel early wait for all of a bucket
                tensors = VisionInputs.tensors([self._inputs.blank], states.device)
                blank = ImageFeatures.of(self._base, tensors)
                states = states + sum(part.sum() for part in (blank.pooled, *blank.deep)).to(states.dtype) * 0
            return states
        pooled, *deep = self._encoded(batch, states.dtype)
        if deep and deep[0].requires_grad:
            batch.deep = [part.detach().requires_grad_() for part in deep]
            pooled = _HandedOn.apply(pooled, batch.deep, *deep)
        else:
            batch.deep = deep
        is_image = self._spread(batch, torch.ones_like(pooled[:, :1])).bool()
        return torch.where(is_image, self._spread(batch, pooled), states)

    def _encoded(self, batch: ModelBatch, dtype: torch.dtype) -> list[Tensor]:
        """Features [image tokens, H] in the order of the pack: the encoder's output, and those for each of the first
        layers. An image of several rows goes through the tower once."""
        media = batch.pack.media
        distinct = list(dict.fromkeys(media))
        features = ImageFeatures.of(self._base, VisionInputs.tensors(distinct, batch.input_ids.device))
        ends, spans = 0, {}
        for item in distinct:
            start, ends = ends, ends + self._inputs.tokens(item)
            spans[item] = start, ends
        if len(distinct) < len(media):
            features = ImageFeatures.joined([features.part(*spans[item]) for item in media])
        return [part.to(dtype) for part in (features.pooled, *features.deep)]

    def _add(self, number: int, _layer: Any, _args: Any, out: Any) -> Any:
        """Forward hook of one of the first layers: its output with the tower's features of that number added."""
        assert self._batch is not None
        batch, _ = self._turns[number].take(self._batch, trains=self._trains)
        return (out[0] + self._spread(batch, batch.deep[number]), *out[1:]) if batch.deep else None

    def _spread(self, batch: ModelBatch, features: Tensor) -> Tensor:
        """[image tokens, H] → [S, B, H] of this rank, zero elsewhere."""
        places = batch.place[batch.pack.input_ids == self._inputs.image_token]
        width = features.shape[-1]
        whole = features.new_zeros(batch.size, width).index_copy(0, places, features)
        whole = whole.view(*batch.input_ids.shape, width).transpose(0, 1).contiguous()
        if self._sequence:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            whole = whole.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        return whole


def _parameter(shape: torch.Size, dtype: torch.dtype, device: torch.device, sequence_parallel: bool) -> Any:
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    # Of a part of the sequence: megatron-core adds such gradients over tensor-parallel ranks.
    parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    return parameter


class _HandedOn(torch.autograd.Function):
    """The features of embeddings, which take the gradients of those of inner layers with them: layers that are computed
    again leave these in `leaves`, and the gradient of the embeddings comes after that of all layers."""

    @staticmethod
    def forward(ctx, pooled, leaves, *_deep):  # type: ignore[no-untyped-def]
        ctx.leaves = leaves
        return pooled.view_as(pooled)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None, *(leaf.grad for leaf in ctx.leaves)


def interleave(rotary: Any, section: list[int]) -> None:
    """Make megatron-core's rotary positions those of Qwen3-VL: of each three frequencies one turns by time, one by
    height, one by width, as far as `section` goes, and the rest by time."""
    frequencies = rotary.inv_freq
    axis = torch.zeros(len(frequencies), dtype=torch.int64, device=frequencies.device)
    for number in (1, 2):
        axis[number : section[number] * 3 : 3] = number

    def angles(positions: Tensor, _section: Any, cp_group: Any = None) -> Tensor:
        turned = positions[axis].permute(2, 1, 0).to(frequencies.dtype) * frequencies  # [S, B, D / 2]
        return torch.cat((turned, turned), -1)[:, :, None]

    rotary.forward = angles


# -- weights ---------------------------------------------------------------------------------------------------

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def _place(name: str, state: dict[str, Tensor]) -> tuple[str, Any]:
    """The tensor of the Hugging Face model that has a weight, and its index there: experts are stacked."""
    match = _EXPERT.match(name)
    if match is None or name in state:
        return name, ...
    expert = int(match[2])
    if match[3] == "down":
        return f"{match[1]}.down_proj", expert
    stacked = f"{match[1]}.gate_up_proj"
    half = state[stacked].shape[1] // 2
    return stacked, (expert, slice(0, half) if match[3] == "gate" else slice(half, None))


class VisionFiles:
    """As `bridge.WeightFiles`, for names of the model of transformers. UserError where weights are missing."""

    def __init__(self, directory: Path, outline: Any):
        self._state, self._source = PlainView(outline).state(), FileSource(directory, outline)
        if missing := self._source.missing(untied(outline)):
            raise UserError(f"{directory}: weights are missing, for example {missing[0]}")
        self._whole = lru_cache(2)(lambda name: self._source.read(name, self._state[name]))

    def __contains__(self, name: str) -> bool:
        return True

    def read(self, name: str) -> Tensor:
        """The tensor of a name as mbridge has it."""
        whole, index = _place(name, self._state)
        return self._whole(whole)[index]


def stored(outline: Any, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors under the names of a checkpoint, from those that mbridge has; of a layer's experts all are
    collected."""
    state = PlainView(outline).state()
    stacks: dict[str, tuple[Tensor, int]] = {}
    for name, tensor in named:
        whole, index = _place(name, state)
        if index is not ...:
            stack, absent = stacks.pop(whole, None) or (tensor.new_empty(state[whole].shape), state[whole].numel())
            stack[index] = tensor
            if absent > tensor.numel():
                stacks[whole] = stack, absent - tensor.numel()
                continue
            tensor = stack
        yield from checkpoint_parts(outline, {whole: tensor}).items()
