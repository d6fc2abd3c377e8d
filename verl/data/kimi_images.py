"""What transformers lacks of Kimi-VL's processor: images without torchvision, and its tokenizer without code of its
own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import BaseImageProcessor, BatchFeature, TokenizersBackend
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_SIDE = 512  # patches, of the published tower's positions
_HAN_APART = "[{}&&[^\\p{{Han}}]]"
_UPPER, _LOWER = (_HAN_APART.format(kinds) for kinds in (r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"))
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PIECES = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""How the published tokenizer cuts a text before it merges bytes."""


class KimiVLImageProcessor(BaseImageProcessor):
    """The published one's settings and results: an image of more than `in_token_limit` patches is scaled down, its
    right and lower edge filled with black (`pad_input`; else cropped from its middle) to whole tokens."""

    model_input_names = ["pixel_values", "image_grid_thw"]  # noqa: RUF012

    def __init__(
        self,
        patch_size: int = 14,
        pad_input: bool = False,
        image_mean: Sequence[float] = (0.48145466, 0.4578275, 0.40821073),
        image_std: Sequence[float] = (0.26862954, 0.26130258, 0.27577711),
        in_token_limit: int = 4096,
        merge_kernel_size: Sequence[int] = (2, 2),
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.patch_size, self.pad_input, self.in_token_limit = patch_size, pad_input, in_token_limit
        self.image_mean, self.image_std, self.merge_kernel_size = image_mean, image_std, list(merge_kernel_size)

    @property
    def merge_size(self) -> int:
        """Patches a side that become one token."""
        return int(self.merge_kernel_size[0])

    def _sizes(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(height, width) that an image is scaled to, and of the whole tokens that it gets then. ValueError where
        there are none, or too many."""
        count = (width // self.patch_size) * (height // self.patch_size)
        if count > self.in_token_limit:
            scale = math.sqrt(self.in_token_limit / count)
            height, width = int(height * scale), int(width * scale)
        token = self.patch_size * self.merge_size
        rounded = math.ceil if self.pad_input else math.floor
        whole = rounded(height / token) * token, rounded(width / token) * token
        if not min(whole) or max(whole) >= _MOST_SIDE * self.patch_size:
            raise ValueError(f"an image of {width} × {height} pixels has no token, or a side of {_MOST_SIDE} patches")
        return (height, width), whole

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: Any = None) -> int:
        """Of an image, from its size."""
        _, (height, width) = self._sizes(height, width)
        return (height // self.patch_size) * (width // self.patch_size)

    def preprocess(self, images: Sequence[Image], **_: Any) -> BatchFeature:
        """RGB images → pixel_values float32 [patches, 3·p·p], image_grid_thw int64 [images, 3]."""
        patches, grids = zip(*(self._patches(image) for image in images), strict=True)
        return BatchFeature({"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids, np.int64)})

    def _patches(self, image: Image) -> tuple[np.ndarray, tuple[int, int, int]]:
        from PIL.Image import Resampling

        (height, width), (rows, columns) = self._sizes(image.height, image.width)
        if (height, width) != (image.height, image.width):
            image = image.resize((width, height), Resampling.BICUBIC)
        left, top = (0, 0) if self.pad_input else (round((width - columns) / 2), round((height - rows) / 2))
        pixels = np.asarray(image.crop((left, top, left + columns, top + rows)), np.float32) / 255  # black beyond it
        mean, deviation = (np.asarray(values, np.float32) for values in (self.image_mean, self.image_std))
        pixels = (pixels - mean) / deviation
        side = self.patch_size
        grid = rows // side, columns // side
        parts = pixels.reshape(grid[0], side, grid[1], side, 3).transpose(0, 2, 4, 1, 3)
        return np.ascontiguousarray(parts).reshape(grid[0] * grid[1], -1), (1, *grid)


Processor = Kimi_K25Processor


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a directory or hub id, from tokenizer.json or the published tiktoken.model."""
    from tokenizers import Regex, pre_tokenizers

    tokenizer = TokenizersBackend.from_pretrained(path)
    if str(getattr(tokenizer, "vocab_file", None) or "").endswith("tiktoken.model"):
        cut = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, as_bytes])
    return tokenizer
