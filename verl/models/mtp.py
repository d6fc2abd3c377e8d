"""Multi-token prediction: the layer of DeepSeek V3, GLM-4 MoE, Qwen3-Next and Qwen3.5 that predicts one token further.

    x_t = W·[norm(embedding of token t+1); norm(h_t)]      the main model's head makes token t+2 of norm(block(x))_t

h_t is what the main model's own head reads (DeepSeek-V3 technical report, 2412.19437, section 2.2). transformers leaves
these weights in the files; serving engines draft with them. `attach` makes them a module `mtp` of the model, so that
they are trained, sharded, saved and sent with it; where that is not asked for, saving copies them (`weight_files`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NAME = "mtp"
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_QWEN = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "proj": "fc",
    "norm": "norm",
    "block": "layers.0",
}
_DEEPSEEK = {"enorm": "enorm", "hnorm": "hnorm", "proj": "eh_proj", "norm": "shared_head.norm", "block": ""}


def layer_count(config: PreTrainedConfig) -> int:
    """How many such layers a model's configuration says there are. Published ones of Qwen3-Next do not say; it has
    one."""
    text = config.get_text_config()
    unsaid = 1 if text.model_type == "qwen3_next" else 0
    return next((count for name in _COUNTS if isinstance(count := getattr(text, name, None), int)), unsaid)


def is_extra(name: str, layers: int) -> bool:
    """Whether a checkpoint's weight belongs to such a layer of a model with `layers` main ones."""
    number = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return name.startswith("mtp.") or (number is not None and ".visual." not in name and int(number[1]) >= layers)


class MultiTokenLayer(nn.Module):
    """One layer, of the classes that the main model's have; the last one that attends is its pattern."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        decoder, text = model.get_decoder(), model.config.get_text_config()
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        like = max(number for number, kind in enumerate(kinds) if kind == "full_attention")
        pattern, norm, width = decoder.layers[like], type(decoder.norm), text.hidden_size
        self.enorm, self.hnorm, self.norm = (norm(width, eps=text.rms_norm_eps) for _ in range(3))
        self.proj = nn.Linear(2 * width, width, bias=False)
        self.block = type(pattern)(text, like)
        self._rotary = [decoder.rotary_emb]  # the main model's, no part of this module
        qwen = text.model_type.startswith("qwen")
        self._start = "mtp." if qwen else f"model.layers.{text.num_hidden_layers}."
        self._names = _QWEN if qwen else _DEEPSEEK
        #: The layer that is the pattern, in the main model.
        self.pattern = next(path for path, module in model.named_modules() if module is pattern) + "."

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """embedded [1, S, H]: of the tokens after those that hidden [1, S, H] are of; positions [1, S]: theirs. What
        the main model's head makes the token after them of."""
        x = self.proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        rotation = self._rotary[0](x, position_ids=positions)
        out = self.block(x, position_embeddings=rotation, position_ids=positions, attention_mask=None, use_cache=False)
        normed: Tensor = self.norm(out[0] if isinstance(out, tuple) else out)
        return normed

    def name_in_files(self, name: str) -> tuple[str, str]:
        """Of a tensor of this module: its name in a checkpoint, or for the block how such names start; and of what is
        in the block the tensor of the main model whose names there are alike after the layer's number, else ""."""
        part, _, rest = name.partition(".")
        start = self._start + self._names[part]
        return (f"{start.rstrip('.')}.", self.pattern + rest) if part == "block" else (f"{start}.{rest}", "")


def attach(model: PreTrainedModel, path: Any) -> MultiTokenLayer:
    """Give a model its layer as `model.mtp`, without values. UserError where it has none, or another kind."""
    count, at = layer_count(model.config), f"model.mtp.enable=True: model.path={path}"
    if count != 1:
        raise UserError(f"{at} has {count or 'no'} layers of multi-token prediction; verl takes models with one")
    try:
        with torch.device("meta"):
            layer = MultiTokenLayer(model)
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{at}: {type(model).__name__} has no layer that verl can build ({error})") from error
    setattr(model, NAME, layer.eval())
    return layer
