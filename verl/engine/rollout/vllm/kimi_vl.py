"""Kimi-VL in vLLM's processes without the code that the published model brings: its tokenizer, and its processor, which
vLLM asks how many tokens an image can have. Here that follows from the processor's settings.

vLLM's configuration names a function of this module, `unchanged`. So each of vLLM's processes imports it, and importing
it changes vLLM's class there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.kimi_vl import KimiVLProcessingInfo

from verl.data.tokenizer import load_tokenizer
from verl.engine.rollout.vllm.arguments import EngineSettings
from verl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SIDE = 512  # most patches of an image's side


def unchanged(config: PreTrainedConfig) -> PreTrainedConfig:
    """The model's configuration, as it is (vLLM's `hf_overrides`)."""
    return config


def arguments(
    given: Mapping[str, Any], settings: EngineSettings, config: PreTrainedConfig, folder: str
) -> dict[str, Any]:
    """The engine's arguments for such a model. `folder` gets a tokenizer that needs no code of the model's, and the
    model's configuration, which vLLM looks for beside it. UserError where what it needs is given otherwise."""
    if given.get("hf_overrides"):
        raise UserError("engine_kwargs.vllm.hf_overrides with Kimi-VL is not here: set model.override_config")
    load_tokenizer(settings.model_path, tokenizer_path=settings.tokenizer_path).save_pretrained(folder)
    config.save_pretrained(folder)
    own = {"tokenizer": folder, "hf_overrides": unchanged}
    return dict(given) | own | {"skip_mm_profiling": True}  # which would process an image


def _most_tokens(self: Any, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
    """A bound: an image of at most `in_token_limit` patches, each side filled up to whole tokens."""
    from verl.data.kimi_images import KimiVLImageProcessor

    model = self.ctx.model_config
    settings = (model.multimodal_config.mm_processor_kwargs if model.multimodal_config else None) or {}
    images = KimiVLImageProcessor.from_pretrained(model.model, **settings)
    patches, side = images.in_token_limit, images.merge_size
    sides = min(_SIDE, patches) + patches // min(_SIDE, patches)
    return {"image": min(seq_len, patches // side**2 + sides // side + 1)}


KimiVLProcessingInfo.get_mm_max_tokens_per_item = _most_tokens
