"""Weights from the training ranks to the sampler replicas, past the driver.

On each node the first training rank writes what all ranks gather together into a channel of shared memory, and that
node's replicas read it. Nodes that only sample get a broadcast of rank 0, which one of their replicas relays. Where
samplers sit on the trainers' own devices, each rank keeps its buckets there and passes handles.

by node     rank 0 ─▶ channel of node A ─▶ every sampler process of A        one copy a node, in host memory
            rank 4 ─▶ channel of node B ─▶ every sampler process of B
by device   rank r ─▶ channel of device r ─▶ the sampler process on device r   handles of device memory
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import exceptions as faults

from verl.platform.processes import Identity
from verl.weight_sync.sender import WeightSync
from verl.weight_sync.verify import SAMPLED, SyncResult, WeightSyncError, compare
from verl.workers.group import WorkerGroup
from verl.workers.ray.calls import RayCalls, WorkerFailed, reason
from verl.workers.ray.replicas import Replica, ReplicaPool, Troubles, troubles_of

_TIMEOUT_S = 300.0
_GRACE_S = 5.0
_TRIAL_S = 60.0
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
        places[replica] = []
        reader_nodes = replica.reader_nodes or [replica.node] * len(replica.readers)
        for reader, node in zip(replica.readers, reader_nodes, strict=True):
            mine = readers.setdefault(node, [])
            places[replica].append((_channel(name, node), len(mine)))
            mine.append(reader)
    writes = [
        (_channel(name, node), readers[node]) if node in readers and node not in nodes[:rank] else None
        for rank, node in enumerate(nodes)
    ]
    relayed = {node: (_channel(name, node), local) for node, local in readers.items() if node not in nodes}
    return TransferPlan(writes, places, relayed)


def by_device(devices: Sequence[str], replicas: Sequence[Replica], name: str) -> TransferPlan | None:
    """Through device memory, or None unless every sampler process is on the device of a training rank.

    `devices[i]` is the id of the device of training rank i, "" for none; each replica knows those of its readers.
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
    writes = [(f"{name}-r{rank}", processes) if processes else None for rank, processes in enumerate(readers)]
    return TransferPlan(writes, places, on_device=True)


def _channel(name: str, node: str) -> str:
    return f"{name}-{node[:12]}"


class RemoteWeightSync(WeightSync):
    """`nodes[i]` is the node of training worker i. `limit`: seconds for each collective of a broadcast.

    Workers whose "device_id" is "" have no device memory that has handles."""

    def __init__(self, training: WorkerGroup, nodes: Sequence[str], pool: ReplicaPool, limit: float):
        self._training, self._nodes, self._pool, self._limit = training, list(nodes), pool, limit
        self._devices = [fact["device_id"] for fact in training.facts]
        self._by_device: bool | None = None if any(self._devices) else False
        self._version = self._compared = 0
        # Drivers in two containers may have the same process id, and share the nodes that their workers are on.
        self._run, self._serial = f"{os.getpid()}-{secrets.token_hex(4)}", itertools.count()
        pool.refill = self.refill

    def _push(self, version: int, verify: str) -> SyncResult:
        """Hosts found dead are started again first."""
        started = time.monotonic()
        with self._training.lock:
            moved = self._to_all(version, verify)
            self._version, self._training.moved = version, False
        self._pool.weights_pushed(version)
        compared = self._compared if verify else 0
        return SyncResult(bytes=moved, seconds=time.monotonic() - started, verified=compared)

    def _to_all(self, version: int, verify: str) -> int:
        """Transfers until every replica has the weights but those that are being started again: they will `refill`."""
        pool, fresh = self._pool, set[Replica]()
        while True:  # a replica that keeps dying ends it with SamplerLost
            replicas = [replica for replica in pool.replicas if replica in fresh or not replica.reviving]
            if not replicas:
                return 0
            # One that died in its sleep would be waited for until the transfer's time is up.
            dead = pool.find_dead(replicas)
            if not dead:
                dead, moved = self._transfer(replicas, version, verify)
            if not dead:
                for replica in fresh:
                    replica.reviving = False
                return moved
            for replica, why in dead:
                if replica in fresh:  # again: its claim ends with the worker it was made for
                    replica.reviving = False
                replaced = pool.replace_dead(replica, why)
                fresh = fresh | {replica} if replaced else fresh - {replica}

    def refill(self, replica: Replica) -> str | None:
        """Give a fresh replica the weights that the ranks hold now, under their version. Returns why it died, or None.

        The claim ends under the lock: a push that comes next counts the replica in, and one that came before has not.
        """
        with self._training.lock:
            version = self._version + int(self._training.moved)
            dead, _ = self._transfer([replica], version, SAMPLED)
            if dead:
                return dead[0][1]
            replica.reviving = False
        return None

    def _transfer(self, replicas: Sequence[Replica], version: int, verify: str) -> tuple[Troubles, int]:
        """One pass from the ranks to `replicas`. Returns the replicas that turned out dead, and bytes moved, each
        weight once however many nodes got it."""
        plan = self._transfer_plan(replicas)
        common = (version, verify, replicas[0].dtype, plan.on_device)
        arguments = [(*(write or (None, [])), *common) for write in plan.writes]
        relays = self._relays(plan, replicas, arguments)
        receiving = {
            replica: replica.worker.handle.receive_weights.remote(plan.places[replica], version, _TIMEOUT_S, verify)
            for replica in replicas
        }
        try:
            sent = self._training.call("send_weights", each=arguments, doing="update_weights")
        except WorkerFailed as error:
            # One that still reads is left alone.
            dead, failed = troubles_of(receiving, _GRACE_S)
            if not dead:
                details = "".join(f"; {replica.worker}: {why}" for replica, why in failed)
                raise WorkerFailed(f"{error}{details}") from error
            return dead, 0
        dead, failed = troubles_of(receiving, _TIMEOUT_S)
        if dead:  # which explains what others raised
            return dead, 0
        for replica, why in failed:
            raise WeightSyncError(f"{replica.worker}: {why}")
        ray.get(relays)
        sums: dict[str, str] = next((reply["checksums"] for reply in sent if reply["checksums"]), {})
        for replica, ref in receiving.items() if verify else ():
            try:
                compare(sums, ray.get(ref))
            except WeightSyncError as error:
                raise WeightSyncError(f"{error} ({replica.worker})") from None
        self._compared = len(sums)
        return [], max(reply["bytes"] for reply in sent)

    def _transfer_plan(self, replicas: Sequence[Replica]) -> TransferPlan:
        """Through device memory where every sampler sits on a trainer's device and a trial has shown that it works."""
        name = f"verl-{self._run}-{next(self._serial)}"
        if self._by_device is None and (trial := by_device(self._devices, replicas, f"{name}-trial")):
            self._by_device = self._try(trial)
        direct = by_device(self._devices, replicas, name) if self._by_device else None
        return direct or by_node(self._nodes, replicas, name)

    def _try(self, plan: TransferPlan) -> bool:
        """Do handles of device memory work between these processes? Says so in the run's events."""
        handles = {replica: replica.worker.handle for replica in plan.places}
        calls = {
            replica: handles[replica].try_channel.remote(places, _TRIAL_S) for replica, places in plan.places.items()
        }
        arguments = [(*(write or (None, [])), plan.on_device, _TRIAL_S) for write in plan.writes]
        problems = list(self._training.call("try_channel", each=arguments, doing="update_weights"))
        for replica, ref in calls.items():
            try:
                problems += ray.get(ref, timeout=_TIMEOUT_S)
            except faults.RayError as error:
                problems.append(f"{replica.worker}: {reason(error)}")
        failed = [text for text in problems if text]
        self._pool.event("weights_by_device", works=not failed, reason=failed[0] if failed else "")
        return not failed

    def _relays(self, plan: TransferPlan, replicas: Sequence[Replica], arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Nodes without a training rank get weights by broadcast: worker 0 sends, the first replica of each relays."""
        if not plan.relayed:
            return []
        first = self._training.calls.workers[0]
        port = RayCalls([first]).call("free_port", first.node, doing="update_weights")[0]
        size = len(plan.relayed) + 1
        rendezvous = {"address": first.node, "port": port, "size": size, "timeout": self._limit}
        arguments[0] = (*arguments[0], rendezvous)
        relays = []
        for rank, (node, (channel, readers)) in enumerate(plan.relayed.items(), 1):
            replica = next(replica for replica in replicas if node in (replica.node, *replica.reader_nodes))
            relay = replica.worker.handle.relay_weights
            relays.append(relay.remote(rendezvous, rank, channel, readers, _TIMEOUT_S, node=node))
        return relays
