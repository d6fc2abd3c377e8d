"""Images of prompts in the embedded sampler: encoded once for a group and its later turns, prefilled span by span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from verl.engine.rollout.native.architecture import INSTEAD
from verl.engine.rollout.native.prefill_plan import PrefillSpan, PromptImages
from verl.errors import UserError
from verl.models.inputs import ImageFeatures, VisionInputs, takes_features
from verl.trajectory import Media

# Image tokens whose features are kept for later turns and for prompts that are computed again.
_KEPT_TOKENS = 65_536


class ImageEncoder:
    """`encoded` counts the images that went through the tower. UserError for a model that takes no features."""

    def __init__(self, model: Any, inputs: VisionInputs):
        if not takes_features(model):
            why = f"{type(model).__name__} takes no encoded images"
            raise UserError(f"the embedded sampler cannot show images to the model: {why}; {INSTEAD}")
        self._base, self._inputs = model.base_model, inputs
        self._features: WeakKeyDictionary[Media, ImageFeatures] = WeakKeyDictionary()
        self.encoded = 0

    def of_prompt(self, ids: np.ndarray, media: Media | None) -> PromptImages | None:
        """ValueError if the prompt's image tokens are not those of its images."""
        if media is not None:
            return PromptImages(media, self._inputs.context(ids, media))
        if (ids == self._inputs.image_token).any():
            raise ValueError("a prompt without images holds image tokens")
        return None

    def forget(self) -> None:
        """New weights: nothing that was encoded is true any more."""
        self._features.clear()

    def of_spans(self, spans: Sequence[PrefillSpan]) -> dict[str, Any]:
        """The forward's argument that holds the features of the image tokens of these spans; empty without any."""
        parts: list[ImageFeatures] = []
        for span in spans:
            if span.images is None or span.prompt is not None:
                continue
            first, last = span.images.context.before[[span.start, span.start + len(span.ids)]].tolist()
            if last > first:
                parts.append(self._encode(span.images.media).part(first, last))
        if parts:
            used = (span.images.media for span in spans if span.images is not None)
            self._drop_oldest(keep={leaf for media in used for leaf in media.leaves})
        return ImageFeatures.argument(parts)

    def _encode(self, media: Media) -> ImageFeatures:
        if media.parts:
            return ImageFeatures.joined([self._encode(leaf) for leaf in media.parts])
        features = self._features.get(media)
        if features is None:
            device = next(self._base.parameters()).device
            features = ImageFeatures.of(self._base, self._inputs.tensors([media], device))
            self._features[media] = features
            self.encoded += media.images
        return features

    def _drop_oldest(self, keep: set[Media]) -> None:
        total = sum(len(features.pooled) for features in self._features.values())
        for media in [key for key in self._features if key not in keep]:
            if total <= _KEPT_TOKENS:
                return
            total -= len(self._features.pop(media).pooled)
