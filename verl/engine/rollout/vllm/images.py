"""Images and videos of prompts for vLLM: it receives what the run's own processor made of them, and processes nothing.

An image is sent to vLLM's process once, as long as that one remembers it (`mm_processor_cache_gb`), and encoded once
for its group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.config.model_facts import VIDEOS_AS_ONE
from verl.engine.rollout.hosted import ImageTokens
from verl.engine.rollout.vllm import ENGINE
from verl.trajectory import VIDEO_SECONDS, Media

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What the processor makes of images, by the shape of it: a row for each patch, a row for each image.
_PIXELS, _GRIDS = "pixel_values", "image_grid_thw"
_NAMES = {"image": (_PIXELS, _GRIDS), "video": ("pixel_values_videos", "video_grid_thw")}
Item = tuple[str, str, np.ndarray, np.ndarray, float]
"""Modality, a name of its own, patches, grid [3], seconds between rows of time."""


class ImageInputs(ImageTokens):
    """The images of requests to one engine. config: the model's; processor: vLLM's `input_processor`.

    UserError for a model that was not seen to be right.
    """

    def __init__(self, config: PreTrainedConfig, processor: Any):
        super().__init__(ENGINE, config)
        self._processor, self._whole = processor, config.model_type in VIDEOS_AS_ONE
        # Kimi-VL's tower takes patches as small images, and grids of one frame.
        self._side = config.vision_config.patch_size if config.model_type == "kimi_vl" else 0

    def prompt(self, ids: Sequence[int], media: Media | None) -> dict[str, Any]:
        """What vLLM's engine takes for a prompt. ValueError where the image tokens are not those of the images."""
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import PlaceholderRange

        items = [] if media is None else list(self._items(media))
        places = self.ranges(ids, [item[3] for item in items])
        if not items:
            return dict(tokens_input(list(ids)))
        ranges: dict[str, list[Any]] = {}
        hashes: dict[str, list[str]] = {}
        for (modality, name, *_), (start, count) in zip(items, places, strict=True):
            ranges.setdefault(modality, []).append(PlaceholderRange(offset=start, length=count))
            hashes.setdefault(modality, []).append(name)
        return dict(mm_input(list(ids), self._tensors(items, hashes), hashes, ranges))

    def _items(self, media: Media) -> Iterator[Item]:
        """Each image and video. To a model whose prompts have a time before each row of a video its rows are images:
        its tower sees them one by one, too."""
        for leaf in media.leaves:
            grids = leaf.inputs[_GRIDS]
            parts = np.split(leaf.inputs[_PIXELS], grids.prod(-1).cumsum()[:-1])
            seconds = leaf.inputs.get(VIDEO_SECONDS, np.zeros(len(grids)))
            for number, (grid, part, between) in enumerate(zip(grids, parts, seconds, strict=True)):
                name = f"{leaf.key}-{number}"
                if between and self._whole:
                    yield "video", name, part, grid, float(between)
                else:
                    rows, frame = int(grid[0]), np.array([1, *grid[1:]])
                    yield from (("image", f"{name}.{i}", p, frame, 0.0) for i, p in enumerate(np.split(part, rows)))

    def _tensors(self, items: Sequence[Item], hashes: dict[str, list[str]]) -> Any:
        """The tensors of each; None for one that vLLM's process holds already."""
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

        tensors: dict[str, torch.Tensor] = {}
        fields: dict[str, Any] = {}
        for modality in hashes:
            pixels, grids = _NAMES[modality]
            mine = [item for item in items if item[0] == modality]
            tensors[pixels] = torch.from_numpy(np.concatenate([item[2] for item in mine]))
            tensors[grids] = torch.from_numpy(np.stack([item[3] for item in mine]))
            fields[pixels] = MultiModalFieldConfig.flat_from_sizes(modality, tensors[grids].prod(-1))
            fields[grids] = MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
            if modality == "video":
                tensors["second_per_grid_ts"] = torch.tensor([item[4] for item in mine])
                fields["second_per_grid_ts"] = MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
        if self._side:
            tensors[_PIXELS] = tensors[_PIXELS].unflatten(-1, (-1, self._side, self._side))
            tensors["image_grid_hws"], fields["image_grid_hws"] = tensors.pop(_GRIDS)[:, 1:], fields.pop(_GRIDS)
        prepared: Any = MultiModalKwargsItems.from_hf_inputs(tensors, fields)  # type: ignore[arg-type]
        self._processor.inject_into_mm_cache(hashes, prepared)
        return prepared
