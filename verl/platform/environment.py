"""Environment variables that must be set before the first numerical library is loaded. Imports nothing heavy."""

from __future__ import annotations

import os

DEFAULTS = {
    # Threads of a parallel region spin for some ten microseconds while they wait, then sleep. Without spinning, waking
    # them costs more than a second core gains; spinning on, as is the libraries' default, they take the core from the
    # one they wait for as soon as the machine does anything else (docs/performance.md has the figures).
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "5000",
    # Every new shape of a matrix product keeps a kernel, in oneDNN's cache and once more in torch's own; ragged
    # batches have many shapes, and the libraries' limits of 1024 each hold several hundred MB.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
    "TOKENIZERS_PARALLELISM": "true",
}


def prepare_process() -> None:
    """Set what is not set already; effective only before torch is imported."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
