"""A model without its weights: parameters on the meta device, buffers real.

Weights come in one sharded unit after the other, so no rank ever holds the whole model. Buffers that no checkpoint
holds (rotary frequencies) are computed by the architecture's own initialisation; whether it did is checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.engine.training.settings import read
from verl.errors import UserError
from verl.models import attention
from verl.models import load as models

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
    _without_values(module)
    if module.can_generate() and Path(where, "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(where)
    return module.eval()


def _without_values(module: torch.nn.Module) -> None:
    """Put meta parameters in the place of those that came with values: not every function that an architecture draws
    its start from minds `torch.device`. Only meta parameters are filled later."""
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or parameter.is_meta:
                continue
            if parameter not in made:
                made[parameter] = torch.nn.Parameter(
                    torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
                )
            part._parameters[name] = made[parameter]


@torch.no_grad()
def fill_buffers(module: PreTrainedModel) -> list[str]:
    """Give every meta buffer its real value in host memory; returns the names of those whose value is not known.

    Call it while the parameters are on the meta device: initialising them there costs nothing.
    """
    from transformers import PreTrainedModel

    unknown = []
    # As transformers does it: a model inside of the model initialises what is its own.
    owners: dict[str, PreTrainedModel] = {}
    for prefix, part in module.named_modules():
        above = owners.get(prefix.rpartition(".")[0], module)
        owner = owners[prefix] = part if isinstance(part, PreTrainedModel) else above
        own = {name: b for name, b in part._buffers.items() if b is not None and b.is_meta}
        for name, buffer in own.items():
            mark = float("nan") if buffer.is_floating_point() else _UNSET
            kind = torch.float64 if buffer.is_floating_point() else torch.int64
            if buffer.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16):
                unknown.append(f"{prefix}.{name}".lstrip("."))
            part._buffers[name] = torch.full(buffer.shape, mark, dtype=kind).to(buffer.dtype)
        if not own:
            continue
        owner._init_weights(part)
        for name in own:
            value = part._buffers[name]
            assert value is not None
            unset = value.isnan().any() if value.is_floating_point() else (value == _UNSET).any()
            if bool(unset):
                unknown.append(f"{prefix}.{name}".lstrip("."))
    return unknown
