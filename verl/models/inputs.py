"""The keyword arguments of a Hugging Face model's forward, built from packed tokens and images, and only here.

A vision-language model rotates by three positions (time, height, width). For a context with images or videos the
model's `get_rope_index` computes them; a token after the context has its index plus a constant. `mm_token_type_ids` are
needed only for that: a forward with given positions does not read them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from verl.config.model_facts import VIDEOS_AS_ONE, VISION_MODELS
from verl.errors import UserError
from verl.trajectory import VIDEO_SECONDS, Media

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SPECIAL = ("image_", "video_", "audio_", "vision_", "media_")


def model_inputs(
    input_ids: torch.Tensor, positions: torch.Tensor, media: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Arguments for tokens int64 [S], positions int64 [S] or [3, S] (time, height, width), `VisionInputs.tensors`.

    The attention plan (`verl.models.attention.use`) decides which tokens see each other, so there is no mask; keys and
    values are not cached.
    """
    more = media or {}
    return {"input_ids": input_ids[None], "position_ids": positions.unsqueeze(-2), "use_cache": False, **more}


def special_token_ids(config: PreTrainedConfig) -> list[int]:
    """Tokens that stand for images and the like or mark their begin and end; empty for a text model.

    They are never sampled, and a policy gives them no probability.
    """
    if not sees_images(config):
        return []
    token_ids = {key: value for key, value in config.to_dict().items() if key.endswith("_token_id")}
    special = {value for key, value in token_ids.items() if isinstance(value, int) and key.startswith(_SPECIAL)}
    return sorted(special & set(range(config.get_text_config().vocab_size)))


def sees_images(config: PreTrainedConfig) -> bool:
    """True for the configuration of a vision-language model."""
    return getattr(config, "vision_config", None) is not None


@dataclass(frozen=True, slots=True)
class ImageContext:
    """Where the tokens of a context with images are.

    positions  int64 [3, P]
    shift      of a later token, from its number in the sequence to its position
    before     int64 [P + 1], number of image tokens before each token
    """

    positions: np.ndarray
    shift: int
    before: np.ndarray

    def axes(self, first: int, count: int) -> np.ndarray:
        """Positions int64 [3, count] of the sequence's tokens from number `first` on."""
        recorded = self.positions[:, first : first + count]
        start = first + recorded.shape[1] + self.shift
        following = np.arange(start, start + count - recorded.shape[1])
        return np.concatenate((recorded, np.broadcast_to(following, (3, len(following)))), axis=1)


def text_axes(first: int, count: int) -> np.ndarray:
    """`ImageContext.axes` of a sequence without images."""
    return np.broadcast_to(np.arange(first, first + count), (3, count))


@dataclass(slots=True)
class ImageFeatures:
    """A vision tower's output for images.

    `pooled` [tokens, hidden] for each image token; `deep`: the same for each layer of the language model that takes
    more; `kind`: the model's class for it.
    """

    pooled: torch.Tensor
    deep: list[torch.Tensor]
    kind: Any

    @classmethod
    def of(cls, base: Any, tensors: Mapping[str, torch.Tensor]) -> ImageFeatures:
        """Run the tower of `base`, a model without its head. tensors: as `VisionInputs.tensors` gives them."""
        out = base.get_image_features(**tensors, return_dict=True)
        deep = [torch.cat(list(layer)) for layer in getattr(out, "deepstack_features", None) or ()]
        return cls(torch.cat(list(out.pooler_output)), deep, type(out))

    def part(self, first: int, last: int) -> ImageFeatures:
        """Those of the tokens `first` to `last`; of none they still hang on the tower's pass."""
        return ImageFeatures(self.pooled[first:last], [layer[first:last] for layer in self.deep], self.kind)

    @classmethod
    def joined(cls, parts: Sequence[ImageFeatures]) -> ImageFeatures:
        """Those of several, one after the other."""
        deep = [torch.cat(layer) for layer in zip(*(part.deep for part in parts), strict=True)]
        return cls(torch.cat([part.pooled for part in parts]), deep, parts[0].kind)

    @staticmethod
    def argument(parts: Sequence[ImageFeatures]) -> dict[str, Any]:
        """The argument of a forward whose image tokens have these features, in their order; empty without any."""
        if not parts:
            return {}
        deep = [list(layer) for layer in zip(*(part.deep for part in parts), strict=True)]
        more = {"deepstack_features": deep} if deep else {}
        features = parts[0].kind(pooler_output=[part.pooled for part in parts], **more)
        return {"mm_encoder_outputs": {"image": features}}


def takes_features(model: Any) -> bool:
    """True if the model's forward can be given `ImageFeatures` in the place of images."""
    return "mm_encoder_outputs" in inspect.signature(model.forward).parameters


def _after_last_frames(positions: torch.Tensor, tokens: np.ndarray, counts: torch.Tensor) -> None:
    """Let what follows a video begin after its largest position, as in the published model and vLLM; transformers'
    function takes the height and width alone, which a long video exceeds in time. In place: positions int64 [3, P];
    tokens: where those of images are; counts: of each image."""
    for last in tokens[counts.cumsum(0).numpy() - 1]:
        block = positions[:, : last + 1]
        late = int(block.max()) + 1 - int(positions[:, last + 1 :].min()) if last + 1 < positions.shape[1] else 0
        positions[:, last + 1 :] += max(0, late)


class VisionInputs:
    """The inputs of a vision-language model for contexts with images. UserError for an unsupported model type."""

    def __init__(self, model: Any):
        if model.config.model_type not in VISION_MODELS:
            name, supported = type(model).__name__, ", ".join(VISION_MODELS)
            raise UserError(f"images of {name} are not in this release; choose a model of type {supported}")
        self._base = model.base_model
        self.image_token = int(model.config.image_token_id)
        self._config = model.config
        self._merge = int(model.config.vision_config.spatial_merge_size)
        self._contexts: WeakKeyDictionary[Media, ImageContext] = WeakKeyDictionary()

    @classmethod
    def of(cls, model: Any) -> VisionInputs | None:
        """None for a text model."""
        return cls(model) if sees_images(model.config) else None

    @cached_property
    def blank(self) -> Media:
        """An image of one token with nothing in it, for a rank that must run the tower and has no image."""
        vision = self._config.vision_config
        numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = np.zeros((self._merge**2, numbers), np.float32)
        return Media({"pixel_values": pixels, "image_grid_thw": np.array([[1, self._merge, self._merge]])}, 1)

    def context(self, ids: np.ndarray, media: Media) -> ImageContext:
        """Of a context int64 [P]; found once. ValueError if its image tokens are not those of its images."""
        context = self._contexts.get(media)
        if context is None or context.positions.shape[1] != len(ids):
            context = self._contexts[media] = self._find(ids, media)
        return context

    def _find(self, ids: np.ndarray, media: Media) -> ImageContext:
        is_image, grid = ids == self.image_token, media.inputs["image_grid_thw"]
        expected = self.tokens(media)
        if int(is_image.sum()) != expected:
            raise ValueError(f"a context has {int(is_image.sum())} image tokens for images of {expected}")
        tokens, kinds = torch.from_numpy(ids)[None], is_image.astype(np.int32)
        seconds = torch.from_numpy(media.inputs.get(VIDEO_SECONDS, np.zeros(len(grid), np.float32)))
        video, grids = seconds > 0, torch.tensor(grid)
        more = {"image_grid_thw": grids[~video]}
        if video.any():  # to the model's function they are of a kind of their own
            kinds[is_image] = np.repeat(1 + video.int().numpy(), grid.prod(-1) // self._merge**2)
            more |= {"video_grid_thw": grids[video], "second_per_grid_ts": seconds[video]}
        positions, _ = self._base.get_rope_index(tokens, torch.from_numpy(kinds)[None], **more)
        if video.any() and self._config.model_type in VIDEOS_AS_ONE:
            _after_last_frames(positions[:, 0], np.flatnonzero(is_image), grids.prod(-1) // self._merge**2)
        # Later positions continue from the last token, as in a forward over the whole sequence. The function's second
        # result counts from the largest position, which in a long video is that of its last frame.
        shift = int(positions[:, 0, -1].max()) + 1 - len(ids)
        before = np.concatenate(([0], np.cumsum(is_image)))
        return ImageContext(positions[:, 0].numpy(), shift, before)

    def tokens(self, media: Media) -> int:
        """How many tokens of a context stand for these images."""
        return int(media.inputs["image_grid_thw"].prod(-1).sum()) // self._merge**2

    @staticmethod
    def tensors(media: Sequence[Media], device: torch.device | str) -> dict[str, torch.Tensor]:
        """The arguments of a forward whose tokens hold these images, in their order; empty without."""
        names = [name for name in media[0].inputs if name != VIDEO_SECONDS] if media else ()
        joined = {name: np.concatenate([item.inputs[name] for item in media]) for name in names}
        return {name: torch.from_numpy(array).to(device) for name, array in joined.items()}
