"""Reading torch.distributed.checkpoint without running what its file says.

torch writes the list of tensors (`.metadata`) as a pickle and reads it with `pickle.load`, which runs any code that
somebody put there. Here the same file is read by an unpickler that knows the few classes such a list is made of.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from verl.errors import UserError

_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        if module.split(".")[0] == "pathlib" and name in _PATHS:
            return PurePath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no list of tensors needs")


class Reader(FileSystemReader):
    """`FileSystemReader` for checkpoints of unknown origin. UserError for a list that is not one, or that names files
    outside its own folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The list of tensors."""
        path = Path(str(self._get_metadata_path(kwargs.get("rank"))))
        try:
            with path.open("rb") as file:
                found = _Restricted(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{path}: this is no list of tensors ({error}); it was not read") from error
        if not isinstance(found, Metadata):
            raise UserError(f"{path}: this is no list of tensors; it was not read")
        for stored in (found.storage_data or {}).values():
            name = str(stored.relative_path)
            if name in ("", ".", "..") or PurePath(name).name != name:
                raise UserError(f"{path}: names a file outside of its folder ({name}); it was not read")
        meta = getattr(found, "storage_meta", None) or StorageMeta()
        meta.load_id = self.load_id
        found.storage_meta = meta
        return found
