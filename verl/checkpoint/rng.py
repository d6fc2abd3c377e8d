"""Random states on disk without pickle: arrays as safetensors, scalars as JSON.

Kept: Python's `random`, numpy's global generator and torch's CPU generator.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from verl.checkpoint.manifest import CheckpointError

_ARRAYS = "rng.safetensors"
_SCALARS = "rng.json"


def save(directory: Path) -> None:
    """Write the three global random states."""
    import torch
    from safetensors.numpy import save_file

    version, words, python_gauss = random.getstate()
    kind, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    arrays: dict[str, np.ndarray] = {
        "python": np.asarray(words, dtype=np.uint64),
        "numpy": np.ascontiguousarray(key, dtype=np.uint32),
        "torch": torch.get_rng_state().numpy(),
    }
    scalars = {
        "python": {"version": version, "gauss": python_gauss},
        "numpy": {"kind": kind, "position": position, "has_gauss": has_gauss, "gauss": gauss},
    }
    save_file(arrays, directory / _ARRAYS)
    (directory / _SCALARS).write_text(json.dumps(scalars, indent=1), "utf-8")


def load(directory: Path) -> None:
    """Restore what `save` wrote. CheckpointError if the files do not read."""
    import torch
    from safetensors.numpy import load_file

    try:
        arrays = load_file(directory / _ARRAYS)
        scalars = json.loads((directory / _SCALARS).read_text("utf-8"))
        python, legacy = scalars["python"], scalars["numpy"]
        python_state = (python["version"], tuple(int(w) for w in arrays["python"]), python["gauss"])
        numbers = (legacy[name] for name in ("position", "has_gauss", "gauss"))
        numpy_state = (legacy["kind"], arrays["numpy"], *numbers)
        torch_state = torch.from_numpy(arrays["torch"])
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{directory}: random states cannot be read ({reason})") from error
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
