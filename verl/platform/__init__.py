"""Devices. The only place in verl that names a device API; everything else asks the `Platform` it is given."""

from __future__ import annotations

from verl.platform.base import Platform, detect

__all__ = ["Platform", "detect"]
