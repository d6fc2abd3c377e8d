"""A reward for the similarity of a response and the prompt's image, by a CLIP model (CLIPScore, arXiv 2104.08718).

reward_model.images=True
custom_reward_function.path=pkg://verl.reward.clip
custom_reward_function.reward_kwargs.model=DIRECTORY
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

_KEPT_IMAGES = 256


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    model: str,
    weight: float = 2.5,
) -> dict[str, Any]:
    """`{score, clip_similarity}`: `weight` · max(0, cosine), and the cosine of the response and the prompt's image;
    several images count as their mean.

    `model` is a directory or hub id with a text and an image tower (CLIP, SigLIP). Text beyond its length is cut.
    ValueError for a row without images.
    """
    images = (extra_info or {}).get("images")
    if not images:
        raise ValueError("CLIP compares with the row's image: it has none, or reward_model.images is not set")
    text = _text_features(model, solution_str)
    similarity = float(sum(text @ _image_features(model, uri) for uri in images) / len(images))
    return {"score": weight * max(0.0, similarity), "clip_similarity": similarity}


@cache
def _load(path: str) -> tuple[Any, Any, Any]:
    """(model, tokenizer, image processor) of a directory, the last for Pillow: torchvision is not needed."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    model = AutoModel.from_pretrained(path).eval()
    if not hasattr(model, "get_image_features") or not hasattr(model, "get_text_features"):
        raise ValueError(f"reward_kwargs.model={path}: {type(model).__name__} sees no texts and images")
    return model, AutoTokenizer.from_pretrained(path), AutoImageProcessor.from_pretrained(path, backend="pil")


def _text_features(path: str, text: str) -> Any:
    model, tokenizer, _ = _load(path)
    longest = model.config.text_config.max_position_embeddings
    # SigLIP was trained on padded texts, and takes what its last position says.
    padding = "max_length" if model.config.model_type.startswith("siglip") else False
    ids = tokenizer(text or " ", truncation=True, padding=padding, max_length=longest, return_tensors="pt")
    return _unit(model.get_text_features, input_ids=ids["input_ids"])


@lru_cache(_KEPT_IMAGES)
def _image_features(path: str, uri: str) -> Any:
    from verl.data.media import decoded, open_image

    model, _, processor = _load(path)
    inputs = processor(images=[decoded(open_image(uri, Path()))], return_tensors="pt")
    return _unit(model.get_image_features, pixel_values=inputs["pixel_values"])


def _unit(features: Any, **inputs: Any) -> Any:
    """What a tower gives of one input, as a vector of length 1, [dimensions]."""
    import torch

    with torch.inference_mode():
        output = features(**inputs)
        vector = getattr(output, "pooler_output", output)[0]
        return vector / vector.norm()
