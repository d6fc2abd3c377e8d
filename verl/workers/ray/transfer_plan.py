"""Which training rank writes which channel of weights, and who reads it.

by node     rank 0 ─▶ channel of node A ─▶ every sampler process of A        one copy a node, in host memory
            rank 4 ─▶ channel of node B ─▶ every sampler process of B
by device   rank r ─▶ channel of device r ─▶ the sampler process on device r   handles of device memory
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verl.platform.processes import Identity
from verl.workers.ray.replicas import Replica

Place = tuple[str, int]
"""A channel, and the number of a reader on it."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """One transfer.

    writes    by training rank: the channel it writes and its readers, or None for one that only gathers with the others
    places    where each process of a replica reads
    relayed   nodes without a training rank, whose channel one of their replicas writes: node → channel, readers
    on_device writers and readers share devices: buckets stay there
    """

    writes: list[tuple[str, list[Identity]] | None]
    places: dict[Replica, list[Place]]
    relayed: dict[str, tuple[str, list[Identity]]] = field(default_factory=dict)
    on_device: bool = False


def by_node(nodes: Sequence[str], replicas: Sequence[Replica], name: str) -> TransferPlan:
    """Through host memory. `nodes[i]` is the node of training rank i; `name` begins every channel's name."""
    readers: dict[str, list[Identity]] = {}
    places: dict[Replica, list[Place]] = {}
    for replica in replicas:
        mine = readers.setdefault(replica.node, [])
        places[replica] = [(_channel(name, replica.node), len(mine) + i) for i in range(len(replica.readers))]
        mine += replica.readers
    writes = [
        (_channel(name, node), readers[node]) if node in readers and node not in nodes[:rank] else None
        for rank, node in enumerate(nodes)
    ]
    relayed = {node: (_channel(name, node), found) for node, found in readers.items() if node not in nodes}
    return TransferPlan(writes, places, relayed)


def by_device(devices: Sequence[str], replicas: Sequence[Replica], name: str) -> TransferPlan | None:
    """Through device memory, or None unless every sampler process is on the device of a training rank.

    `devices[i]` is the id of the device of training rank i, "" for one without; each replica knows those of its readers.
    """
    readers: list[list[Identity]] = [[] for _ in devices]
    places: dict[Replica, list[Place]] = {}
    for replica in replicas:
        for reader, device in zip(replica.readers, replica.devices, strict=True):
            if not device or device not in devices:
                return None
            rank = list(devices).index(device)
            places.setdefault(replica, []).append((f"{name}-r{rank}", len(readers[rank])))
            readers[rank].append(reader)
    writes = [(f"{name}-r{rank}", found) if found else None for rank, found in enumerate(readers)]
    return TransferPlan(writes, places, on_device=True)


def _channel(name: str, node: str) -> str:
    return f"{name}-{node[:12]}"
