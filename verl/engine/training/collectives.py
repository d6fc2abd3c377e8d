"""Ranks tell each other small things: counts, metrics, reasons. JSON over a collective of bytes, nothing pickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from verl.engine.training.process_group import waiting
from verl.errors import UserError

_T = TypeVar("_T")


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value` (anything JSON holds; NaN too), in rank order. Collective, over host memory.

    Of one process, which has joined no others: its own.
    """
    if not dist.is_initialized():
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    with waiting("an all_gather_json of what all ranks must agree on"):
        parts = _all_bytes(mine, group)
    return [json.loads(part.numpy().tobytes()) for part in parts]


def _all_bytes(mine: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([mine.numel()]), group=group)
    width = max(int(size) for size in sizes)
    padded = torch.zeros(width, dtype=torch.uint8)
    padded[: mine.numel()] = mine
    parts = [torch.zeros(width, dtype=torch.uint8) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(size)] for part, size in zip(parts, sizes, strict=True)]


def this_rank() -> int:
    """This process's rank, 0 of one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def on_all_ranks(work: Callable[[], _T], group: dist.ProcessGroup | None = None) -> _T:
    """work() on every rank; an error of one is raised by all, so that none waits for one that gave up.

    The failed rank raises its own error, the others a UserError that says what it was and where.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    problems = all_gather_json("" if failure is None else _text(failure), group)
    if failure is not None:
        raise failure
    for rank, problem in enumerate(problems):
        if problem:
            raise UserError(f"rank {rank}: {problem}")
    return result


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, (UserError, OSError)) else f"{type(error).__name__}: {error}"
