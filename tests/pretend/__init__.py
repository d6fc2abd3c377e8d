"""A pretend CUDA device: tensors that say "cuda:0" and compute on the processor, in a process of its own.

    python -m tests.pretend pytest tests/gpu …         # or any other module, as `python -m` runs it

Mixing device and host memory raises. Waits of the host are counted, and raise while a graph is captured. Graphs record
what runs and replay it on the same memory. `counts.COUNTS` has launches, bytes, waits and uploads. It shows nothing of
kernels' limits, asynchrony, real memory, collectives or speed. `load` compiles `hooks.cpp`, a few seconds once, and has
to run before torch is imported: torch looks for a device's hooks while it starts.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

COMPILER = shutil.which("c++") or shutil.which("g++")


def load() -> None:
    """Compile the hooks for the installed torch unless that was done before, and load them."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None and COMPILER is not None
    root, source = Path(spec.origin).parent, Path(__file__).with_name("hooks.cpp")
    name = f"verl-pretend-{importlib.metadata.version('torch')}-{source.stat().st_mtime_ns}-{os.getuid()}.so"
    library = Path(tempfile.gettempdir()) / name
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        options = [
            "-std=c++20",
            "-O0",
            "-shared",
            "-fPIC",
            f"-I{root}/include",
            f"-L{root}/lib",
            "-lc10",
            "-ltorch_cpu",
        ]
        subprocess.run([COMPILER, str(source), *options, "-o", str(partial)], check=True)
        partial.rename(library)
    for path in [*root.glob("lib/libgomp*.so*"), root / "lib/libc10.so", root / "lib/libtorch_cpu.so", library]:
        ctypes.CDLL(str(path))
