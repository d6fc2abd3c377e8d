"""Which devices of which node a role gets: pools of devices as placement groups, one bundle a node."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.errors import UserError
from verl.platform import platform_of
from verl.platform.network import LONGEST_WAIT
from verl.workers.ray.calls import NoRoom, WorkerDied, within
from verl.workers.ray.cluster import Cluster, worker_environment

_LOOK_S, _QUIET_S = 1.0, 5.0
Started = TypeVar("Started")


class DevicePool:
    """`nodes` × `per_node` devices, every node's in one bundle. Waits until Ray has set them aside.

    UserError when the cluster does not have them, or has given them to another job.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        nodes: int,
        per_node: int,
        timeout: float,
        notice: Callable[[str], None],
    ):
        self.name, self.nodes, self.per_node, self.timeout = name, nodes, per_node, timeout
        self.kind, self._released = cluster.kind, False
        fit = cluster.wait_for_nodes(nodes, per_node, name, timeout, notice)
        self._resource = platform_of(cluster.kind).ray_resource
        cores = min(per_node, *(n.cpus for n in fit[:nodes]))
        # A processor's rank is a core. Beside an accelerator, work on the cores comes in bursts.
        bundle: dict[str, float] = {"CPU": 0.1 * cores if self._resource else cores}
        if self._resource:
            bundle[self._resource] = per_node
        self.group = placement_group([bundle] * nodes, strategy="STRICT_SPREAD" if nodes > 1 else "PACK")
        if not self._wait_until_free(notice):
            remove_placement_group(self.group)
            raise UserError(
                f"{name}: {nodes} × {per_node} {cluster.kind} devices are in the cluster but were not free within "
                f"{timeout:g} s; another job holds them, or two pools ask for the same ones"
            )
        self.threads = 1  # of each process, until `share_cores` knows all pools
        self.runtime_env: dict[str, Any] = {}  # more of Ray's fields for each process
        self.variables: dict[str, str] = {}  # more of the environment of each process

    def _wait_until_free(self, notice: Callable[[str], None]) -> bool:
        """Whether Ray has set the devices aside within the time limit; a wait of more than _QUIET_S is announced."""
        limit = min(self.timeout, LONGEST_WAIT)
        if self.group.wait(min(limit, _QUIET_S)):
            return True
        if limit <= _QUIET_S:
            return False
        kinds = ("CPU", *([self._resource] if self._resource else []))
        free = ray.available_resources()
        notice(
            f"waiting for free devices: {self.name}; free in the whole cluster: "
            f"{', '.join(f'{free.get(kind, 0.0):g} {kind}' for kind in kinds)}"
        )
        return bool(self.group.wait(limit - _QUIET_S))

    @property
    def devices(self) -> int:
        """All of them."""
        return self.nodes * self.per_node

    def node_of(self, bundle: int) -> str:
        """Ray's id of the node that a bundle is on."""
        table = ray.util.placement_group_table(self.group)
        return str(table["bundles_to_node_id"][bundle])

    def again(self, bundle: int, start: Callable[[str], Started]) -> tuple[Started, str]:
        """start(node id) once more in the place of a worker that died; returns what it gave, and the node. Blocking.

        A bundle of a lost node moves to a node that has room: Ray sees the loss after half a minute, and fails what was
        sent there until then. WorkerDied as start() raises it on a node that lives, NoRoom when no node has room.
        """
        while True:
            node = self._settled(bundle)
            try:
                return start(node), node
            except WorkerDied:
                if self._released or node in _living():
                    raise

    def _settled(self, bundle: int) -> str:
        """The living node that a bundle is on, or is moved to."""
        end = time.monotonic() + self.timeout
        while True:
            if self._released:
                raise WorkerDied(f"{self.name} was released")
            table = ray.util.placement_group_table(self.group)
            node = str(table["bundles_to_node_id"].get(bundle))
            if table["state"] == "CREATED" and node in _living():
                return node
            if time.monotonic() >= end:
                raise NoRoom(
                    f"a node of {self.name} is lost and no other had {self.per_node} {self.kind} devices free within "
                    f"{self.timeout:g} s (trainer.ray_wait_register_center_timeout)"
                )
            time.sleep(_LOOK_S)

    def owner_options(self, bundle: int, devices: int) -> dict[str, Any]:
        """Options of an actor that owns `devices` of a node: Ray shows it these and no others."""
        options = self._options(bundle, {})
        if self._resource == "GPU":
            options["num_gpus"] = devices
        elif self._resource:
            options["resources"] = {self._resource: devices}
        return options

    def guest_options(self, bundle: int, visible: list[str]) -> dict[str, Any]:
        """Options of an actor that shares devices with their owners; `visible` are their ids on the node."""
        variable = platform_of(self.kind).visible_devices
        env = {variable: ",".join(visible), f"RAY_EXPERIMENTAL_NOSET_{variable}": "1"} if variable else {}
        return self._options(bundle, env)

    def _options(self, bundle: int, env: dict[str, str]) -> dict[str, Any]:
        return {
            "num_cpus": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=bundle
            ),
            "runtime_env": {"env_vars": worker_environment(self.threads) | self.variables | env, **self.runtime_env},
        }

    def release(self) -> None:
        """Give the devices back; those of a cluster without a head go when this process ends."""
        self._released = True
        within(lambda: remove_placement_group(self.group))


def share_cores(cluster: Cluster, pools: Sequence[DevicePool]) -> None:
    """Set each pool's `threads`: the cores of a node divided by the devices that all pools have on it. Guests take
    turns with the owners of their devices, and have the same number."""
    cores = {node.id: int(node.cpus) for node in cluster.nodes()}
    places = [(pool, pool.node_of(bundle)) for pool in pools for bundle in range(pool.nodes)]
    crowd: Counter[str] = Counter()
    for pool, node in places:
        crowd[node] += pool.per_node
    for pool in pools:
        pool.threads = max(1, min(cores.get(node, 1) // crowd[node] for p, node in places if p is pool))


def _living() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
