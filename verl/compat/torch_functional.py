"""Means, whitening and log-probs on padded tensors: `verl.utils.torch_functional` of the public interface."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.flat_tokens import masked


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean along `axis` (None: of all) where the mask is set; 0 without a token."""
    return masked(values, mask).sum(axis) / mask.sum(axis).clamp(min=1)


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum where the mask is set, whatever the padding holds."""
    return masked(values, mask).sum(axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance where the mask is set. ValueError without a token, and for the unbiased one of a single token."""
    count = mask.sum()
    if count <= int(unbiased):
        raise ValueError(f"the variance of {int(count)} values is not defined")
    deviation = values - masked_mean(values, mask)
    return masked_sum(deviation.square(), mask) / (count - int(unbiased))


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x − mean) / √(var + 1e-8), unbiased variance; with shift_mean=False the mean is added again."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def clip_by_value(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The values, limited by tensors."""
    return torch.minimum(torch.maximum(values, low), high)


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-prob of each label [...] under logits [..., V]."""
    return torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy [...] of softmax(logits [..., V])."""
    return torch.special.entr(torch.softmax(logits, -1)).sum(-1)
