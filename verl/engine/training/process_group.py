"""Joining the ranks of one training engine.

The host of an engine (a Ray actor, a process of torchrun) calls `init_process_group` or `init_from_environment`
before it builds the engine. Tensors in host memory go over gloo, those on a device over the device's own library;
on a processor both are gloo.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist

from verl.errors import UserError
from verl.platform import Platform
from verl.platform.network import listen

DEFAULT_TIMEOUT = 600.0


def init_process_group(
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    platform: Platform,
    timeout: float = DEFAULT_TIMEOUT,
) -> None:
    """Join `world_size` ranks that meet at master_addr:master_port; rank 0 listens there, on that address only.

    `timeout` in seconds holds for the meeting and for every collective. UserError if the port is taken or the
    ranks do not meet.
    """
    if _is_loopback(master_addr):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_name())
    limit = timedelta(seconds=timeout)
    where = f"{master_addr}:{master_port}"
    try:
        listening = listen(master_addr, master_port) if rank == 0 else None
        store = dist.TCPStore(
            master_addr,
            master_port,
            world_size,
            is_master=rank == 0,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listening,
        )
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"training rank {rank} of {world_size} cannot meet the others at {where}: {error}"
        ) from error
    dist.init_process_group(
        backend_of(platform), store=store, rank=rank, world_size=world_size, timeout=limit
    )


def init_from_environment(platform: Platform, timeout: float = DEFAULT_TIMEOUT) -> None:
    """Join the ranks that torchrun started (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
    if _is_loopback(os.environ.get("MASTER_ADDR", "")):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_name())
    dist.init_process_group(backend_of(platform), init_method="env://", timeout=timedelta(seconds=timeout))


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


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _loopback_name() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
