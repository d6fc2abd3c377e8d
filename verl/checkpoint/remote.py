"""Copies of sealed checkpoints behind a URL (`trainer.default_hdfs_dir`): put there, found again, fetched.

A copy is complete when its manifest is there: it is taken away first and written last. Any file system that fsspec
knows will do (hdfs://, s3://, file://, …); a URL without scheme is a local directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.checkpoint import manifest
from verl.checkpoint.manifest import LATEST, NAME, CheckpointError


@dataclass(frozen=True, slots=True, order=True)
class Copy:
    """A complete copy: which one is newest is said by `serial`, as among local checkpoints."""

    serial: int
    step: int

    @property
    def name(self) -> str:
        """Its directory's name."""
        return f"global_step_{self.step}"


class RemoteCopies:
    """The copies below `url`. CheckpointError, naming the URL, where it cannot be reached."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")

    @contextmanager
    def _system(self, doing: str) -> Iterator[tuple[Any, str]]:
        import fsspec

        try:
            yield fsspec.core.url_to_fs(self.url)
        except CheckpointError:
            raise
        except Exception as error:  # every file system has errors of its own
            problem = f"{doing} failed ({type(error).__name__}: {error})"
            raise CheckpointError(f"trainer.default_hdfs_dir={self.url}: {problem}") from error

    def put(self, checkpoint: Path) -> int:
        """Copy a sealed local checkpoint; returns the bytes."""
        with self._system(f"copying {checkpoint.name} there") as (system, root):
            seal = manifest.read_manifest(checkpoint)
            target = f"{root}/{checkpoint.name}"
            if system.exists(f"{target}/{NAME}"):
                system.rm_file(f"{target}/{NAME}")
            for name in [*sorted(seal.files), NAME]:
                system.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
                system.put_file(str(checkpoint / name), f"{target}/{name}")
            system.pipe_file(f"{root}/{LATEST}", str(seal.step).encode())
            return seal.size

    def newest(self) -> Copy | None:
        """The complete copy that was sealed last, or None."""
        with self._system("looking for checkpoints there") as (system, root):
            if not system.exists(root):
                return None
            system.invalidate_cache()
            copies = []
            for path in system.ls(root, detail=False):
                step = manifest.step_of(Path(path))
                seal = f"{root}/global_step_{step}/{NAME}"
                if step is not None and system.exists(seal):
                    copies.append(Copy(int(json.loads(system.cat_file(seal))["serial"]), step))
            return max(copies, default=None)

    def fetch(self, copy: Copy, root: Path) -> Path:
        """Bring a copy into the run folder under its own name and check it; returns where it lies."""
        final = root / copy.name
        beside = root / f"{copy.name}.tmp"
        with self._system(f"fetching {copy.name}") as (system, base):
            manifest.remove(beside)
            beside.mkdir(parents=True)
            source = f"{base}/{copy.name}"
            system.get_file(f"{source}/{NAME}", str(beside / NAME))
            seal = manifest.read_manifest(beside)
            for name in sorted(seal.files):
                (beside / name).parent.mkdir(parents=True, exist_ok=True)
                system.get_file(f"{source}/{name}", str(beside / name))
            manifest.verify(beside, seal)
            manifest.sync_tree(beside)
            manifest.remove(final)
            os.rename(beside, final)
            manifest.sync_directory(root)
        return final
