"""Optimizer and schedule on disk, through torch.distributed.checkpoint, by parameter name.

Everything is a tensor, so that any number of ranks can read it again; numbers become float64 tensors.

torch writes the list of tensors (`.metadata`) as a pickle and reads it with `pickle.load`, which runs any code that
somebody put there. Here the same file is read by an unpickler that knows the few classes such a list is made of.
"""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.tensor import DTensor
from torch.serialization import _get_layout

from verl.engine.training.optimizer import move_state
from verl.errors import UserError

_STEP = "schedule.step"
_NUMBER = "#number"
_PARTS = [torch.Size, _get_layout, _StorageInfo, metadata._MEM_FORMAT_ENCODING]
_PARTS += [part for part in vars(metadata).values() if is_dataclass(part)]
_KNOWN = {(part.__module__, part.__qualname__): part for part in _PARTS}

# One process trains without a process group, of which torch warns at every save and load.
warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")


def save_state(directory: Path, optimizer: torch.optim.Optimizer, names: Mapping[str, Any], step: int) -> None:
    """Write the state of every parameter and the schedule's step. `names` maps names to parameters.

    OSError, on every rank, where one cannot write.
    """
    flat: dict[str, torch.Tensor] = {_STEP: torch.tensor(step, dtype=torch.int64)}
    for name, parameter in names.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                flat[f"{name}/{key}"] = value
            else:
                flat[f"{name}/{key}{_NUMBER}"] = torch.tensor(float(value), dtype=torch.float64)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        dcp.save(flat, checkpoint_id=str(directory))
    except CheckpointException as error:  # no Exception: nobody who saves expects one that ends the process
        free = f"{shutil.disk_usage(directory).free / 2**20:,.0f} MiB are free there"  # torch does not say why
        raise OSError(f"{directory}: the optimizer's state cannot be written ({free}): {_causes(error)}") from error


def load_state(directory: Path, optimizer: torch.optim.Optimizer, names: Mapping[str, Any]) -> int:
    """Read what `save_state` wrote into the optimizer; returns the schedule's step.

    UserError if the directory has no such state, or state of other parameters.
    """
    if not (directory / ".metadata").is_file():
        raise UserError(f"{directory}: no optimizer state here: it was saved without, or is damaged")
    flat = {}
    for key, stored in StateReader(str(directory)).read_metadata().state_dict_metadata.items():
        name = key.rsplit("/", 1)[0]
        if key != _STEP and name not in names:
            raise UserError(f"{directory}: state of parameters this model does not have, for example {name}")
        flat[key] = _room(stored, names.get(name))
    try:
        dcp.load(flat, storage_reader=StateReader(str(directory)))
    except CheckpointException as error:
        raise UserError(f"{directory}: the optimizer's state cannot be read: {_causes(error)}") from error
    step = int(flat.pop(_STEP))
    optimizer.state.clear()
    for key, value in flat.items():
        name, entry = key.rsplit("/", 1)
        number = entry.endswith(_NUMBER)
        optimizer.state[names[name]][entry.removesuffix(_NUMBER)] = float(value) if number else value
    if names:
        move_state(optimizer, next(iter(names.values())).device)
    return step


def _causes(error: Any) -> str:
    """What went wrong on which rank."""
    failed = sorted(error.failures.items())
    return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in failed)


def _room(stored: Any, parameter: Any) -> torch.Tensor:
    """An empty tensor to read an entry into, cut like its parameter if it has the parameter's shape."""
    dtype = stored.properties.dtype
    if isinstance(parameter, DTensor) and parameter.shape == stored.size:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=dtype)


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return PurePath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no list of tensors needs")


class StateReader(dcp.FileSystemReader):
    """`FileSystemReader` for checkpoints of unknown origin. UserError for a list that is not one, or that names files
    outside its own folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """The list of tensors."""
        path = Path(str(self._get_metadata_path(kwargs.get("rank"))))
        try:
            with path.open("rb") as file:
                contents = _Restricted(file).load()
            names = [str(stored.relative_path) for stored in contents.storage_data.values()]
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{path}: this is no list of tensors ({error}); it was not read") from error
        for name in names:
            if name in ("", ".", "..") or PurePath(name).name != name:
                raise UserError(f"{path}: names a file outside of its folder ({name}); it was not read")
        contents.storage_meta = contents.storage_meta or metadata.StorageMeta()
        contents.storage_meta.load_id = self.load_id
        return contents
