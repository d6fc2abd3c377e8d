"""The optimizer, its learning-rate schedule, and the clipped global gradient norm."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from verl.errors import UserError

SCHEDULES = ("constant", "cosine", "linear")

# Seen with torch 2.13: the other fused steps have no rule for weights that are cut over ranks, and these two optimizers
# have no step for them at all.
_FUSED_OVER_RANKS = ("torch.optim.Adam", "torch.optim.AdamW")
_NOT_OVER_RANKS = ("torch.optim.Adafactor", "torch.optim.Rprop")


@dataclass(slots=True)
class OptimizerSettings:
    """The keys of `…optim.` that matter here; see the configuration reference."""

    lr: float = 1e-6
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    lr_scheduler_type: str = "constant"
    min_lr_ratio: float = 0.0
    num_cycles: float = 0.5
    zero_indexed_step: bool = True
    optimizer: str = "AdamW"
    optimizer_impl: str = "torch.optim"
    override_optimizer_config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, group: Any) -> OptimizerSettings:
        """From a config group (attributes or mapping); keys that are absent or None keep their defaults."""
        from verl.engine.training.settings import read

        values = {name: read(group, name) for name in cls.__slots__}
        settings = cls(**{k: v for k, v in values.items() if v is not None})
        settings.betas = (float(settings.betas[0]), float(settings.betas[1]))
        return settings


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], settings: OptimizerSettings
) -> torch.optim.Optimizer:
    """The optimizer class named by the settings over all parameters. UserError if there is no such class, if it takes
    no such argument, or if it cannot step weights that are cut over ranks, as these are."""
    parameters = list(parameters)
    sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)
    where = f"{settings.optimizer_impl}.{settings.optimizer}"
    try:
        kind = getattr(importlib.import_module(settings.optimizer_impl), settings.optimizer)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"optim.optimizer: no optimizer {where} ({error}); the default is torch.optim.AdamW"
        ) from error
    if sharded and where in _NOT_OVER_RANKS:
        raise UserError(f"optim.optimizer: {where} cannot step weights that are cut over ranks; AdamW can")
    accepted = inspect.signature(kind).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    arguments: dict[str, Any] = {
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        "betas": settings.betas,
    }
    if "fused" in accepted and (where in _FUSED_OVER_RANKS or not sharded):
        arguments["fused"] = True
    arguments = {k: v for k, v in arguments.items() if k in accepted or open_ended}
    extra = dict(settings.override_optimizer_config)
    unknown = [k for k in extra if k not in accepted and not open_ended]
    if unknown:
        raise UserError(
            f"optim.override_optimizer_config: {where} takes no {', '.join(unknown)}; it takes {', '.join(accepted)}"
        )
    return kind(_groups(parameters), **(arguments | extra))


def _groups(parameters: Iterable[torch.nn.Parameter]) -> list[Any]:
    """One group for each set of ranks that parameters are cut over: an operation takes tensors of one such set."""
    by_mesh: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in by_mesh.values()] or [{"params": []}]


def warmup_steps(settings: OptimizerSettings, total: int) -> int:
    """Warm-up length in training steps: `lr_warmup_steps` if ≥ 0, else the ratio of the total, rounded down."""
    if settings.lr_warmup_steps >= 0:
        return settings.lr_warmup_steps
    return int(settings.lr_warmup_steps_ratio * total)


def lr_factor(settings: OptimizerSettings, total: int) -> Callable[[int], float]:
    """Share of lr used in training step s = 0, 1, …

    With W warm-up steps and floor f: s/W while s < W ((s+1)/W if not zero_indexed_step); then 1 (constant),
    f + (1−f)·(1 + cos 2π·c·x)/2 (cosine, c = num_cycles) or f + (1−f)·(1−x) (linear), x = (s−W)/(total−W).
    """
    if settings.lr_scheduler_type not in SCHEDULES:
        raise UserError(
            f"optim.lr_scheduler_type={settings.lr_scheduler_type!r} is not known; choose one of {', '.join(SCHEDULES)}"
        )
    warm, floor = warmup_steps(settings, total), settings.min_lr_ratio

    def factor(step: int) -> float:
        if step < warm:
            return (step + (0 if settings.zero_indexed_step else 1)) / warm
        if settings.lr_scheduler_type == "constant":
            return 1.0
        x = min(1.0, (step - warm) / max(1, total - warm))
        if settings.lr_scheduler_type == "linear":
            return floor + (1 - floor) * (1 - x)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(2 * math.pi * settings.num_cycles * x))

    return factor


class Schedule:
    """The learning rate of a training step, the same for all optimizer steps inside it."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, total: int):
        self.optimizer, self.lr, self.total = optimizer, settings.lr, total
        self.factor = lr_factor(settings, total)
        self.step = 0
        self._apply()

    def _apply(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self.factor(self.step)

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def advance(self) -> float:
        """Move on one training step; returns the rate of the one that ended."""
        used = self.rate
        self.step += 1
        self._apply()
        return used

    def restore(self, step: int) -> None:
        self.step = step
        self._apply()


def global_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """L2 norm of all gradients together, float32 scalar; 0 if there is none."""
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm(list(gradients), 2.0, torch.float32)
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))


def clip_gradients(gradients: Sequence[torch.Tensor], norm: float, limit: float | None) -> None:
    """Scale all gradients by limit/norm if the norm exceeds the limit; None or ≤ 0 leaves them alone."""
    if limit is None or limit <= 0 or norm <= limit:
        return
    torch._foreach_mul_(list(gradients), limit / (norm + 1e-6))


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """The optimizer's state to a device."""
    # The count of steps is a scalar, which only fused optimizers read on the device.
    scalars = any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (value.ndim or scalars):
                state[name] = value.to(device)
