"""A pretend CUDA device: tensors that say "cuda:0" and compute on the processor, in a process of its own.

    python -m tests.pretend pytest tests/gpu …         # or any other module, as `python -m` runs it

Mixing device and host memory raises. Waits of the host are counted, and raise while a graph is captured. Graphs record
what runs and replay it on the same memory. It shows nothing of kernels' limits, asynchrony, real memory, collectives or
speed. `hooks.cpp` is compiled once, in a few seconds, and loaded before torch, which looks for hooks while it starts.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path

root, source = Path(importlib.util.find_spec("torch").origin).parent, Path(__file__).with_name("hooks.cpp")  # type: ignore[union-attr, arg-type]
name = f"verl-pretend-{importlib.metadata.version('torch')}-{source.stat().st_mtime_ns}-{os.getuid()}.so"
library = Path(tempfile.gettempdir()) / name
if not library.exists():
    partial = library.with_suffix(f".{os.getpid()}")
    options = f"-std=c++20 -O0 -shared -fPIC -I{root}/include -L{root}/lib -Wl,-rpath,{root}/lib -lc10 -ltorch_cpu"
    subprocess.run(["c++", str(source), *options.split(), "-o", str(partial)], check=True)
    partial.rename(library)
ctypes.CDLL(str(library))

from tests import device_tensors  # noqa: E402
from tests.pretend import device  # noqa: E402

device.install()
device_tensors.run_module()
