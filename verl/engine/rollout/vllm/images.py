"""Images of prompts for vLLM: it receives what the run's own processor made of them, and processes nothing.

An image is sent to vLLM's process once, as long as that one remembers it (`mm_processor_cache_gb`), and encoded once for
its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl.engine.rollout.hosted import ImageTokens
from verl.engine.rollout.vllm import ENGINE
from verl.trajectory import Media

_MODALITY = "image"
# What the processor makes of images, by the shape of it: a row for each patch, a row for each image.
_PIXELS, _GRIDS = "pixel_values", "image_grid_thw"


class ImageInputs(ImageTokens):
    """The images of requests to one engine. config: the model's; processor: vLLM's `input_processor`.

    UserError for a model that was not seen to be right.
    """

    def __init__(self, config: Any, processor: Any):
        super().__init__(ENGINE, config)
        self._processor = processor

    def prompt(self, ids: Sequence[int], media: Media | None) -> dict[str, Any]:
        """What vLLM's engine takes for a prompt. ValueError where the image tokens are not those of the images."""
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import PlaceholderRange

        ranges = [PlaceholderRange(offset=start, length=count) for start, count in self.ranges(ids, media)]
        if media is None:
            return dict(tokens_input(list(ids)))
        hashes = {_MODALITY: [f"{img.key}-{number}" for img in media.leaves for number in range(img.images)]}
        return dict(mm_input(list(ids), self._items(media, hashes), hashes, {_MODALITY: ranges}))

    def _items(self, media: Media, hashes: dict[str, list[str]]) -> Any:
        """The tensors of each image; None for one that vLLM's process holds already."""
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

        tensors: Any = {name: torch.from_numpy(media.inputs[name]) for name in (_PIXELS, _GRIDS)}
        fields = {
            _PIXELS: MultiModalFieldConfig.flat_from_sizes(_MODALITY, tensors[_GRIDS].prod(-1)),
            _GRIDS: MultiModalFieldConfig.batched(_MODALITY, keep_on_cpu=True),
        }
        items: Any = MultiModalKwargsItems.from_hf_inputs(tensors, fields)
        self._processor.inject_into_mm_cache(hashes, items)
        return items
