"""Images of prompts for vLLM: it receives what the run's own processor made of them, and processes nothing.

So sampler and trainer see the same tokens, pixels and grids, whatever vLLM's processor would make of an image. An image
is sent to vLLM's process once, as long as that one remembers it (`mm_processor_cache_gb`), and encoded once for its
group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl.engine.rollout.vllm import ENGINE
from verl.errors import UserError
from verl.models.inputs import special_token_ids
from verl.trajectory import VIDEO_SECONDS, Media

_MODALITY = "image"
# What the processor makes of images, by the shape of it: a row for each patch, a row for each image.
_PIXELS, _GRIDS = "pixel_values", "image_grid_thw"


class ImageInputs:
    """The images of requests to one engine. config: the model's; processor: vLLM's `input_processor`.

    `forbidden`: tokens that are never sampled. UserError for a model that was not seen to be right.
    """

    def __init__(self, config: Any, processor: Any):
        if config.model_type not in ENGINE.capabilities.images:
            raise UserError(f"vllm is not shown images of {config.model_type} here; set rollout.name=native")
        self.forbidden = special_token_ids(config)
        self._token, self._patches = config.image_token_id, config.vision_config.spatial_merge_size**2
        self._processor = processor

    def prompt(self, ids: Sequence[int], media: Media | None) -> dict[str, Any]:
        """What vLLM's engine takes for a prompt. ValueError where the image tokens are not those of the images."""
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import PlaceholderRange

        places = np.flatnonzero(np.asarray(ids) == self._token)
        if media is None:
            if len(places):
                raise ValueError("a prompt without images holds image tokens")
            return dict(tokens_input(list(ids)))
        if VIDEO_SECONDS in media.inputs:
            raise ValueError("videos are not sampled by vllm in this release; set rollout.name=native")
        counts = (media.inputs[_GRIDS].prod(-1) // self._patches).tolist()
        if len(places) != sum(counts):
            raise ValueError(f"a prompt has {len(places)} image tokens for images of {sum(counts)}")
        pairs = zip(np.cumsum([0, *counts[:-1]]), counts, strict=True)
        ranges = [PlaceholderRange(offset=int(places[start]), length=count) for start, count in pairs]
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
