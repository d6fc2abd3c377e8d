"""Dense matrix-product rates of known accelerators in bfloat16 and float16, from their makers' data sheets."""

from __future__ import annotations

import re

_TERA = 1e12
# The first pattern that is found in the device's name counts.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"GB200|GB300", 2500),
    (r"B200|B300", 2250),
    (r"B100", 1750),
    (r"H100 PCIe", 756),
    (r"H100 NVL", 835),
    (r"GH200|H[128]00", 989),
    (r"H20\b", 148),
    (r"A[18]00", 312),
    (r"A40\b", 149.7),
    (r"A30\b", 165),
    (r"A10G?\b", 125),
    (r"L40S", 362),
    (r"L40\b", 181),
    (r"L20\b", 119.5),
    (r"L4\b", 121),
    (r"RTX 5090", 209.5),
    (r"RTX 4090", 165.2),
    (r"RTX 3090", 71),
    (r"MI355", 2516),
    (r"MI32[05]|MI30[08]", 1307),
    (r"MI250X", 383),
    (r"MI250\b", 362),
    (r"910B|Ascend910", 354),
)


def half_precision_peak(name: str) -> float | None:
    """FLOP/s of one device by the name that its driver gives, or None for one that is not listed."""
    return next((tera * _TERA for pattern, tera in _PEAKS if re.search(pattern, name)), None)
