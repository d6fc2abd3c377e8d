"""Optimizer and schedule on disk, through torch.distributed.checkpoint, by parameter name.

Everything is a tensor, so that any number of ranks can read it again; numbers become float64 tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from verl.errors import UserError

_STEP = "schedule.step"
_NUMBER = "#number"


def save_state(
    directory: Path, optimizer: torch.optim.Optimizer, names: Mapping[str, Any], step: int
) -> None:
    """Write the state of every parameter and the schedule's step. `names` maps names to parameters.

    OSError, on every rank, where one cannot write.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    flat: dict[str, torch.Tensor] = {_STEP: torch.tensor(step, dtype=torch.int64)}
    for name, parameter in names.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                flat[f"{name}/{key}"] = value
            elif isinstance(value, (int, float)):
                flat[f"{name}/{key}{_NUMBER}"] = torch.tensor(float(value), dtype=torch.float64)
            else:
                raise UserError(f"optimizer state {key!r} of type {type(value).__name__} cannot be saved")
    directory.mkdir(parents=True, exist_ok=True)
    try:
        dcp.save(flat, checkpoint_id=str(directory), no_dist=not _sharded(names))
    except CheckpointException as error:  # no Exception: nobody who saves expects one that ends the process
        raise OSError(f"{directory}: the optimizer's state cannot be written: {_causes(error)}") from error


def load_state(directory: Path, optimizer: torch.optim.Optimizer, names: Mapping[str, Any]) -> int:
    """Read what `save_state` wrote into the optimizer; returns the schedule's step.

    UserError if the directory has no such state, or state of other parameters.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from verl.engine.training.checkpoint_reader import Reader

    if not (directory / ".metadata").is_file():
        raise UserError(
            f"{directory}: no optimizer state here; the checkpoint was saved without it or is damaged"
        )
    described = Reader(str(directory)).read_metadata().state_dict_metadata
    flat: dict[str, torch.Tensor] = {}
    for key, meta in described.items():
        if not isinstance(meta, TensorStorageMetadata):
            raise UserError(f"{directory}: {key} is no tensor; this was not written by verl")
        flat[key] = _room(meta, names.get(key.rsplit("/", 1)[0]))
    unknown = sorted({k.rsplit("/", 1)[0] for k in flat if k != _STEP} - set(names))
    if unknown:
        raise UserError(
            f"{directory}: state of parameters this model does not have, for example {unknown[0]}"
        )
    try:
        dcp.load(flat, storage_reader=Reader(str(directory)), no_dist=not _sharded(names))
    except CheckpointException as error:
        raise UserError(f"{directory}: the optimizer's state cannot be read: {_causes(error)}") from error
    step = int(flat.pop(_STEP))
    found: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        name, entry = key.rsplit("/", 1)
        number = entry.endswith(_NUMBER)
        found.setdefault(name, {})[entry.removesuffix(_NUMBER)] = float(value) if number else value
    optimizer.state.clear()
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for name, state in found.items():
        parameter = names[name]
        for entry, value in state.items():
            # A fused optimizer reads its step count on the device; the others want it in host memory.
            if isinstance(value, torch.Tensor) and (on_device or value.shape == parameter.shape):
                state[entry] = value.to(parameter.device)
        optimizer.state[parameter] = state
    return step


def _causes(error: Any) -> str:
    """What went wrong on which rank."""
    return "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))


def _sharded(names: Mapping[str, Any]) -> bool:
    """True if parameters are cut over ranks: then saving and loading is collective."""
    return any(isinstance(parameter, DTensor) for parameter in names.values())


def _room(meta: Any, parameter: Any) -> torch.Tensor:
    """An empty tensor to read an entry into, cut like its parameter if it has the parameter's shape."""
    dtype = meta.properties.dtype
    if isinstance(parameter, DTensor) and parameter.shape == meta.size:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(meta.size, dtype=dtype)
