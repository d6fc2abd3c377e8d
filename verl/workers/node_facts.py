"""What one node has, as plain data: packages, our own code, devices, limits, room, addresses, files of models; and a
process on a node that reports it, which nodes it reaches and where its processes stand, and joins an all-reduce.

Runs in a process of that node. Reads files and runs small tools; knows nothing of Ray, and imports torch for the
all-reduce alone. Arguments and results are JSON-like: the code on the other side may be of another version.
"""

from __future__ import annotations

import hashlib
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from verl.engine.registry import packages as engine_packages
from verl.platform import network, probe, thread_stacks
from verl.platform.host_resources import cores

PACKAGES = (
    *("torch", "transformers", "ray", "torch_npu", "peft"),
    *("numpy", "safetensors", "pyarrow"),
)
"""Distributions whose versions are compared between nodes, beside those of engines."""
CODE = "this code"
"""Our own files among the versions: their hash, and where they lie."""
_WEIGHTS = ("*.safetensors", "*.bin")
_ROOT = Path(__file__).resolve().parents[1]
_CONNECT_S = 5.0


def collect(models: Sequence[str] = (), engines: Sequence[str] | None = None) -> dict[str, Any]:
    """What a run compares between nodes and what each must have, JSON-like. `models`: directories or hub ids.
    `engines`: distributions of engines, the driver's: plug-in modules may register some there; None: those of this
    process."""
    names = (*PACKAGES, *(engine_packages() if engines is None else engines))
    versions = {name: version for name in names if (version := probe.version(name))}
    if "torch" in versions:
        versions["torch"] += f", {probe.torch_build()}"
    return {
        "versions": {"python": platform.python_version(), **versions, CODE: f"{code_hash()} in {_ROOT}"},
        "models": {path: model_files(path) for path in models},
        "open_files": probe.limits()["open files"][1],
        "shm": probe.shared_memory(),
    }


@cache
def code_hash(root: Path = _ROOT) -> str:
    """16 hex digits of a SHA-256 over the names and bytes of all Python files of a package (default: ours)."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def model_files(path: str) -> dict[str, Any]:
    """What identifies a model: {"bytes", "text"}: the revision of a hub's model, else hashes of config.json and of the
    weight files' names and sizes. {"problem", "to_fetch": would a run fetch it} where it is not on this disk."""
    from verl.config.model_facts import ModelTrouble, find

    try:
        folder = find(path)
    except ModelTrouble as trouble:
        return {"problem": str(trouble), "to_fetch": trouble.download}
    config = folder / "config.json"
    if not config.is_file():
        return {"problem": f"no config.json in {folder}"}
    sizes = sorted((p.name, p.stat().st_size) for pattern in _WEIGHTS for p in folder.glob(pattern))
    if folder.parent.name == "snapshots":  # of one revision not all files may have been fetched yet
        text = f"revision {folder.name}"
    else:
        listing = "\n".join(f"{name} {size}" for name, size in sizes).encode()
        text = f"config.json {_hash(config.read_bytes())}, names and sizes of weights {_hash(listing)}"
    return {"bytes": sum(size for _, size in sizes), "text": text}


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


class NodeProbe:
    """One for each node, and one for each rank of the all-reduce."""

    facts = staticmethod(collect)
    stack = staticmethod(thread_stacks.ask)
    free_port = staticmethod(network.reserve)

    def everything(self, models: Sequence[str], engines: Sequence[str], temporary: str) -> dict[str, Any]:
        """What `verl doctor --cluster` shows of a node. `temporary`: Ray's folder here."""
        return collect(models, engines) | {
            "hostname": socket.gethostname(),
            "accelerators": {"cuda": probe.nvidia_gpus(), "npu": ["Ascend"] * probe.npus()},
            "cores": cores()[0],
            "memory": probe.memory(),
            "disk": probe.disk(temporary),
            "processes": probe.limits()["processes"][0],
        }

    def now(self) -> float:
        """This node's clock, seconds."""
        return time.time()

    def sees(self, path: str) -> bool:
        """Whether a file exists here."""
        return Path(path).is_file()

    def unreached(self, targets: Mapping[str, tuple[str, int]]) -> dict[str, str]:
        """What went wrong with those of some (address, port) by name that no connection comes about with."""
        with ThreadPoolExecutor(32) as threads:
            results = zip(targets, threads.map(_connect, targets.values()), strict=True)
            return {name: why for name, why in results if why}

    def all_reduce(
        self, rank: int, world: int, address: str, port: int, kind: str, timeout: float, count: int
    ) -> dict[str, float]:
        """Meet the other ranks as training ranks do and sum `count` float32 over all of them, in host memory and then
        on the device if there is one.

        Returns the seconds by collective library. UserError if the ranks do not meet, RuntimeError if a sum is wrong.
        """
        import torch

        from verl.engine.training.process_group import init_process_group, leave
        from verl.platform import detect

        platform = detect(kind)
        platform.select(0)
        init_process_group(rank, world, address, port, platform, timeout)
        places = {"gloo": torch.device("cpu"), platform.collectives: platform.device()}
        seconds = {}
        for name, device in places.items():
            for _ in range(2):  # the first one sets up connections
                tensor = torch.ones(count, device=device)
                torch.distributed.barrier()
                platform.synchronize()
                start = time.perf_counter()
                torch.distributed.all_reduce(tensor)
                platform.synchronize()
                seconds[name] = time.perf_counter() - start
            if not bool((tensor == world).all()):
                raise RuntimeError(f"all-reduce over {name}: rank {rank} got a wrong sum")
        leave()
        return seconds


def _connect(target: tuple[str, int]) -> str:
    try:
        host, port = target  # a list, after its way here
        with socket.create_connection((host, port), timeout=_CONNECT_S):
            return ""
    except OSError as error:
        return str(error) or type(error).__name__
