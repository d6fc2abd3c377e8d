"""Look at every node of a cluster: `verl doctor --cluster`. Facts, clocks, reach, and an all-reduce between the nodes.

    connect ─▶ a probe on each node ─▶ facts · clock against ours · who reaches whom ─▶ ranks meet, sum, time it

What the facts of the nodes mean is said by `verl.workers.compare_nodes` and `verl.cli.cluster`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from verl.errors import UserError
from verl.platform import platform_of
from verl.workers.compare_nodes import NOTE, Facts, Finding, bad
from verl.workers.ray.calls import RayCalls, WorkerDied, WorkerFailed, WorkerHandle
from verl.workers.ray.cluster import Cluster
from verl.workers.ray.nodes import ask_all, folder_is_shared, start_probe
from verl.workers.resources import ResourceRequest, placeable


@dataclass(slots=True)
class Survey:
    """What is asked of a cluster, and what `of` finds.

    pools      what the run takes; nodes that hold it are waited for
    models     a model's path or hub id, if any
    folder     a run folder that all nodes should see, if any
    megabytes  size of the all-reduce
    timeout    seconds for each step
    patience   seconds for nodes that are still starting

    kind       of the devices
    nodes      facts of each (see `verl.workers.node_facts`), with "name", "devices" (that Ray was told of), "object_store"
               (bytes), "clock" (seconds ahead of ours) and "clock_error", or "problem" where none could be had
    between    what was found out between the nodes: run folder, ports, all-reduce
    """

    pools: Sequence[ResourceRequest] = ()
    models: Sequence[str] = ()
    folder: Path | None = None
    megabytes: int = 64
    timeout: float = 120.0
    patience: float = 120.0
    say: Callable[[str], None] = print
    kind: str = ""
    nodes: list[Facts] = field(default_factory=list)
    between: list[Finding] = field(default_factory=list)
    probes: dict[str, Any] = field(default_factory=dict)

    def of(self, config: Any) -> Survey:
        """Start Ray here or join a cluster, as a run with this configuration would, and look at it. UserError when there
        is no cluster, or its version is refused."""
        cluster = Cluster(config, config.trainer.device)
        try:
            self.kind = cluster.settle_kind()
            # Fewer nodes than asked for are a finding, not an error.
            asked = f"waiting for {' and '.join(map(str, self.pools))} (at most {self.patience:g} s) …"
            cluster.wait(
                lambda nodes: placeable([node.devices for node in nodes], self.pools),
                self.patience,
                lambda nodes: self.say(asked),
            )
            self.nodes = _nodes(cluster)
            self.say(f"asking {len(self.nodes)} nodes …")
            self.probes = {node["name"]: start_probe(node["id"]) for node in self.nodes}
            self._ask_facts()
            if working := [node for node in self.nodes if "problem" not in node]:
                self._look_between(working)
            return self
        finally:
            cluster.close()
            if not cluster.own and ray.is_initialized():
                ray.shutdown()

    def _look_between(self, working: list[Facts]) -> None:
        """Only nodes that are large enough for a pool of the run see its folder and meet, or all where none is."""
        least = min((pool.devices for pool in self.pools), default=0)
        used = [node for node in working if node["devices"] >= least] or working
        self.between += self._ports(working)
        if self.folder is not None and len(working) > 1:
            probes = {node["name"]: self.probes[node["name"]] for node in used}
            self.between.append(folder_is_shared(self.folder, probes, self.timeout))
        # One rank for each node, two on a single one.
        self._all_reduce(used if len(used) > 1 else used * 2)

    def _ask(self, nodes: list[Facts], call: Callable[[Any, Facts], Any]) -> list[tuple[Any, str | None]]:
        """call(probe, node) for each node: (result, None) or (None, why there is none)."""
        refs = {node["name"]: call(self.probes[node["name"]], node) for node in nodes}
        return list(ask_all(refs, self.timeout).values())

    def _ask_facts(self) -> None:
        """Add what each node says of itself, and how far its clock is from ours: half of a round trip is the uncertainty."""
        said = self._ask(
            self.nodes, lambda p, n: p.everything.remote(self.models, n["address"], n["temporary"])
        )
        for node, (facts, problem) in zip(self.nodes, said, strict=True):
            node |= facts or {"problem": problem}
            before = time.time()
            for clock, _ in self._ask([node], lambda probe, _: probe.now.remote()):
                error = (time.time() - before) / 2
                node |= {"clock": (clock or before) - before - error, "clock_error": error}

    def _ports(self, nodes: list[Facts]) -> Iterator[Finding]:
        """Every node listens on a free port of its own address, every node connects to all."""
        opened = self._ask(nodes, lambda probe, node: probe.free_port.remote(node["address"]))
        pairs = list(zip(nodes, opened, strict=True))
        failed = [(n["name"], f"cannot listen on its address: {why}") for n, (_, why) in pairs if why]
        listening = [(n["name"], (n["address"], port)) for n, (port, why) in pairs if not why]
        reached = self._ask(nodes, lambda probe, _: probe.reach.remote([place for _, place in listening]))
        for node, (answers, problem) in zip(nodes, reached, strict=True):
            for (other, _), why in zip(listening, answers or [problem] * len(listening), strict=True):
                failed += [(f"{node['name']} → {other}", why)] if why else []
        for pair, why in failed:
            todo = "open all ports between the nodes (firewall, security group, network policy)"
            yield bad("network", pair, why, todo)
        if not failed:
            yield Finding("network", "ports", "every node reaches every other on a free port")

    def _all_reduce(self, ranks: list[Facts]) -> None:
        """What an all-reduce takes, on devices where the ranks' nodes have free ones, else in host memory."""
        resource = platform_of(self.kind).ray_resource
        if resource and all(ranks.count(node) <= node["devices"] for node in ranks):
            self.say(f"all-reduce over {len(ranks)} ranks with a {self.kind} device each …")
            options = {"num_gpus": 1} if resource == "GPU" else {"resources": {resource: 1}}
            self.between += self._times(ranks, self.kind, options)
            if self.between[-1].level != NOTE:
                return
        self.say(f"all-reduce over {len(ranks)} ranks in host memory …")
        self.between += self._times(ranks, "cpu", {})

    def _times(self, ranks: list[Facts], kind: str, options: dict[str, Any]) -> list[Finding]:
        """What was measured, or what went wrong. A note if the ranks' devices are not free."""
        name, world = f"all-reduce ({kind})", len(ranks)
        probes = [start_probe(node["id"], **options) for node in ranks]
        group = RayCalls([WorkerHandle(p, f"rank {i}", ranks[i]["name"]) for i, p in enumerate(probes)])
        try:
            started, _ = ray.wait(group.start("now"), num_returns=world, timeout=self.timeout)
            if len(started) < world and options:
                text = f"no free device on every node within {self.timeout:g} s: another job holds them"
                return [Finding("network", name, text, NOTE)]
            address = ranks[0]["address"]
            where = (address, RayCalls(group.workers[:1]).call("free_port", address)[0])
            size = (kind, self.timeout, self.megabytes << 20)
            calls = group.start("all_reduce", each=[(rank, world, *where, *size) for rank in range(world)])
            results = group.wait(calls, "the all-reduce", 2 * self.timeout + 30)[0]
        except (UserError, WorkerDied, WorkerFailed) as error:
            todo = "name the interface between the nodes (SOCKET_IFNAME of ray_start.sh; GLOO_, NCCL_, HCCL_SOCKET_IFNAME)"
            return [bad("network", name, str(error), todo)]
        finally:
            group.kill()
        return [_measured(result, world) for result in results]


def _nodes(cluster: Cluster) -> list[Facts]:
    """The living nodes, the driver's first, each with a name of its own and what Ray says of it."""
    said = {node["NodeID"]: node for node in ray.nodes()}
    nodes = cluster.nodes()
    on_address = Counter(node.address for node in nodes)
    out: list[Facts] = []
    for node in nodes:
        name, devices = node.address, node.devices
        if on_address[name] > 1:
            name += f"#{node.id[:6]}"
        if cluster.own and platform_of(cluster.kind).on_host:
            # A Ray of our own is told of as many cores as the run has processes.
            devices = min(devices, os.cpu_count() or 1)
        out.append(
            {
                "id": node.id,
                "name": f"{name} (driver)" if not out else name,
                "address": node.address,
                "devices": devices,
                "object_store": said[node.id]["Resources"].get("object_store_memory"),
                "temporary": str(Path(said[node.id]["ObjectStoreSocketName"]).parent),
            }
        )
    return out


def _measured(result: dict[str, Any], ranks: int) -> Finding:
    """A line for one result of `NodeProbe.all_reduce`. A link carries each byte 2 (n - 1) / n times."""
    rate = result["bytes"] * 2 * (ranks - 1) / ranks / result["seconds"] / 1e9
    text = (
        f"{result['bytes'] / 2**20:.0f} MiB over {ranks} ranks in {result['seconds'] * 1000:.1f} ms "
        f"({rate:.2f} GB/s a link), one number in {result['latency'] * 1e6:.0f} µs"
    )
    return Finding("network", f"all-reduce ({result['over']})", text)
