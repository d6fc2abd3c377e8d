"""Muon (orthogonalised momentum) for the matrices of layers, AdamW for embeddings, the head, and what is no matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

_OF_TORCH = {"shape_scaling": ("original", 1.0), "spectral": ("match_rms_adamw", 0.2)}
"""Scale of an update of a matrix [m, n], √max(1, m/n) or √max(m, n) → torch's name, and torch's factor with it."""


def matrices(module: Any) -> set[int]:
    """`id`s of the parameters of a model that Muon steps: two-dimensional ones of neither embedding nor head."""
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    others = {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
    return {id(parameter) for parameter in module.parameters() if parameter.ndim == 2} - others


class Muon(torch.optim.Optimizer):
    """torch's Muon and AdamW as one optimizer: one list of groups, one state. Defaults are the public system's.

    groups: parameters as any optimizer takes them; chosen: `id`s of those that Muon steps. scale_mode: a key of
    `_OF_TORCH`; extra_scale_factor: factor of the updates; with match_adamw_update_rms it is √((1 − β₁)/(1 + β₁)).
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        chosen: Container[int],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        momentum: float = 0.95,
        nesterov: bool = False,
        ns_steps: int = 5,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        match_adamw_update_rms: bool = False,
    ):
        if scale_mode not in _OF_TORCH:
            raise ValueError(f"scale_mode={scale_mode!r}; known: {', '.join(_OF_TORCH)}")
        if match_adamw_update_rms:
            extra_scale_factor = math.sqrt((1 - betas[0]) / (1 + betas[0]))
        adjust, included = _OF_TORCH[scale_mode]
        self._factor = extra_scale_factor / included
        common: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust}
        by_muon = _part(groups, lambda parameter: id(parameter) in chosen)
        by_adamw = _part(groups, lambda parameter: id(parameter) not in chosen)
        self._muon = torch.optim.Muon(by_muon, **common, **muon) if by_muon else None
        self._adamw = torch.optim.AdamW(by_adamw, **common, betas=betas) if by_adamw else None
        parts = [part for part in (self._muon, self._adamw) if part is not None]
        super().__init__([group for part in parts for group in part.param_groups], common)
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of both."""
        if self._muon is not None:
            scheduled = [(group, group["lr"], group["weight_decay"]) for group in self._muon.param_groups]
            for group, rate, decay in scheduled:  # the factor scales updates, not the decay
                group["lr"], group["weight_decay"] = rate * self._factor, decay / self._factor
            self._muon.step()
            for group, rate, decay in scheduled:
                group["lr"], group["weight_decay"] = rate, decay
        if self._adamw is not None:
            self._adamw.step()


def _part(groups: Iterable[dict[str, Any]], belongs: Callable[[Any], bool]) -> list[dict[str, Any]]:
    parts = [{"params": [parameter for parameter in group["params"] if belongs(parameter)]} for group in groups]
    return [part for part in parts if part["params"]]
