"""Look at every node of a cluster: `verl doctor --cluster`. Facts, clocks, reach, and an all-reduce between the nodes.

    connect ─▶ a prober on each node ─▶ facts · clock against ours · who reaches whom ─▶ ranks meet, sum, time it

Returns plain data; what it means is said by `verl.workers.compare_nodes` and `verl.cli.cluster`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray import exceptions as faults

from verl.platform import platform_of
from verl.workers.compare_nodes import Finding
from verl.workers.ray.cluster import Cluster
from verl.workers.ray.nodes import ask, ask_all, blind, start_probe
from verl.workers.resources import ResourceRequest, placeable

_CLOCK_CALLS = 5


@dataclass(slots=True)
class ClusterReport:
    """`nodes`: facts of each (see `verl.workers.node_facts`), with "name", "devices" (that Ray was told of),
    "object_store" (bytes), "clock" (seconds ahead of ours) and "clock_error", or "problem" where none could be had.
    `unreachable`: (from, to, why). `sums`: {"over", "ranks", "bytes", "seconds", "latency"} or {"over", "problem"}.
    `folder`: what is wrong with the run folder; None where it was not looked for."""

    kind: str
    nodes: list[dict[str, Any]] = field(default_factory=list)
    unreachable: list[tuple[str, str, str]] = field(default_factory=list)
    sums: list[dict[str, Any]] = field(default_factory=list)
    folder: list[Finding] | None = None


@dataclass(slots=True)
class _Node:
    id: str
    name: str
    address: str
    entry: dict[str, Any]
    temporary: str | None = None
    prober: Any = None


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
        found = ClusterReport(cluster.settle_kind())
        _await(cluster, pools, patience, say)
        members = _members(cluster)
        say(f"asking {len(members)} nodes …")
        _facts(members, found, model, timeout)
        working = [m for m in members if m.prober is not None]
        _clocks(working, timeout)
        _reach(working, found, timeout)
        used = _used(working, pools)
        if folder is not None and len(working) > 1:
            found.folder = blind(folder, {m.name: m.prober for m in used}, timeout)
        if working:
            # One rank for each node, two on a single one.
            _sums(cluster, used if len(used) > 1 else used * 2, found, megabytes << 20, timeout, say)
        for member in working:
            ray.kill(member.prober)
        return found
    finally:
        cluster.close()
        if not cluster.own and ray.is_initialized():
            ray.shutdown()


def _await(
    cluster: Cluster, pools: Sequence[ResourceRequest], patience: float, say: Callable[[str], None]
) -> None:
    """Wait for nodes that are still starting; fewer than asked for is a finding, not an error."""

    def complete() -> bool:
        return placeable([node.devices for node in cluster.nodes()], pools)

    if cluster.own or complete():
        return
    say(f"waiting for {' and '.join(map(str, pools))} (at most {patience:g} s) …")
    end = time.monotonic() + patience
    while not complete() and time.monotonic() < end:
        time.sleep(1.0)


def _members(cluster: Cluster) -> list[_Node]:
    """The living nodes, the driver's first, each with a name of its own and what Ray says of it."""
    said = {n["NodeID"]: n for n in ray.nodes()}
    nodes = cluster.nodes()
    shared = {n.address for n in nodes if sum(m.address == n.address for m in nodes) > 1}
    # A Ray of our own is told of as many cores as the run has processes.
    inflated = cluster.own and platform_of(cluster.kind).on_host
    out = []
    for place, node in enumerate(nodes):
        name = f"{node.address}#{node.id[:6]}" if node.address in shared else node.address
        entry: dict[str, Any] = {
            "name": f"{name} (driver)" if place == 0 else name,
            "devices": min(node.devices, os.cpu_count() or 1) if inflated else node.devices,
            "object_store": said[node.id]["Resources"].get("object_store_memory"),
        }
        out.append(_Node(node.id, entry["name"], node.address, entry, _temporary(said[node.id])))
    return out


def _temporary(node: dict[str, Any]) -> str | None:
    """Ray's folder on a node: the store's socket is TEMP/session_X/sockets/plasma_store."""
    socket_name = Path(str(node.get("ObjectStoreSocketName") or ""))
    return str(socket_name.parents[2]) if len(socket_name.parents) > 3 else None


def _facts(members: list[_Node], found: ClusterReport, model: str | None, timeout: float) -> None:
    models = [model] if model else []
    for member in members:
        member.prober = start_probe(member.id)
    facts = ask_all({m.id: m.prober.facts.remote(models) for m in members}, timeout)
    rest = ask_all({m.id: m.prober.surroundings.remote(m.address, m.temporary) for m in members}, timeout)
    for member in members:
        problem = facts[member.id][1] or rest[member.id][1]
        if problem is not None:
            ray.kill(member.prober)
            member.prober = None
            member.entry["problem"] = problem
        else:
            member.entry |= facts[member.id][0] | rest[member.id][0]
        found.nodes.append(member.entry)


def _clocks(members: list[_Node], timeout: float) -> None:
    """Offset of each clock from ours: half of the fastest round trip is the uncertainty."""
    for member in members:
        trips = []
        for _ in range(_CLOCK_CALLS):
            before = time.time()
            theirs, problem = ask(member.prober.now.remote(), timeout)
            after = time.time()
            if problem is None:
                trips.append(((after - before) / 2, theirs - (before + after) / 2))
        if trips:
            member.entry["clock_error"], member.entry["clock"] = min(trips)


def _reach(members: list[_Node], found: ClusterReport, timeout: float) -> None:
    """Everybody listens on a free port of its own address, everybody connects to all."""
    ports = ask_all({m.name: m.prober.listen.remote(m.address) for m in members}, timeout)
    listening = [m for m in members if ports[m.name][1] is None]
    for name, (_, problem) in ports.items():
        if problem is not None:
            found.unreachable.append((name, name, f"cannot listen on its address: {problem}"))
    targets = [(m.address, ports[m.name][0]) for m in listening]
    reached = ask_all({m.name: m.prober.reach.remote(targets) for m in members}, timeout)
    for name, (responses, problem) in reached.items():
        for other, response in zip(listening, responses or [problem] * len(listening), strict=True):
            if response is not None:
                found.unreachable.append((name, other.name, response))
    for member in members:
        member.prober.close.remote()


def _used(members: list[_Node], pools: Sequence[ResourceRequest]) -> list[_Node]:
    """The nodes that are large enough for a pool of the run, or all where none is."""
    least = min((pool.devices for pool in pools), default=0)
    return [m for m in members if m.entry["devices"] >= least] or members


def _sums(
    cluster: Cluster,
    ranks: list[_Node],
    found: ClusterReport,
    count: int,
    timeout: float,
    say: Callable[[str], None],
) -> None:
    """An all-reduce over the ranks, on devices where their nodes have free ones."""
    resource = platform_of(cluster.kind).ray_resource
    if resource and all(ranks.count(m) <= m.entry["devices"] for m in ranks):
        say(f"all-reduce over {len(ranks)} ranks with a {cluster.kind} device each …")
        options = {"num_gpus": 1} if resource == "GPU" else {"resources": {resource: 1}}
        results = _sum(ranks, cluster.kind, count, timeout, options)
        if results is not None:
            found.sums += results
            return
        text = f"no free device on every node within {timeout:g} s: another job holds them"
        found.sums.append({"over": cluster.kind, "busy": text})
    say(f"all-reduce over {len(ranks)} ranks in host memory …")
    found.sums += _sum(ranks, "cpu", count, timeout, {}) or []


def _sum(
    ranks: list[_Node], kind: str, count: int, timeout: float, options: dict[str, Any]
) -> list[dict[str, Any]] | None:
    """The results of rank 0, or what went wrong; None if the ranks' devices were not free."""
    actors = [start_probe(member.id, **options) for member in ranks]
    address, world = ranks[0].address, len(ranks)
    try:
        started, _ = ray.wait([a.now.remote() for a in actors], num_returns=world, timeout=timeout)
        if len(started) < world and options:
            return None
        port, problem = ask(actors[0].free_port.remote(address), timeout)
        if problem is None:
            joined = [a.join.remote(i, world, address, port, kind, timeout) for i, a in enumerate(actors)]
            problem = _first_problem(ranks, joined, timeout + 30)
        if problem is not None:
            return [{"over": kind, "problem": f"the ranks do not meet: {problem}"}]
        refs = [a.all_reduce.remote(count) for a in actors]
        if problem := _first_problem(ranks, refs, timeout + 30):
            return [{"over": kind, "problem": problem}]
        results = ray.get(refs[0])
        ray.wait([a.leave.remote() for a in actors], num_returns=world, timeout=10)
        return [result | {"ranks": world} for result in results]
    finally:
        for actor in actors:
            with suppress(faults.RayError):
                ray.kill(actor)


def _first_problem(ranks: list[_Node], refs: list[Any], timeout: float) -> str | None:
    """What the first rank that failed said; None if all are done."""
    pending, end = list(refs), time.monotonic() + timeout
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, end - time.monotonic()))
        if not done:
            late = ", ".join(ranks[refs.index(ref)].name for ref in pending)
            return f"no response within {timeout:g} s from {late}"
        if problem := ask(done[0], 1.0)[1]:
            return f"rank {refs.index(done[0])} on {ranks[refs.index(done[0])].name}: {problem}"
    return None
