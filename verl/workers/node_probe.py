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

if TYPE_CHECKING:
    import torch

    from verl.platform import Platform

_CONNECT_S = 5.0
_REPEATS = {"latency": 20, "seconds": 5}


class NodeProbe:
    """One for each node, and one for each rank of the all-reduce."""

    def __init__(self) -> None:
        self._server: socket.socket | None = None
        self._platform: Platform | None = None

    def facts(self, models: Sequence[str]) -> dict[str, Any]:
        """See `verl.workers.node_facts.collect`."""
        from verl.workers.node_facts import collect

        return collect(models)

    def surroundings(self, address: str, temporary: str | None) -> dict[str, Any]:
        """See `verl.workers.node_facts.surroundings`."""
        from verl.workers.node_facts import surroundings

        return surroundings(address, temporary)

    def stacks(self, pids: Sequence[int]) -> dict[int, str]:
        """Stacks of processes of this node."""
        from verl.platform import stacks

        return {pid: stacks.ask(pid) for pid in pids}

    def now(self) -> float:
        """This node's clock, seconds."""
        return time.time()

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
        """A port that is free at this address."""
        port = self.listen(address)
        self.close()
        return port

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

        platform = self._platform
        assert platform is not None, "join() comes before all_reduce()"
        places = [("gloo", torch.device("cpu"))]
        if platform.collectives != "gloo":
            places.append((platform.collectives, platform.device()))
        found = []
        for name, device in places:
            sizes = {"latency": 1, "seconds": max(1, count // 4)}
            times = {
                what: self._time(torch.empty(size, device=device), _REPEATS[what], name)
                for what, size in sizes.items()
            }
            found.append({"over": name, "bytes": sizes["seconds"] * 4, **times})
        return found

    def _time(self, tensor: torch.Tensor, repeats: int, name: str) -> float:
        """Median seconds of an all-reduce of this tensor."""
        import torch.distributed as dist

        assert self._platform is not None
        world, rank, seconds = dist.get_world_size(), dist.get_rank(), []
        for _ in range(repeats + 1):
            tensor.fill_(rank + 1)
            dist.barrier()
            self._platform.synchronize()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            self._platform.synchronize()
            seconds.append(time.perf_counter() - start)
        if not bool((tensor == world * (world + 1) / 2).all()):
            raise RuntimeError(f"all-reduce over {name}: rank {rank} got a wrong sum")
        return statistics.median(seconds[1:])

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
