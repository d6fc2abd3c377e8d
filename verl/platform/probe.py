"""Look at the machine: packages, devices, memory, limits. Reads files and asks small tools; imports no torch itself.

Every function returns plain values and None (or an empty list) where the machine does not say.
"""

from __future__ import annotations

import glob
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from verl.platform import host_resources
from verl.versions import package_folder as package_folder
from verl.versions import torch_build as torch_build
from verl.versions import version as version


def requirements(package: str) -> list[Requirement]:
    """What an installed package asks for, extras left out; empty for one that is absent."""
    try:
        parsed = [Requirement(line) for line in metadata.requires(package) or ()]
    except metadata.PackageNotFoundError:
        return []
    return [need for need in parsed if need.marker is None or need.marker.evaluate({"extra": ""})]


def wants(package: str, other: str) -> str | None:
    """The version range of `other` that an installed package asks for; None if it asks for none."""
    ranges = (str(need.specifier) for need in requirements(package) if canonicalize_name(need.name) == other)
    return next(ranges, None) or None


def needs_cuda(module: str) -> bool | None:
    """Whether a package's compiled parts link to the CUDA libraries; None if it has none or is absent."""
    folder = package_folder(module)
    parts = sorted(folder.rglob("*.so"))[:40] if folder else []
    if not parts:
        return None
    contents = (path.read_bytes() for path in parts if path.stat().st_size <= 256 << 20)
    return any(b"libtorch_cuda.so" in content or b"libcudart.so" in content for content in contents)


def nvidia_gpus() -> list[str]:
    """One line per NVIDIA device: name, memory, driver; from nvidia-smi, else the driver's files."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        try:
            result = subprocess.run(query, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return []
        lines = result.stdout.splitlines() if result.returncode == 0 else []
        return [line.strip() for line in lines if line.strip()]
    models = []
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        match = re.search(r"^Model:\s*(.+)$", Path(path).read_text(), re.MULTILINE)
        models.append(match.group(1).strip() if match else "NVIDIA GPU")
    return models


def npus() -> int:
    """Number of Ascend devices."""
    return len(glob.glob("/dev/davinci[0-9]*"))


def ascend() -> dict[str, str]:
    """Versions of what Ascend devices need besides Python packages, "" for what is not found."""
    root = os.environ.get("ASCEND_HOME_PATH") or "/usr/local/Ascend/*"
    places = {
        "driver": ["/usr/local/Ascend/driver/version.info"],
        "CANN": [f"{root}/version.cfg", f"{root}/latest/version.cfg", f"{root}/*/ascend_toolkit_install.info"],
    }
    return {name: next(filter(None, map(_ascend_version, patterns)), "") for name, patterns in places.items()}


def _ascend_version(pattern: str) -> str:
    """The first version in the files of a pattern: a line Version=…, version=… or …_version=[…:CANN-…]."""
    texts = (Path(path).read_text(errors="replace") for path in sorted(glob.glob(pattern)))
    matches = (re.search(r"version\s*=\s*\[?(?:[\w.]*:)?(?:CANN-)?([\w.]+)", text, re.IGNORECASE) for text in texts)
    return next((match.group(1) for match in matches if match), "")


def cpu() -> tuple[str, list[str]]:
    """(model name, those of the instruction sets that matter here)."""
    name, flags = host_resources.processor()
    relevant = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16", "sve")
    return name or platform.machine(), [flag for flag in relevant if flag in flags]


@cache
def cpu_products() -> tuple[str, ...]:
    """How bfloat16 products are computed on this CPU, its compiled kernels, and what a run on it uses, tried out in a
    process that imports torch (2 s); empty where that fails."""
    code = "from verl.platform.cpu import PLATFORM as cpu; cpu.prepare()"
    code += "; print(cpu.bfloat16_products()); print(cpu.compiled_kernels()); print(cpu.describe())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return tuple(result.stdout.splitlines())


def memory() -> tuple[int | None, int | None]:
    """(total, available) bytes that this process can have; (None, None) without psutil."""
    try:
        return host_resources.total_memory(), host_resources.available_memory()
    except ImportError:
        return None, None


def disk(path: str | Path) -> dict[str, Any]:
    """{"path", "free", "total"} bytes of the file system where a path is or would be made."""
    place = Path(path).expanduser()
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    return {"path": str(path), "free": usage.free, "total": usage.total}


def shared_memory() -> dict[str, Any] | None:
    """The same of /dev/shm, None without it."""
    return disk("/dev/shm") if os.path.isdir("/dev/shm") else None


def limits() -> dict[str, tuple[int | None, int | None]]:
    """(soft, hard) limits by name; None is unlimited."""
    kinds = {
        "open files": resource.RLIMIT_NOFILE,
        "processes": resource.RLIMIT_NPROC,
        "locked memory": resource.RLIMIT_MEMLOCK,
    }
    unlimited = {resource.RLIM_INFINITY: None}
    pairs = {name: resource.getrlimit(kind) for name, kind in kinds.items()}
    return {name: (unlimited.get(s, s), unlimited.get(h, h)) for name, (s, h) in pairs.items()}


def loopback() -> str | None:
    """None if a port can be opened on the loopback and reached; else what went wrong."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            return None
    except OSError as error:
        return str(error)
