"""A process on a node that tells what the node has, who it can reach, and takes part in an all-reduce.

For `verl doctor --cluster`. Arguments and results are JSON-like. Knows nothing of how it is called from afar.
"""

from __future__ import annotations

import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.platform import Platform

_CONNECT_S = 5.0
_REPEATS = 5
_SMALL_REPEATS = 20


class ClusterProbe:
    """One for each node, and one for each rank of the all-reduce."""

    def __init__(self) -> None:
        self._server: socket.socket | None = None
        self._platform: Platform | None = None

    def facts(self, address: str, temporary: str | None, model: str | None) -> dict[str, Any]:
        """See `verl.workers.node_facts.collect`."""
        from verl.workers.node_facts import collect

        return collect(address, temporary, model)

    def now(self) -> float:
        """This node's clock, seconds."""
        return time.time()

    def ready(self) -> bool:
        """True: the process runs."""
        return True

    def sees(self, path: str) -> bool:
        """Whether a file exists here."""
        return Path(path).is_file()

    def listen(self, address: str) -> int:
        """Listen on a free port of this address alone, until `close`; returns the port."""
        self._server = socket.create_server((address, 0), backlog=1024)
        return int(self._server.getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def reach(self, targets: list[tuple[str, int]]) -> list[str | None]:
        """For each (address, port): None if a connection comes about, else what went wrong."""
        with ThreadPoolExecutor(min(32, max(1, len(targets)))) as threads:
            return list(threads.map(_connect, targets))

    def free_port(self, address: str) -> int:
        """A port nobody listens on at this address."""
        with socket.socket() as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])

    def join(self, rank: int, world: int, address: str, port: int, kind: str, timeout: float) -> None:
        """Meet the other ranks as training ranks do. UserError if they do not come."""
        from verl.engine.training.process_group import init_process_group
        from verl.platform import detect

        self._platform = detect(kind)
        self._platform.select(0)
        init_process_group(rank, world, address, port, self._platform, timeout)

    def all_reduce(self, count: int) -> list[dict[str, Any]]:
        """Sum `count` bytes of float32 over all ranks, in host memory and then on the device if there is one.

        Returns for each {"over", "bytes", "seconds", "latency"}: medians, a large tensor and a single number.
        RuntimeError when the sum is wrong.
        """
        import torch
        import torch.distributed as dist

        platform = self._platform
        if platform is None:
            raise RuntimeError("join() comes before all_reduce()")
        places = [("gloo", torch.device("cpu"))]
        if platform.collectives != "gloo":
            places.append((platform.collectives, platform.device()))
        world, rank = dist.get_world_size(), dist.get_rank()
        found = []
        for name, device in places:
            large = torch.empty(max(1, count // 4), device=device)
            small = torch.empty(1, device=device)
            times = {}
            for what, tensor, repeats in (("latency", small, _SMALL_REPEATS), ("seconds", large, _REPEATS)):
                seconds = []
                for _ in range(repeats + 1):
                    tensor.fill_(rank + 1)
                    dist.barrier()
                    platform.synchronize()
                    start = time.perf_counter()
                    dist.all_reduce(tensor)
                    platform.synchronize()
                    seconds.append(time.perf_counter() - start)
                times[what] = statistics.median(seconds[1:])
                if not bool((tensor == world * (world + 1) / 2).all()):
                    raise RuntimeError(f"all-reduce over {name}: rank {rank} got a wrong sum")
            found.append({"over": name, "bytes": large.numel() * 4, **times})
        return found

    def leave(self) -> None:
        """Leave the group of ranks."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _connect(target: tuple[str, int]) -> str | None:
    try:
        with socket.create_connection(tuple(target), timeout=_CONNECT_S):
            return None
    except OSError as error:
        return str(error) or type(error).__name__
