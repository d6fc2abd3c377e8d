"""A model without its weights: parameters on the meta device, buffers real.

Weights come in one sharded unit after the other, so no rank ever holds the whole model. Buffers that no checkpoint
holds (rotary frequencies) are computed by the architecture's own initialisation; whether it did is checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.engine import attention
from verl.engine.training import model as models
from verl.engine.training.settings import read
from verl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_UNSET = -(2**31) + 7


def build(path: str | Path, model_cfg: Any = None) -> PreTrainedModel:
    """The architecture of a directory or hub id, float32, all tensors on the meta device.

    UserError as `load_model` raises it, but for what only the weights themselves can show.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    attention.register()
    where = models.check_directory(path)
    config = models.load_config(where, model_cfg)
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention.IMPLEMENTATION,
                trust_remote_code=bool(read(model_cfg, "trust_remote_code", False)),
            )
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={path}: cannot be built as a causal language model: {error}") from error
    models.check_supported(module, path)
    if module.can_generate() and Path(where, "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(where)
    return module.eval()


@torch.no_grad()
def fill_buffers(module: PreTrainedModel) -> list[str]:
    """Give every meta buffer its real value in host memory; returns the names of those whose value is not known.

    Call it while the parameters are on the meta device: initialising them there costs nothing.
    """
    unknown = []
    for prefix, part in module.named_modules():
        own = {name: b for name, b in part._buffers.items() if b is not None and b.is_meta}
        for name, buffer in own.items():
            mark = float("nan") if buffer.is_floating_point() else _UNSET
            kind = torch.float64 if buffer.is_floating_point() else torch.int64
            if buffer.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16):
                unknown.append(f"{prefix}.{name}".lstrip("."))
            part._buffers[name] = torch.full(buffer.shape, mark, dtype=kind).to(buffer.dtype)
        if not own:
            continue
        module._init_weights(part)
        for name in own:
            value = part._buffers[name]
            assert value is not None
            unset = value.isnan().any() if value.is_floating_point() else (value == _UNSET).any()
            if bool(unset):
                unknown.append(f"{prefix}.{name}".lstrip("."))
    return unknown
