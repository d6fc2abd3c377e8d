"""Look at every node of a cluster: `verl doctor --cluster`. Facts, clocks, reach, and an all-reduce between the nodes.

    connect ─▶ a probe on each node ─▶ facts · clock against ours · who reaches whom ─▶ ranks meet, sum, time it

What the facts of the nodes mean is said by `verl.workers.compare_nodes` and `verl.cli.cluster`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from verl.errors import UserError
from verl.platform import platform_of
from verl.workers.compare_nodes import NOTE, Facts, Finding, bad
from verl.workers.ray.calls import RayCalls, WorkerDied, WorkerFailed, WorkerHandle
from verl.workers.ray.cluster import Cluster
from verl.workers.ray.nodes import ask, ask_all, folder_is_shared, start_probe
from verl.workers.resources import ResourceRequest, placeable


@dataclass(slots=True)
class ClusterReport:
    """`nodes`: facts of each (see `verl.workers.node_facts`), with "name", "devices" (that Ray was told of),
    "object_store" (bytes), "clock" (seconds ahead of ours) and "clock_error", or "problem" where none could be had.
    `between`: what was found out between the nodes: run folder, ports, all-reduce."""

    kind: str
    nodes: list[Facts]
    between: list[Finding]


def survey(
    config: Any,
    *,
    pools: Sequence[ResourceRequest] = (),
    model: str | None = None,
    folder: Path | None = None,
    megabytes: int = 64,
    timeout: float = 120.0,
    patience: float = 120.0,
    say: Callable[[str], None] = print,
) -> ClusterReport:
    """Start Ray here or join a cluster, as a run with this configuration would, and look at it.

    `pools`: what the run asks for; nodes that hold it are waited for, at most `patience` seconds. `timeout`: of every
    later step. `folder`: a run folder that all nodes should see. UserError when there is no cluster, or its version is refused.
    """
    cluster = Cluster(config, config.trainer.device)
    try:
        kind = cluster.settle_kind()
        _await(cluster, pools, patience, say)
        nodes = _nodes(cluster)
        say(f"asking {len(nodes)} nodes …")
        probes = {node["name"]: start_probe(node["id"]) for node in nodes}
        _ask_facts(nodes, probes, [model] if model else [], timeout)
        working = [node for node in nodes if "problem" not in node]
        used = _used(working, pools)
        between = list(_ports(working, probes, timeout))
        if folder is not None and len(working) > 1:
            between.append(folder_is_shared(folder, {n["name"]: probes[n["name"]] for n in used}, timeout))
        if working:
            # One rank for each node, two on a single one.
            ranks = used if len(used) > 1 else used * 2
            between += _all_reduce(cluster, ranks, megabytes << 20, timeout, say)
        return ClusterReport(kind, nodes, between)
    finally:
        cluster.close()
        if not cluster.own and ray.is_initialized():
            ray.shutdown()


def _await(
    cluster: Cluster, pools: Sequence[ResourceRequest], patience: float, say: Callable[[str], None]
) -> None:
    """Wait for nodes that are still starting; fewer than asked for is a finding, not an error."""

    def complete() -> bool:
        return cluster.own or placeable([node.devices for node in cluster.nodes()], pools)

    end = time.monotonic() + patience
    if not complete():
        say(f"waiting for {' and '.join(map(str, pools))} (at most {patience:g} s) …")
    while not complete() and time.monotonic() < end:
        time.sleep(1.0)


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


def _ask_facts(nodes: list[Facts], probes: dict[str, Any], models: list[str], timeout: float) -> None:
    """Add what each node says of itself, and how far its clock is from ours: half of a round trip is the uncertainty."""
    asked = {
        n["name"]: probes[n["name"]].everything.remote(models, n["address"], n["temporary"]) for n in nodes
    }
    for node, (facts, problem) in zip(nodes, ask_all(asked, timeout).values(), strict=True):
        if problem:
            node["problem"] = problem
            continue
        before = time.time()
        theirs, _ = ask(probes[node["name"]].now.remote(), timeout)
        error = (time.time() - before) / 2
        node |= facts | {"clock": (theirs or before) - before - error, "clock_error": error}


def _ports(nodes: list[Facts], probes: dict[str, Any], timeout: float) -> Iterator[Finding]:
    """Every node listens on a free port of its own address, every node connects to all."""
    todo = "open all ports between the nodes of the cluster (firewall, security group, network policy)"
    opened = ask_all({n["name"]: probes[n["name"]].free_port.remote(n["address"]) for n in nodes}, timeout)
    targets = {n["name"]: (n["address"], opened[n["name"]][0]) for n in nodes if not opened[n["name"]][1]}
    refs = {n["name"]: probes[n["name"]].reach.remote(list(targets.values())) for n in nodes}
    failed = [(name, f"cannot listen on its address: {why}") for name, (_, why) in opened.items() if why]
    for name, (answers, problem) in ask_all(refs, timeout).items():
        for other, why in zip(targets, answers or [problem] * len(targets), strict=True):
            if why:
                failed.append((f"{name} → {other}", why))
    for pair, why in failed:
        yield bad("network", pair, why, todo)
    if not failed:
        many = "every node reaches every other on a free port"
        yield Finding("network", "ports", many if len(nodes) > 1 else "a free port can be opened and reached")


def _used(nodes: list[Facts], pools: Sequence[ResourceRequest]) -> list[Facts]:
    """The nodes that are large enough for a pool of the run, or all where none is."""
    least = min((pool.devices for pool in pools), default=0)
    return [node for node in nodes if node["devices"] >= least] or nodes


def _all_reduce(
    cluster: Cluster, ranks: list[Facts], count: int, timeout: float, say: Callable[[str], None]
) -> list[Finding]:
    """What an all-reduce of `count` bytes takes, on devices where the ranks' nodes have free ones, else in host memory."""
    resource = platform_of(cluster.kind).ray_resource
    found: list[Finding] = []
    if resource and all(ranks.count(node) <= node["devices"] for node in ranks):
        say(f"all-reduce over {len(ranks)} ranks with a {cluster.kind} device each …")
        options = {"num_gpus": 1} if resource == "GPU" else {"resources": {resource: 1}}
        found = _times(ranks, cluster.kind, count, timeout, options)
        if found[0].level != NOTE:
            return found
    say(f"all-reduce over {len(ranks)} ranks in host memory …")
    return found + _times(ranks, "cpu", count, timeout, {})


def _times(
    ranks: list[Facts], kind: str, count: int, timeout: float, options: dict[str, Any]
) -> list[Finding]:
    """What was measured, or what went wrong. A note if the ranks' devices are not free."""
    probes = [
        WorkerHandle(start_probe(n["id"], **options), f"rank {i}", n["name"]) for i, n in enumerate(ranks)
    ]
    group, address, world = RayCalls(probes), ranks[0]["address"], len(ranks)
    try:
        started, _ = ray.wait(group.start("now"), num_returns=world, timeout=timeout)
        if len(started) < world and options:
            text = f"no free device on every node within {timeout:g} s: another job holds them"
            return [Finding("network", f"all-reduce ({kind})", text, NOTE)]
        port = RayCalls(probes[:1]).call("free_port", address)[0]
        each = [(rank, world, address, port, kind, timeout, count) for rank in range(world)]
        results = group.wait(group.start("all_reduce", each=each), "the all-reduce", 2 * timeout + 30)[0]
    except (UserError, WorkerDied, WorkerFailed) as error:
        todo = "name the interface between the nodes (SOCKET_IFNAME of ray_start.sh; GLOO_, NCCL_, HCCL_SOCKET_IFNAME)"
        return [bad("network", f"all-reduce ({kind})", str(error), todo)]
    finally:
        group.kill()
    return [_measured(result, world) for result in results]


def _measured(result: dict[str, Any], ranks: int) -> Finding:
    """A line for one result of `NodeProbe.all_reduce`. A link carries each byte 2 (n - 1) / n times."""
    rate = result["bytes"] * 2 * (ranks - 1) / ranks / result["seconds"] / 1e9
    text = (
        f"{result['bytes'] / 2**20:.0f} MiB over {ranks} ranks in {result['seconds'] * 1000:.1f} ms "
        f"({rate:.2f} GB/s a link), one number in {result['latency'] * 1e6:.0f} µs"
    )
    return Finding("network", f"all-reduce ({result['over']})", text)
