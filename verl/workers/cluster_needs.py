"""What a run asks of a cluster: pools of devices, each on nodes of its own; two pools may share a node.

Says in advance what placement groups say at the start. Imports no ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from verl.config import Config
from verl.config.layout import own_pools
from verl.errors import UserError


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """A pool: `nodes` different nodes with `devices` each (processors: cores). `keys`: the group that sets it."""

    keys: str
    nodes: int
    devices: int

    def __str__(self) -> str:
        return f"{self.nodes} node{'s' * (self.nodes != 1)} of {self.devices} ({self.keys})"


def resource_requests(config: Config) -> tuple[ResourceRequest, ...]:
    """The pools of a run."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    pools = [ResourceRequest("trainer", trainer.nnodes, trainer.n_gpus_per_node)]
    if rollout.nnodes:
        keys = "actor_rollout_ref.rollout"
        pools.append(ResourceRequest(keys, rollout.nnodes, rollout.n_gpus_per_node))
    pools += [ResourceRequest(pool.keys, pool.nodes, pool.per_node) for pool in own_pools(config).values()]
    return tuple(pools)


def placeable(devices: Iterable[int], pools: Sequence[ResourceRequest]) -> bool:
    """True if nodes with so many devices can hold all pools: the largest first, each where most is free."""
    free = list(devices)
    for pool in sorted(pools, key=lambda pool: -pool.devices):
        free.sort(reverse=True)
        if len(free) < pool.nodes or free[pool.nodes - 1] < pool.devices:
            return False
        free[: pool.nodes] = [count - pool.devices for count in free[: pool.nodes]]
    return True


def no_cluster(address: str, error: Exception) -> UserError:
    """What to say when a cluster does not answer."""
    return UserError(
        f"no Ray cluster answers at {address} (RAY_ADDRESS or ray_kwargs.ray_init.address): {error}. Start one "
        "with examples/ray_start.sh, or unset the address to use this machine alone"
    )
