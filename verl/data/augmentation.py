"""Random augmentation of the images of training rows: rotation, crop, colour jitter, or a user's function.

The random draw depends only on the seed, the epoch, the row's file and number, and the image's position in the row: a
resumed run sees the same images, and each epoch sees others. The built-in changes keep an image's size, and so the
number of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.rows import BadRow

if TYPE_CHECKING:
    from PIL.Image import Image

    from verl.config.schema.data import AugmentationConfig
    from verl.config.schema.entries import Config


class Augmentation:
    """The changes that the group `data.augmentation` asks for. `seed`: that of the run's data."""

    def __init__(self, settings: AugmentationConfig, seed: int):
        from verl.data.load_object import load_extern_object

        self._settings, self._seed = settings, seed % 2**64
        self._own: Any = load_extern_object(settings.path, settings.name) if settings.path else None

    @classmethod
    def of(cls, config: Config) -> Augmentation | None:
        """Of a run's configuration; None where it changes nothing."""
        settings, data = config.data.augmentation, config.data
        if not (settings.path or settings.rotate or settings.crop < 1 or settings.color_jitter):
            return None
        return cls(settings, int(data.seed if data.seed is not None else config.trainer.seed))

    def __call__(self, images: Sequence[Image], epoch: int, file: int, row: int) -> list[Image]:
        """A row's images (RGB) in an epoch. BadRow where the user's function fails."""
        place = (self._seed, epoch, file, row)
        return [self._changed(image, np.random.default_rng([*place, n])) for n, image in enumerate(images)]

    def _changed(self, image: Image, rng: np.random.Generator) -> Image:
        settings = self._settings
        if settings.crop < 1:
            image = _cropped(image, settings.crop, rng)
        if settings.rotate:
            from PIL.Image import Resampling

            angle = rng.uniform(-settings.rotate, settings.rotate)
            image = image.rotate(angle, resample=Resampling.BICUBIC, fillcolor="white")
        if settings.color_jitter:
            image = _recoloured(image, settings.color_jitter, rng)
        return image if self._own is None else self._by_user(image, rng)

    def _by_user(self, image: Image, rng: np.random.Generator) -> Image:
        from PIL.Image import Image

        name = f"data.augmentation.name={self._settings.name}"
        try:
            changed = self._own(image, rng)
        except Exception as error:  # user code
            raise BadRow("augmentation failed", f"{name}: {type(error).__name__}: {error}") from error
        if not isinstance(changed, Image):
            raise BadRow("augmentation failed", f"{name} returned {type(changed).__name__}, not a Pillow image")
        return changed.convert("RGB")


def _cropped(image: Image, least: float, rng: np.random.Generator) -> Image:
    """A window of `least` to all of each side, at a place drawn, scaled (bicubic) to the size of the whole."""
    share = rng.uniform(least, 1.0)
    width, height = (max(1, round(share * side)) for side in image.size)
    x, y = int(rng.integers(image.width - width + 1)), int(rng.integers(image.height - height + 1))
    return image.resize(image.size, box=(x, y, x + width, y + height))


def _recoloured(image: Image, strength: float, rng: np.random.Generator) -> Image:
    from PIL import ImageEnhance

    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = change(image).enhance(rng.uniform(1 - strength, 1 + strength))
    return image
