"""A process on a node that tells what the node has, who it can reach and where its processes stand, and takes part in an
all-reduce. Arguments and results are JSON-like: the code on the other side may be another. Knows nothing of Ray."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.platform import network, stacks
from verl.workers import node_facts

if TYPE_CHECKING:
    import torch

    from verl.platform import Platform

_CONNECT_S = 5.0
_REPEATS = 10


class NodeProbe:
    """One for each node, and one for each rank of the all-reduce."""

    facts = staticmethod(node_facts.collect)
    stack = staticmethod(stacks.ask)
    free_port = staticmethod(network.reserve)

    def everything(self, models: Sequence[str], address: str, temporary: str) -> dict[str, Any]:
        """What `verl doctor --cluster` shows of a node: `node_facts.collect` and `node_facts.surroundings`."""
        return node_facts.collect(models) | node_facts.surroundings(address, temporary)

    def now(self) -> float:
        """This node's clock, seconds."""
        return time.time()

    def sees(self, path: str) -> bool:
        """Whether a file exists here."""
        return Path(path).is_file()

    def reach(self, targets: Sequence[tuple[str, int]]) -> list[str]:
        """For each (address, port): "" if a connection comes about, else what went wrong."""
        with ThreadPoolExecutor(32) as threads:
            return list(threads.map(_connect, targets))

    def all_reduce(
        self, rank: int, world: int, address: str, port: int, kind: str, timeout: float, count: int
    ) -> list[dict[str, Any]]:
        """Meet the other ranks as training ranks do and sum `count` bytes of float32 over all of them, in host memory and
        then on the device if there is one.

        Returns for each {"over", "bytes", "seconds", "latency"}: medians, a large tensor and a single number. UserError if
        the ranks do not meet, RuntimeError if a sum is wrong.
        """
        import torch

        from verl.engine.training.process_group import init_process_group
        from verl.platform import detect

        platform = detect(kind)
        platform.select(0)
        init_process_group(rank, world, address, port, platform, timeout)
        places = {"gloo": torch.device("cpu"), platform.collectives: platform.device()}
        found = []
        for name, device in places.items():
            large, single = torch.empty(max(1, count // 4), device=device), torch.empty(1, device=device)
            seconds, latency = (_median_seconds(tensor, platform, name) for tensor in (large, single))
            found.append({"over": name, "bytes": large.nbytes, "seconds": seconds, "latency": latency})
        torch.distributed.destroy_process_group()
        return found


def _median_seconds(tensor: torch.Tensor, platform: Platform, name: str) -> float:
    """Of an all-reduce of this tensor. The first one, which sets up connections, does not count."""
    import torch.distributed as dist

    world, rank, seconds = dist.get_world_size(), dist.get_rank(), []
    for _ in range(_REPEATS + 1):
        tensor.fill_(rank + 1)
        dist.barrier()
        platform.synchronize()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        platform.synchronize()
        seconds.append(time.perf_counter() - start)
    if not bool((tensor == world * (world + 1) / 2).all()):
        raise RuntimeError(f"all-reduce over {name}: rank {rank} got a wrong sum")
    return statistics.median(seconds[1:])


def _connect(target: tuple[str, int]) -> str:
    try:
        host, port = target  # a list, after its way here
        with socket.create_connection((host, port), timeout=_CONNECT_S):
            return ""
    except OSError as error:
        return str(error) or type(error).__name__
