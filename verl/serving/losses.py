"""The losses of the Tinker API: sums over tokens, each a function of the targets' log-probs and of a datum's tensors.

With p the log-prob of a target, q the sampler's (`logprobs`), A its advantage and r = exp(p − q)
(https://tinker-docs.thinkingmachines.ai/tinker/losses):

    cross_entropy          −Σ w·p                                 w: weights, [N] or [N, K] as the targets are
    importance_sampling    −Σ r·A
    ppo                    −Σ min(r·A, clip(r, low, high)·A)      2017, 1707.06347
    cispo                  −Σ sg(clip(r, low, high))·A·p          2506.13585
    dro                    −Σ (p·A − β/2·(p − q)²)                2405.19107

`custom` is none of these: the SDK asks for log-probs, and sends its own gradient as the weights of cross_entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Tensors = Mapping[str, torch.Tensor]
Config = Mapping[str, float | str]


def cross_entropy(log_probs: torch.Tensor, inputs: Tensors, config: Config) -> torch.Tensor:
    """See the module; the elements before their sum."""
    return -inputs["weights"] * log_probs


def importance_sampling(log_probs: torch.Tensor, inputs: Tensors, config: Config) -> torch.Tensor:
    """See the module."""
    return -_ratio(log_probs, inputs) * inputs["advantages"]


def ppo(log_probs: torch.Tensor, inputs: Tensors, config: Config) -> torch.Tensor:
    """See the module; low 0.8 and high 1.2 unless `clip_low_threshold` and `clip_high_threshold` say otherwise."""
    ratio, advantages = _ratio(log_probs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, config) * advantages)


def cispo(log_probs: torch.Tensor, inputs: Tensors, config: Config) -> torch.Tensor:
    """See the module; bounds as in `ppo`."""
    weight = _clipped(_ratio(log_probs, inputs), config).detach()
    return -weight * inputs["advantages"] * log_probs


def dro(log_probs: torch.Tensor, inputs: Tensors, config: Config) -> torch.Tensor:
    """See the module. KeyError without `beta`."""
    distance = log_probs - inputs["logprobs"]
    return -(log_probs * inputs["advantages"] - 0.5 * float(config["beta"]) * distance**2)


def _ratio(log_probs: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    return torch.exp(log_probs - inputs["logprobs"])


def _clipped(ratio: torch.Tensor, config: Config) -> torch.Tensor:
    return ratio.clamp(float(config.get("clip_low_threshold", 0.8)), float(config.get("clip_high_threshold", 1.2)))


_POLICY, _CLIP = ("logprobs", "advantages"), ("clip_low_threshold", "clip_high_threshold")
LOSSES: dict[str, tuple[Callable[[torch.Tensor, Tensors, Config], torch.Tensor], tuple[str, ...], tuple[str, ...]]] = {
    "cross_entropy": (cross_entropy, ("weights",), ()),
    "importance_sampling": (importance_sampling, _POLICY, ()),
    "ppo": (ppo, _POLICY, _CLIP),
    "cispo": (cispo, _POLICY, _CLIP),
    "dro": (dro, _POLICY, ("beta",)),
}
"""Name → the function, the tensors that a datum must have besides its targets, and the settings that it reads."""
