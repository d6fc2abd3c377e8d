"""Kimi-VL on transformers' parts: MoonViT as Kimi-K2.5 has it (of one frame), its projector, and DeepSeek-V3.

transformers has no `kimi_vl`; the published directories bring code of their own, which is not run. Configuration and
names of weights are those of the published checkpoints, as vLLM reads them. Imported where a directory names this type.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.configuration_utils import SubConfigSpec
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.kimi_k25 import modeling_kimi_k25 as k25


class MoonViTConfig(PreTrainedConfig):
    """The vision tower's configuration, by the published names."""

    model_type = "moonvit"
    default_rope_type = "axial"
    attribute_map: ClassVar[dict[str, str]] = {
        "pos_emb_height": "init_pos_emb_height",
        "pos_emb_width": "init_pos_emb_width",
    }
    pos_emb_time: ClassVar[int] = 1
    hidden_act: ClassVar[str] = "gelu_pytorch_tanh"
    # As this package's other parts ask a vision tower.
    in_channels: ClassVar[int] = 3
    temporal_patch_size: ClassVar[int] = 1

    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    num_attention_heads: int = 16
    num_hidden_layers: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    merge_kernel_size: tuple[int, int] | list[int] = (2, 2)
    rope_parameters: dict[str, Any] | None = None

    @property
    def spatial_merge_size(self) -> int:
        """Patches a side that become one token."""
        return self.merge_kernel_size[0]


class KimiVLConfig(PreTrainedConfig):
    """The published configuration of Kimi-VL."""

    model_type = "kimi_vl"
    attribute_map: ClassVar[dict[str, str]] = {"image_token_id": "media_placeholder_token_id"}
    sub_configs_defaults: ClassVar[dict[str, Any]] = {
        "text_config": SubConfigSpec(config_class=AutoConfig, model_type="deepseek_v3"),
        "vision_config": MoonViTConfig,
    }
    video_token_id: ClassVar[int] = -1
    projection_layer_norm_eps: ClassVar[float] = 1e-5

    text_config: dict[str, Any] | PreTrainedConfig | None = None
    vision_config: dict[str, Any] | PreTrainedConfig | None = None
    media_placeholder_token_id: int = 163605
    tie_word_embeddings: bool = False

    @property
    def projection_hidden_size(self) -> int:
        """The width that the projector normalises."""
        return int(self.vision_config.hidden_size)  # type: ignore[union-attr]


class MoonViTAttention(nn.Module):
    """Patches of an image all see each other; turned pairs of numbers are neighbours, as in the published weights."""

    def __init__(self, config: MoonViTConfig):
        super().__init__()
        self.config, self.num_key_value_groups = config, 1
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """hidden_states [S, D] of all images' patches; image i has those from cu_seqlens[i] on; cosines and sines
        [S, head_dim], the second half as the first."""
        qkv = self.wqkv(hidden_states).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = qkv.unbind(1)
        # The order of a head's numbers changes no score, so neighbours may become halves.
        query, key = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (query, key))
        query, key = k25.apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, k25.eager_attention_forward)
        lengths, scale = cu_seqlens.diff().tolist(), self.head_dim**-0.5
        images = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in (query, key, value)), strict=True)
        outputs = [attend(self, *image, attention_mask=None, scaling=scale, is_causal=False)[0] for image in images]
        return self.wo(torch.cat(outputs, 1).flatten(-2)[0])  # type: ignore[no-any-return]


class MoonViT(k25.Kimi_K25VisionModel):  # type: ignore[misc]
    """The vision tower."""

    config_class = MoonViTConfig

    def __init__(self, config: MoonViTConfig):
        super().__init__(config)
        for layer in self.layers:
            layer.attn = MoonViTAttention(config)
        self.post_init()


class KimiVLModel(k25.Kimi_K25Model):  # type: ignore[misc]
    """Tower, projector and language model."""

    config_class = KimiVLConfig

    def __init__(self, config: KimiVLConfig):
        PreTrainedModel.__init__(self, config)
        self.vision_tower = MoonViT._from_config(config.vision_config)
        self.language_model = AutoModel.from_config(config.text_config)
        self.mm_projector = k25.Kimi_K25MultimodalProjection(config)
        self.post_init()

    def get_image_features(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, **options: Any) -> Any:
        """pixel_values [patches, 3·p·p] or [patches, 3, p, p]."""
        side = self.config.vision_config.patch_size  # type: ignore[union-attr]
        return super().get_image_features(pixel_values.reshape(-1, 3, side, side), image_grid_thw, **options)

    def get_rope_index(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions int64 [3, B, S] and where the text goes on: tokens of images count like others."""
        positions = torch.arange(input_ids.shape[1]).expand(3, *input_ids.shape)
        return positions, torch.zeros(len(input_ids), 1, dtype=torch.int64)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **more: Any) -> Any:
        """position_ids [B, S], or [3, B, S] whose axes are equal."""
        if position_ids is not None and position_ids.ndim == 3:
            position_ids = position_ids[0]
        return super().forward(input_ids, attention_mask, position_ids, **more)


class KimiVLForConditionalGeneration(k25.Kimi_K25ForConditionalGeneration):  # type: ignore[misc]
    """`KimiVLModel` with its output layer."""

    config_class = KimiVLConfig

    def __init__(self, config: KimiVLConfig):
        PreTrainedModel.__init__(self, config)
        self.model = KimiVLModel(config)
        text: Any = config.text_config
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()


# Published name of a block's part → ours. Each with its prefix in one step: names are also converted one at a time.
_BLOCK = {"norm0": "norm1", "norm1": "norm2", "mlp.fc0": "mlp.fc1", "mlp.fc1": "mlp.fc2"}
_BLOCK |= {"wqkv": "attn.wqkv", "wo": "attn.wo"}
_NAMES = [
    WeightRenaming("language_model.model", "model.language_model"),
    WeightRenaming("language_model.lm_head", "lm_head"),
    *(
        WeightRenaming(rf"vision_tower.encoder.blocks.(\d+).{published}", rf"model.vision_tower.layers.\1.{name}")
        for published, name in _BLOCK.items()
    ),
    WeightRenaming("vision_tower.encoder.final_layernorm", "model.vision_tower.final_layernorm"),
    WeightRenaming(
        "vision_tower.patch_embed.pos_emb.weight", "model.vision_tower.patch_embed.pos_emb.position_embeddings"
    ),
    WeightRenaming("vision_tower.patch_embed.proj", "model.vision_tower.patch_embed.proj"),
    WeightRenaming("multi_modal_projector.linear_1", "model.mm_projector.in_proj"),
    WeightRenaming("multi_modal_projector.linear_2", "model.mm_projector.out_proj"),
    WeightRenaming("multi_modal_projector.pre_norm", "model.mm_projector.pre_norm"),
]


def register() -> None:
    """Make these transformers' classes of their types; vLLM puts its own configuration there when it starts."""
    AutoConfig.register("moonvit", MoonViTConfig, exist_ok=True)
    AutoConfig.register("kimi_vl", KimiVLConfig, exist_ok=True)
    AutoModelForImageTextToText.register(KimiVLConfig, KimiVLForConditionalGeneration, exist_ok=True)
    register_checkpoint_conversion_mapping(
        "kimi_vl", [*_NAMES, *(get_checkpoint_conversion_mapping("deepseek_v3") or ())], overwrite=True
    )


register()
