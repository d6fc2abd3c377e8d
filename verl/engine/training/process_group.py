"""Joining the ranks of one training engine, and what they tell each other: counts, metrics, reasons, as JSON over a
collective of bytes, nothing pickled; and a rank's part of a tensor.

The host of an engine (a Ray actor, a process of torchrun) calls `init_process_group` or `init_from_environment`
before it builds the engine. Tensors in host memory go over gloo, those on a device over the device's own library;
on a processor both are gloo. Every group that is made later gets the limit of the first (`split`, `mesh`): torch
itself would give it 10 or 30 minutes.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from verl.errors import UserError
from verl.platform import Platform
from verl.platform.network import listen, time_limit

DEFAULT_TIMEOUT = 600.0

_T = TypeVar("_T")
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)
# Of the default group; torch keeps one of those in a process, too.
_limit = timedelta(seconds=DEFAULT_TIMEOUT)
_limit_key = ""


class RanksApart(RuntimeError):
    """A rank waited for the others in a collective until its time was up. The rank that raises is not the culprit."""


def init_process_group(
    rank: int,
    world: int,
    master_addr: str,
    master_port: int,
    platform: Platform,
    timeout: float = DEFAULT_TIMEOUT,
) -> None:
    """Join `world` ranks that meet at master_addr:master_port; rank 0 listens there, on that address only.

    `timeout` in seconds holds for the rendezvous and for every collective of every group. UserError if the port is
    taken or the ranks do not meet.
    """
    global _limit, _limit_key
    _stay_on_loopback(master_addr)
    limit = time_limit(timeout)
    try:
        listening = listen(master_addr, master_port) if rank == 0 else None
        options: dict[str, Any] = {"is_master": rank == 0, "wait_for_workers": False, "timeout": limit}
        store = dist.TCPStore(master_addr, master_port, world, master_listen_fd=listening, **options)
    except (OSError, RuntimeError) as error:
        who, where = f"training rank {rank} of {world}", f"{master_addr}:{master_port}"
        raise UserError(f"{who} cannot meet the others at {where}: {error}") from error
    dist.init_process_group(backend_of(platform), store=store, rank=rank, world_size=world, timeout=limit)
    _limit, _limit_key = limit, "actor_rollout_ref.nccl_timeout"


def init_from_environment(platform: Platform, timeout: float = DEFAULT_TIMEOUT) -> None:
    """Join the ranks that torchrun started (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). No key sets the timeout."""
    global _limit, _limit_key
    _stay_on_loopback(os.environ.get("MASTER_ADDR", ""))
    limit = time_limit(timeout)
    dist.init_process_group(backend_of(platform), init_method="env://", timeout=limit)
    _limit, _limit_key = limit, ""


def collective_limit() -> timedelta:
    """How long a collective of the joined ranks may take."""
    return _limit


def split(parts: Sequence[Sequence[int]], what: str) -> dist.ProcessGroup:
    """The group of this rank among `parts`: lists of ranks, each rank in one of them. Collective.

    `what` is its name in messages. One part is the default group itself.
    """
    if len(parts) == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    groups = [dist.new_group(list(ranks), timeout=_limit, group_desc=what) for ranks in parts]
    return next(group for group, ranks in zip(groups, parts, strict=True) if dist.get_rank() in ranks)


def mesh(device_type: str, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """All ranks in the order of `shape`, one group for each dimension. Collective.

    torch's own `init_device_mesh` takes no timeout.
    """
    places = torch.arange(dist.get_world_size()).view(*shape)
    parts = [places.movedim(number, -1).reshape(-1, size).tolist() for number, size in enumerate(shape)]
    groups = [split(ranks, name) for ranks, name in zip(parts, names, strict=True)]
    return DeviceMesh.from_group(groups, device_type, mesh=places, mesh_dim_names=tuple(names))


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A collective inside that runs out of time raises RanksApart, which says that it was in `what`.

    For host memory: over a device's own library such a collective ends the process, and its log names the group.
    """
    try:
        yield
    except RanksApart:
        raise
    except RuntimeError as error:
        if not _LATE.search(str(error)) or not dist.is_initialized():
            raise
        key = f" ({_limit_key})" if _limit_key else ""
        otherwise = ", or raise the limit if they are only slow" if _limit_key else ""
        raise RanksApart(
            f"training rank {dist.get_rank()} of {dist.get_world_size()} waited {_limit.total_seconds():g} s{key} in "
            f"{what} for other ranks, which did not come: look at where they stand{otherwise}. {error}"
        ) from error


def all_gather_json(value: Any) -> list[Any]:
    """Every rank's `value` (anything JSON holds; NaN too), in rank order. Collective, over host memory.

    Of one process, which has joined no others: its own.
    """
    if not dist.is_initialized():
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    with waiting("a gather of what all ranks must agree on"):
        parts = _all_bytes(mine)
    return [json.loads(part.numpy().tobytes()) for part in parts]


def _all_bytes(mine: torch.Tensor) -> list[torch.Tensor]:
    ranks = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([mine.numel()]))
    width = max(int(size) for size in sizes)
    padded = torch.zeros(width, dtype=torch.uint8)
    padded[: mine.numel()] = mine
    parts = [torch.zeros(width, dtype=torch.uint8) for _ in range(ranks)]
    dist.all_gather(parts, padded)
    return [part[: int(size)] for part, size in zip(parts, sizes, strict=True)]


def this_rank() -> int:
    """This process's rank, 0 of one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def on_all_ranks(work: Callable[[], _T]) -> _T:
    """work() on every rank; an error of one is raised by all, so that none waits for one that gave up.

    The failed rank raises its own error, the others a UserError that says what it was and where.
    """
    result: Any = None
    failure: Exception | None = None
    text = ""
    try:
        result = work()
    except Exception as error:
        failure = error
        text = str(error) if isinstance(error, (UserError, OSError)) else f"{type(error).__name__}: {error}"
    problems = all_gather_json(text)
    if failure is not None:
        raise failure
    for rank, problem in enumerate(problems):
        if problem:
            raise UserError(f"rank {rank}: {problem}")
    return result


def leave() -> None:
    """Part from the other ranks, when all have done their work; harmless without a group."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def backend_of(platform: Platform) -> str:
    """torch's name of the collective backends for a kind of device: host memory always goes over gloo."""
    if platform.collectives == "gloo":
        return "gloo"
    return f"cpu:gloo,{platform.name}:{platform.collectives}"


def _stay_on_loopback(address: str) -> None:
    """Where ranks meet on the loopback, gloo talks over it too."""
    if address in ("localhost", "::1") or address.startswith("127."):
        names = (name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", next(names, "lo"))


# -- a rank's part of a tensor ---------------------------------------------------------------------------------


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share of a sharded tensor; any other as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor; collective for a sharded one."""
    if not isinstance(tensor, DTensor):
        return tensor
    with waiting("gathering a weight"):
        # Where its ranks talk to each other: an offloaded share is brought there.
        return tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]


def take_share(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copy this rank's share of a full tensor into a sharded one; the whole into any other."""
    if not isinstance(target, DTensor):
        target.copy_(full)
        return
    mesh = target.device_mesh
    place = mesh.get_coordinate()
    assert place is not None
    # Tensor parallelism, the last dimension of the mesh, cuts first.
    for number in reversed(range(mesh.ndim)):
        cut = getattr(target.placements[number], "dim", None)
        if cut is not None:
            pieces = full.chunk(mesh.size(number), cut)
            full = pieces[place[number]] if place[number] < len(pieces) else full.narrow(cut, 0, 0)
    target._local_tensor.copy_(full)
