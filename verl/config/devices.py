"""Which devices this machine has, found without torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.platform.device import VISIBLE_DEVICES
from verl.versions import torch_build

_DXG = Path("/dev/dxg")
_KFD = Path("/sys/class/kfd/kfd/topology/nodes")


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices found. `cuda_build` is False if torch is there and was built without CUDA."""

    cuda: int
    npu: int
    cuda_build: bool

    def count(self, kind: str) -> int:
        """Devices of a kind; on the cpu, its cores: a rank is a process."""
        return {"cuda": self.cuda, "npu": self.npu}.get(kind, os.cpu_count() or 1)

    @property
    def best(self) -> str:
        """What `trainer.device=auto` means here."""
        if self.cuda and self.cuda_build:
            return "cuda"
        return "npu" if self.npu else "cpu"


def find() -> Devices:
    """Look at /dev and /proc, and at which devices the environment leaves visible."""
    gpus = len(_nodes("nvidia")) or len(_proc_gpus()) or len(_amd_gpus())
    # Windows lends its GPUs to Linux through one node, which does not say how many they are.
    cuda = _visible("cuda", gpus or int(_DXG.exists()))
    npu = _visible("npu", len(_nodes("davinci")))
    return Devices(cuda, npu, torch_build() != "cpu")


def _nodes(name: str) -> list[str]:
    return [node.name for node in Path("/dev").glob(f"{name}*") if re.fullmatch(rf"{name}\d+", node.name)]


def _proc_gpus() -> list[str]:
    return [gpu.name for gpu in Path("/proc/driver/nvidia/gpus").glob("*")]


def _amd_gpus() -> list[Path]:
    """Nodes of the kernel's compute driver that are no processors."""
    nodes = []
    for node in _KFD.glob("*/gpu_id"):
        try:
            nodes += [node] if int(node.read_text()) else []
        except (OSError, ValueError):
            continue
    return nodes


def _visible(kind: str, count: int) -> int:
    visible = os.environ.get(VISIBLE_DEVICES[kind])
    names = [] if visible is None else [n for n in visible.split(",") if n.strip() not in ("", "-1")]
    return count if visible is None else min(count, len(names))


def ranks(config: Any) -> int:
    """Training devices over all nodes; of supervised training the processes that torchrun started."""
    if config.entry == "sft":
        return int(os.environ.get("WORLD_SIZE", "1"))
    return 1 if config.entry == "eval" else int(config.trainer.nnodes * config.trainer.n_gpus_per_node)


def ray_address(config: Any) -> str:
    """Which Ray was asked for: HOST:PORT of a cluster, "local" for one of the run's own, "" if nothing was said."""
    return str(config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS") or "")
