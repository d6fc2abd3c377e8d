"""What a forward pass of a model costs, counted from its parameters and its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.models.layers import attention_sizes
from verl.tracking.mfu import ModelCost

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from verl.platform import Platform


def model_cost(
    module: PreTrainedModel, platform: Platform, dtype: torch.dtype, devices: int = 1
) -> ModelCost | None:
    """The cost of a pass on so many devices; None where the devices' peak is not known."""
    peak = platform.peak_flops(dtype)
    if peak is None:
        return None
    config = module.config.get_text_config()
    # scores and weighted values: a product each for every head and pair
    per_pair = sum(2.0 * s.heads * (s.key_width + s.value_width) for s in attention_sizes(config))
    return ModelCost(2.0 * product_weights(module, config), per_pair, peak * devices)


def product_weights(module: PreTrainedModel, config: Any) -> float:
    """Weights that one token is multiplied with: all matrices but the input embedding; of the experts those chosen.

    A head that shares the embedding's weights is a product all the same.
    """
    embedding = module.get_input_embeddings().weight
    head = module.get_output_embeddings()
    chosen = float(getattr(config, "num_experts_per_tok", None) or 1)
    experts = float(
        getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or chosen
    )
    total = 0.0
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2 or parameter is embedding:
            continue
        total += parameter.numel() * (chosen / experts if ".experts." in name else 1.0)
    if head is not None and head.weight is embedding:
        total += embedding.numel()
    return total
