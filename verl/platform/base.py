"""What a device kind offers, and how the right one is found."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from verl.errors import UserError

if TYPE_CHECKING:
    import torch

KINDS = ("cuda", "npu", "cpu")


class Platform(ABC):
    """One kind of device. `name` is torch's device type."""

    name: str = ""
    #: Least and most tokens of a micro-batch worth asking for, and the bytes of activations aimed at between
    #: them. None: as many as the configuration allows.
    preferred_tokens: tuple[int, int] | None = None
    preferred_activations: int = 1 << 29
    #: torch's backend for collectives between devices of this kind.
    collectives: str = "gloo"

    @abstractmethod
    def count(self) -> int:
        """Devices of this kind that this process can use."""

    @abstractmethod
    def memory(self, index: int = 0) -> tuple[int, int]:
        """(free, total) bytes of a device, as its driver counts them."""

    def room(self, index: int = 0) -> int:
        """Bytes of a device that this process can still take: those free, and those that it has freed and kept."""
        return self.memory(index)[0]

    @abstractmethod
    def peak_memory(self, index: int = 0) -> int:
        """Most bytes in use by this process since the start, or since `reset_peak_memory` where there is one."""

    @property
    @abstractmethod
    def default_dtype(self) -> torch.dtype:
        """The data type in which matrix products run unless the user says otherwise."""

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """True if products in this data type run at full speed."""

    def peak_flops(self, dtype: torch.dtype, index: int = 0) -> float | None:
        """FLOP/s that a device can do at most in products of this data type, or None where that is not known."""
        return None

    def device(self, index: int = 0) -> torch.device:
        """torch's name for a device."""
        import torch

        return torch.device(self.name, index)

    def describe(self) -> str:
        """One line for people: what the device is."""
        return self.name

    def seed(self, seed: int) -> None:
        """Seed python, numpy, torch and the device."""
        import numpy as np
        import torch

        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def prepare(self) -> None:  # noqa: B027
        """Set what makes this device fast without changing results beyond rounding. Again is harmless."""

    def be_deterministic(self) -> None:
        """Kernels that give the same bits every time, from now on; an operation that has none raises RuntimeError."""
        import torch

        torch.use_deterministic_algorithms(True)
        # Memory that is written before it is read needs no filling.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def select(self, index: int) -> None:  # noqa: B027
        """Make a device the current one of this process, before anything is placed on it."""

    def synchronize(self) -> None:  # noqa: B027
        """Wait for the device."""

    def empty_cache(self) -> None:  # noqa: B027
        """Give unused device memory back."""

    def reset_peak_memory(self) -> None:  # noqa: B027
        """Start counting `peak_memory` anew, where the device can."""


def _build(kind: str) -> Platform:
    if kind == "cuda":
        from verl.platform.cuda import CudaPlatform

        return CudaPlatform()
    if kind == "npu":
        from verl.platform.npu import NpuPlatform

        return NpuPlatform()
    from verl.platform.cpu import CpuPlatform

    return CpuPlatform()


def detect(wanted: str = "auto", devices: int = 1) -> Platform:
    """The platform asked for, or the best one present for "auto" (cuda, then npu, then cpu).

    UserError if `wanted` is no device kind, or if fewer than `devices` of them are here.
    """
    if wanted not in ("auto", *KINDS):
        raise UserError(f"trainer.device={wanted!r} is not known; choose one of auto, {', '.join(KINDS)}")
    if wanted == "auto":
        found = next(p for p in map(_build, KINDS) if p.count() > 0)
    else:
        found = _build(wanted)
    have = found.count()
    if have == 0:
        here = [k for k in KINDS if _build(k).count() > 0]
        raise UserError(
            f"trainer.device={wanted}: this machine has no such device, or torch was built without it. "
            f"Present: {', '.join(here)}. Set trainer.device=auto or one of those."
        )
    if devices > have and found.name != "cpu":
        raise UserError(
            f"trainer.n_gpus_per_node={devices}, but this machine has {have} {found.name} device"
            f"{'s' if have != 1 else ''}. Set trainer.n_gpus_per_node={have}."
        )
    return found
