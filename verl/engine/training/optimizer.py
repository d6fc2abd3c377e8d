"""The optimizer, its learning-rate schedule, the clipped global gradient norm, and sums over a step's micro-batches."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl.config.schema.training import OptimConfig
from verl.engine.training.muon import Muon
from verl.errors import UserError

# Seen with torch 2.13: the other fused steps have no rule for weights that are cut over ranks, and these two optimizers
# have no step for them at all.
_FUSED_OVER_RANKS = ("torch.optim.Adam", "torch.optim.AdamW")
_NOT_OVER_RANKS = ("torch.optim.Adafactor", "torch.optim.Rprop")
# Factors of the loss before the backward pass of float16, whose smallest numbers are far above the parts of a loss over
# 10⁵ tokens; the next one is tried where the gradients overflow. Powers of two change no other bit.
LOSS_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)
# Endings of metrics of which the least or the largest of all micro-batches counts.
_EXTREMES: dict[str, Any] = {"_min": min, "_max": max}


def optim_config(group: Mapping[str, Any] | None) -> OptimConfig:
    """`…optim.` of a role. Of a mapping, keys that are absent or None have their defaults."""
    if isinstance(group, OptimConfig):
        return group
    return OptimConfig(**{name: value for name, value in (group or {}).items() if value is not None})


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], optim: OptimConfig, matrices: Container[int] = ()
) -> torch.optim.Optimizer:
    """The optimizer class that the settings name, over all parameters; `matrices`: `id`s of those that Muon steps.
    UserError if there is no such class, if it refuses its arguments, or if it cannot step weights that are sharded over
    ranks, as these are."""
    parameters = list(parameters)
    sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)
    where = f"{optim.optimizer_impl}.{optim.optimizer}"
    try:
        kind = getattr(importlib.import_module(optim.optimizer_impl), optim.optimizer)
    except (ImportError, AttributeError) as error:
        raise UserError(f"optim.optimizer: no {where} ({error}); the default is torch.optim.AdamW") from error
    if sharded and where in _NOT_OVER_RANKS:
        raise UserError(f"optim.optimizer: {where} cannot step weights that are cut over ranks; AdamW can")
    if where == "torch.optim.Muon":
        kind = functools.partial(Muon, chosen=matrices)
    accepted = inspect.signature(kind).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    usual = {"lr": optim.lr, "weight_decay": optim.weight_decay, "betas": tuple(optim.betas)}
    arguments: dict[str, Any] = {k: v for k, v in usual.items() if k in accepted or open_ended}
    if "fused" in accepted and (where in _FUSED_OVER_RANKS or not sharded):
        arguments["fused"] = True
    try:
        return kind(_groups(parameters), **arguments | optim.override_optimizer_config)
    except (TypeError, ValueError) as error:
        raise UserError(f"optim.override_optimizer_config: {where} refuses its arguments: {error}") from error


def _groups(parameters: Iterable[torch.nn.Parameter]) -> list[Any]:
    """One group for each set of ranks that parameters are cut over: an operation takes tensors of one such set."""
    by_mesh: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in by_mesh.values()] or [{"params": []}]


def lr_factor(optim: OptimConfig, total: int) -> Callable[[int], float]:
    """Share of lr used in training step s = 0, 1, …

    With W warm-up steps (`lr_warmup_steps` if ≥ 0, else the ratio of the total, rounded down) and floor f: s/W while
    s < W ((s+1)/W if not zero_indexed_step); then 1 (constant), f + (1−f)·(1 + cos 2π·c·x)/2 (cosine, c = num_cycles)
    or f + (1−f)·(1−x) (linear), x = (s−W)/(total−W).
    """
    warm, floor = optim.lr_warmup_steps, optim.min_lr_ratio
    if warm is None or warm < 0:
        warm = int(optim.lr_warmup_steps_ratio * total)

    def factor(step: int) -> float:
        if step < warm:
            return (step + (0 if optim.zero_indexed_step else 1)) / warm
        if optim.lr_scheduler_type == "constant":
            return 1.0
        x = min(1.0, (step - warm) / max(1, total - warm))
        if optim.lr_scheduler_type == "linear":
            return floor + (1 - floor) * (1 - x)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(2 * math.pi * optim.num_cycles * x))

    return factor


class Schedule:
    """The learning rate of a training step, the same for all optimizer steps inside it."""

    def __init__(self, optimizer: torch.optim.Optimizer, optim: OptimConfig, total: int):
        # Its list of groups is another one after it has loaded a state.
        self._optimizer, self._lr, self._factor = optimizer, optim.lr, lr_factor(optim, total)
        self.restore(0)

    def restore(self, step: int) -> None:
        """Go to a training step."""
        self.step = step
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * self._factor(step)

    def advance(self) -> float:
        """Move on one training step; returns the rate of the one that ended."""
        used = float(self._optimizer.param_groups[0]["lr"])
        self.restore(self.step + 1)
        return used


def global_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """L2 norm of all gradients together, float32 scalar; 0 if there is none."""
    return torch.linalg.vector_norm(_norms(gradients)) if gradients else torch.zeros(())


def sum_of_squares(gradients: Sequence[torch.Tensor]) -> float:
    """Σ of the squares of all gradients' elements, float64 over float32 norms."""
    return float(np.square(_norms(gradients).cpu().double().numpy()).sum()) if gradients else 0.0


def _norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    norms = torch._foreach_norm(list(gradients), 2.0, torch.float32)
    return torch.stack([norm.to(norms[0].device) for norm in norms])


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """The optimizer's state to a device."""
    # The count of steps is a scalar, which only fused optimizers read on the device.
    scalars = any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (value.ndim or scalars):
                state[name] = value.to(device)


@dataclass(slots=True)
class StepAccumulator:
    """What the micro-batches of a step came to: metrics as name → [sum, weight], tokens computed, why the step must be
    refused ("" if it need not be), and `TrainStepResult.scale_derivative`."""

    sums: dict[str, list[float]] = field(default_factory=dict)
    tokens: int = 0
    refused: str = ""
    scale_derivative: float | None = None

    def add(self, metrics: Mapping[str, Sequence[float]]) -> None:
        for name, (total, weight) in metrics.items():
            if extreme := _EXTREMES.get(name[-4:]):
                if weight:
                    entry = self.sums.setdefault(name, [total / weight, 1.0])
                    entry[0] = extreme(entry[0], total / weight)
                continue
            entry = self.sums.setdefault(name, [0.0, 0.0])
            entry[0] += total
            entry[1] += weight

    def metrics(self) -> dict[str, float]:
        """Σsum / Σweight; the sum where there is no weight."""
        return {n: total / weight if weight else total for n, (total, weight) in self.sums.items()}
