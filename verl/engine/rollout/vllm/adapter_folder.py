"""A peft adapter where vLLM's processes find it: in a folder of shared memory, written anew for each version.

vLLM takes adapters by path alone. The files are small (two thin matrices a layer) and never touch a disk.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.config.model_facts import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from verl.platform.processes import namespace

_PREFIX = "base_model.model."
_SHARED = Path("/dev/shm")
_NAME = "verl-vllm-adapter-"


class AdapterFolder:
    """`described` is what adapter_config.json says: at least r, lora_alpha, target_modules."""

    def __init__(self, described: Mapping[str, Any]):
        self._described = {"peft_type": "LORA", **described}
        self._root: Path | None = None

    def write(self, tensors: Iterable[tuple[str, Any]], version: int, dtype: Any) -> tuple[Path, int]:
        """(name less peft's prefix, tensor) of an adapter, floating point converted to `dtype` unless None. Returns the
        folder to load it from, good until the next `write`, and the bytes of the tensors."""
        from safetensors.torch import save_file

        if self._root is None:
            where = _SHARED if _SHARED.is_dir() else Path(tempfile.gettempdir())
            _sweep(where)
            self._root = Path(tempfile.mkdtemp(prefix=f"{_NAME}{namespace()}-{os.getpid()}-", dir=where))
        stored = {
            _PREFIX + name: tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous().clone()
            for name, tensor in tensors
        }
        for old in self._root.iterdir():
            shutil.rmtree(old)
        folder = self._root / str(version)
        folder.mkdir()
        save_file(stored, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (folder / ADAPTER_CONFIG).write_text(json.dumps(self._described), encoding="utf-8")
        return folder, sum(t.numel() * t.element_size() for t in stored.values())

    def checksums(self) -> dict[str, str]:
        """Checksum of each tensor in the file that vLLM loaded last, by name less peft's prefix."""
        from safetensors.torch import load_file

        from verl.weight_sync.verify import checksums

        folder = None if self._root is None else next(self._root.iterdir(), None)
        found = {} if folder is None else load_file(folder / ADAPTER_WEIGHTS)
        return checksums((name.removeprefix(_PREFIX), tensor) for name, tensor in found.items())

    def remove(self) -> None:
        """Take the files away."""
        if self._root is not None:
            shutil.rmtree(self._root)
            self._root = None


def _sweep(where: Path) -> None:
    """Remove what engines that were killed have left."""
    start = f"{_NAME}{namespace()}-"
    for folder in where.glob(f"{start}*"):
        pid = folder.name.removeprefix(start).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
