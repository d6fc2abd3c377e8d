"""A pretend CUDA device: tensors that say "cuda:0" and compute on the processor, in a process of its own.

    python -m tests.pretend pytest tests/gpu …         # or any other module, as `python -m` runs it

Mixing device and host memory raises. Waits of the host are counted, and raise while a graph is captured. Graphs record
what runs and replay it on the same memory. It shows nothing of kernels' limits, asynchrony, real memory, collectives or
speed. `hooks.cpp` is compiled once, in a few seconds, and loaded before torch, which looks for hooks while it starts.
"""

import ctypes
import importlib.metadata
import os
import subprocess
import tempfile
from pathlib import Path

source = Path(__file__).with_name("hooks.cpp")
version = f"{importlib.metadata.version('torch')}-{source.stat().st_mtime_ns}-{os.getuid()}"
library = Path(tempfile.gettempdir()) / f"verl-pretend-{version}.so"
if not library.exists():
    torch = importlib.metadata.distribution("torch").locate_file("torch")
    partial = library.with_suffix(f".{os.getpid()}")
    options = f"-std=c++20 -shared -fPIC -I{torch}/include -L{torch}/lib -Wl,-rpath,{torch}/lib -lc10 -ltorch_cpu"
    subprocess.run(["c++", source, *options.split(), "-o", partial], check=True)
    partial.rename(library)
ctypes.CDLL(str(library))

from tests import device_tensors  # noqa: E402
from tests.pretend import device  # noqa: E402

device.install()
device_tensors.run_module()
