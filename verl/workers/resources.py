"""What a run asks of a cluster: pools of devices, each on nodes of its own; two pools may share a node.

Says in advance what placement groups say at the start. Imports no ray.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from verl.errors import UserError


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """A pool: `nodes` different nodes with `devices` each (processors: cores). `keys`: the group that sets it."""

    keys: str
    nodes: int
    devices: int

    def __str__(self) -> str:
        return f"{self.nodes} node{'s' * (self.nodes != 1)} of {self.devices} ({self.keys})"


def resource_requests(config: Any, given: Collection[str] | None = None) -> tuple[ResourceRequest, ...]:
    """The pools of a run. `given`: keys that the user set, where devices that nobody asked for count as one."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    ours, theirs = "trainer", "actor_rollout_ref.rollout"
    named = {f"{group}.n_gpus_per_node" for group in (ours, theirs)}

    def size(asked: int, keys: Collection[str]) -> int:
        return asked if given is None or set(given) & set(keys) else 1

    pools = [
        ResourceRequest(ours, trainer.nnodes, size(trainer.n_gpus_per_node, (f"{ours}.n_gpus_per_node",)))
    ]
    if rollout.nnodes:
        pools.append(ResourceRequest(theirs, rollout.nnodes, size(rollout.n_gpus_per_node, named)))
    return tuple(pools)


def placeable(devices: Iterable[int], pools: Sequence[ResourceRequest]) -> bool:
    """True if nodes with so many devices can hold all of at most two pools."""
    left = list(devices)
    for place, pool in enumerate(pools):
        later = pools[place + 1 :]

        def spoils(node: int, pool: ResourceRequest = pool, later: Sequence[ResourceRequest] = later) -> bool:
            return any(left[node] >= other.devices > left[node] - pool.devices for other in later)

        fit = sorted((node for node, free in enumerate(left) if free >= pool.devices), key=spoils)
        if len(fit) < pool.nodes:
            return False
        for node in fit[: pool.nodes]:
            left[node] -= pool.devices
    return True


def no_cluster(address: str, error: Exception) -> UserError:
    """What to say when a cluster does not answer."""
    return UserError(
        f"no Ray cluster answers at {address} (RAY_ADDRESS or ray_kwargs.ray_init.address): {error}. Start one "
        "with examples/ray_start.sh, or unset the address to use this machine alone"
    )
