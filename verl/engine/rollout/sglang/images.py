"""Images of prompts for SGLang: it receives what the run's own processor made of them, and processes nothing."""

from __future__ import annotations

from typing import Any

import torch

from verl.engine.rollout.hosted import ImageTokens, Live
from verl.trajectory import VIDEO_SECONDS


class ImageInputs(ImageTokens):
    """The images of requests to one engine."""

    def options(self, live: Live) -> dict[str, Any]:
        """Arguments of SGLang's request for its images. ValueError where the image tokens are not those of the
        images."""
        grids = () if live.media is None else live.media.inputs["image_grid_thw"]
        if live.media is not None and VIDEO_SECONDS in live.media.inputs:
            raise ValueError(f"request {live.id!r}: videos are not sampled by sglang here; set rollout.name=native")
        try:
            self.ranges(live.prompt, grids)
        except ValueError as error:
            raise ValueError(f"request {live.id!r}: {error}") from error
        if live.media is None:
            return {}
        # SGLang takes the images of a prompt as one item and finds their places by itself.
        tensors = {name: torch.from_numpy(array) for name, array in live.media.inputs.items()}
        return {"image_data": [{"format": "processor_output", **tensors}]}
