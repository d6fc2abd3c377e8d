"""Devices. The only place in verl that names a device API; everything else asks the `Platform` it is given."""

from __future__ import annotations

from verl.errors import UserError
from verl.platform.device import KINDS, Platform, platform_of

__all__ = ["KINDS", "Platform", "detect", "platform_of"]


def detect(wanted: str = "auto", devices: int = 1) -> Platform:
    """The platform asked for, or the best one present for "auto" (cuda, then npu, then cpu).

    UserError if `wanted` is no device kind, or if fewer than `devices` of them are here.
    """
    if wanted not in ("auto", *KINDS):
        raise UserError(f"trainer.device={wanted!r} is not known; choose one of auto, {', '.join(KINDS)}")
    if wanted == "auto":
        platform = next(p for p in map(platform_of, KINDS) if p.count() > 0)
    else:
        platform = platform_of(wanted)
    have = platform.count()
    if have == 0:
        here = [k for k in KINDS if platform_of(k).count() > 0]
        raise UserError(
            f"trainer.device={wanted}: this machine has no such device, or torch was built without it. "
            f"Present: {', '.join(here)}. Set trainer.device=auto or one of those."
        )
    if devices > have and not platform.on_host:
        raise UserError(
            f"trainer.n_gpus_per_node={devices}, but this machine has {have} {platform.name} device"
            f"{'s' if have != 1 else ''}. Set trainer.n_gpus_per_node={have}."
        )
    return platform
