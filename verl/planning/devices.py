"""What a device can do: a table of data-sheet figures, and the processor of this machine as `verl doctor --bench`
measured it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from verl.errors import UserError
from verl.platform import probe
from verl.platform.device import half_precision_peak

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    flops      products in bfloat16, dense, FLOP/s; full: in float32
    memory     bytes; bandwidth: of it, bytes/s
    link       bytes/s to a neighbour in the node, one direction; network: to another node
    share      rate of a training step relative to an H100's share of its peak; sparse: the same of experts' products.
               Both calibrated (docs/planning.md); 1 where nothing was measured
    forecast   no measurement of this device went into a constant
    """

    name: str
    flops: float
    full: float
    memory: float
    bandwidth: float
    link: float
    network: float
    share: float = 1.0
    sparse: float = 1.0
    forecast: bool = True

    @property
    def on_host(self) -> bool:
        """The device is the host's processor."""
        return self.name == "cpu"


# name → (GiB, GB/s of memory, GB/s of a link one way, GB/s of the network, TFLOP/s in float32 (TF32 products are off),
#         share, sparse, forecast)
_TABLE: dict[str, tuple[float, float, float, float, float, float, float, bool]] = {
    "H100": (79.6, 3350, 450, 50, 67, 1.0, 1.0, False),
    "H200": (140.4, 4800, 450, 50, 67, 1.0, 1.0, False),
    "A100": (79.3, 2039, 300, 25, 19.5, 1.0, 1.0, True),
    "B200": (178.4, 8000, 900, 50, 75, 0.45, 0.086, False),
    "RTX A6000": (47.5, 768, 28, 12.5, 38.7, 1.0, 1.0, False),
    "910B": (61.0, 1600, 196, 25, 94, 1.0, 1.0, True),
}


def named(name: str) -> Device:
    """A device of the table, by a name that contains its own (case ignored), or "cpu". UserError for another."""
    if name == "cpu":
        return measured()
    key = next((key for key in _TABLE if key.lower() in name.lower()), "")
    peak = half_precision_peak(name) or half_precision_peak(key)
    if not key or peak is None:
        raise UserError(f"--device {name}: the table has {', '.join(_TABLE)}, cpu")
    memory, bandwidth, link, network, full, share, sparse, forecast = _TABLE[key]
    if size := re.search(r"(\d+) ?GB", name):  # NVIDIA A100-SXM4-40GB
        memory = min(memory, float(size[1]))
    rates = (bandwidth * 1e9, link * 1e9, network * 1e9, share, sparse, forecast)
    return Device(key, peak, full * 1e12, memory * GIB, *rates)


def bench_file() -> Path:
    """Where `verl doctor --bench` keeps what it measured."""
    return Path("~/.cache/verl/bench.json").expanduser()


def keep(half: float, full: float, bandwidth: float, memory: float) -> None:
    """Write the measured processor: FLOP/s in bfloat16 and float32, bytes/s and bytes of its memory."""
    device = Device("cpu", half, full, memory, bandwidth, bandwidth / 2, 1.25e9, forecast=False)
    bench_file().parent.mkdir(parents=True, exist_ok=True)
    bench_file().write_text(json.dumps(asdict(device), indent=1))


def measured() -> Device:
    """The processor as measured here; where it was not, its rates are NaN and only its memory is known."""
    try:
        return Device(**json.loads(bench_file().read_text()))
    except (OSError, ValueError, TypeError):
        nan = float("nan")
        return Device("cpu", nan, nan, float(probe.memory()[0] or nan), nan, nan, nan)
