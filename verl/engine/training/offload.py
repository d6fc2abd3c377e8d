"""What an idle engine lends to the other roles of its device: `fsdp_config.param_offload` and `optimizer_offload`.

build ─ away │ back(weights) log-probs away │ back(weights, optimizer) update away │ weight sync, checkpoints │ …

Weights leave for samplers and files one at a time, from where they are: nothing comes back for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from verl.engine.training.settings import read


@dataclass(frozen=True, slots=True)
class Offloading:
    """weights, optimizer: what goes to host memory while the role is idle."""

    weights: bool = False
    optimizer: bool = False

    @classmethod
    def of(cls, role_cfg: Any, *, shared: bool = False) -> Offloading:
        """From the role's `fsdp_config`. Weights that somebody else reads meanwhile (`shared`) stay."""
        cfg = read(role_cfg, "fsdp_config")
        weights = bool(read(cfg, "param_offload", False)) and not shared
        return cls(weights, bool(read(cfg, "optimizer_offload", False)))

    def __bool__(self) -> bool:
        return self.weights or self.optimizer

    def away(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """To host memory."""
        self.back(module, optimizer, torch.device("cpu"))

    def back(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device
    ) -> None:
        """To `device`; parameters stay the same objects, so that the optimizer and what names them hold on to them."""
        if self.weights:
            module.to(device)
        if self.optimizer and optimizer is not None:
            # The count of steps is a scalar, which only fused optimizers read on the device.
            scalars = any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and (value.ndim or scalars):
                        state[name] = value.to(device)
