"""Look at the machine: packages, devices, memory, limits. Reads files and asks small tools; imports no torch itself.

Every function returns plain values and None (or an empty list) where the machine does not say.
"""

from __future__ import annotations

import glob
import importlib.util
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

from verl.platform import host
from verl.platform.host import memory_limit as memory_limit


@cache
def version(package: str) -> str | None:
    """Installed version of a distribution, None if it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def wants(package: str, other: str) -> str | None:
    """The version range of `other` that an installed package asks for, extras left out; None if it asks for none."""
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return None
    for line in lines:
        requirement, _, marker = line.partition(";")
        found = re.fullmatch(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^)]*)\)?\s*", requirement)
        if found and re.sub(r"[-_.]+", "-", found.group(1)).lower() == other and "extra" not in marker:
            return found.group(2).strip() or None
    return None


def package_folder(module: str) -> Path | None:
    """Folder of a top-level module, found without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return (
        Path(next(iter(spec.submodule_search_locations)))
        if spec and spec.submodule_search_locations
        else None
    )


def torch_build() -> str | None:
    """ "cpu", or what torch was built for ("cuda 13.0", "rocm 6.4"), read from its version.py; None without torch."""
    folder = package_folder("torch")
    if folder is None:
        return None
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    for key, name in (("cuda", "cuda"), ("hip", "rocm")):
        found = re.search(rf"^{key}(?:\s*:[^=]*)?\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if found:
            return f"{name} {found.group(1)}"
    return "cpu"


def needs_cuda(module: str) -> bool | None:
    """Whether a package's compiled parts link to the CUDA libraries; None if it has none or is absent."""
    folder = package_folder(module)
    if folder is None:
        return None
    found = None
    for path in sorted(folder.rglob("*.so"))[:40]:
        found = bool(found)
        if path.stat().st_size > 256 << 20:
            continue
        content = path.read_bytes()
        if b"libtorch_cuda.so" in content or b"libcudart.so" in content:
            return True
    return found


def nvidia_gpus() -> list[str]:
    """One line per NVIDIA device: name, memory, driver; from nvidia-smi, else the driver's files."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return []
        return (
            [line.strip() for line in done.stdout.splitlines() if line.strip()]
            if done.returncode == 0
            else []
        )
    models = []
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        found = re.search(r"^Model:\s*(.+)$", Path(path).read_text(), re.MULTILINE)
        models.append(found.group(1).strip() if found else "NVIDIA GPU")
    return models


def npus() -> int:
    """Number of Ascend devices."""
    return len(glob.glob("/dev/davinci[0-9]*"))


def cpu() -> tuple[str, list[str]]:
    """(model name, those of the instruction sets that matter here)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), []
    name = re.search(r"^(?:model name|Model|Processor)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    have = set(flags.group(1).split()) if flags else set()
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16", "sve")
    return (name.group(1) if name else platform.machine()), [flag for flag in wanted if flag in have]


@cache
def bf16_products() -> str | None:
    """How bfloat16 products are computed on this CPU, tried out in a process that imports torch (2 s); None where it
    cannot."""
    code = "from verl.platform.cpu import CpuPlatform; print(CpuPlatform().bfloat16_products())"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() or None


def memory() -> tuple[int | None, int | None]:
    """(total, available) bytes of the machine."""
    text = host.read(Path("/proc/meminfo"))
    found = {
        k: int(v) * 1024 for k, v in re.findall(r"^(MemTotal|MemAvailable):\s*(\d+) kB", text, re.MULTILINE)
    }
    if not found and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    return found.get("MemTotal"), found.get("MemAvailable")


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
    names = {"open files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC", "locked memory": "RLIMIT_MEMLOCK"}
    found = {}
    for name, constant in names.items():
        if hasattr(resource, constant):
            soft, hard = resource.getrlimit(getattr(resource, constant))
            found[name] = _limit(soft), _limit(hard)
    return found


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


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
