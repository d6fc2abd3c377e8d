"""Look at every node of a cluster: `verl doctor --cluster`. Facts, clocks, reach, and an all-reduce between the nodes.

    connect ─▶ a prober on each node ─▶ facts · clock against ours · who reaches whom ─▶ ranks meet, sum, time it

Returns plain data; what it means is said by `verl.cli.cluster`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray import exceptions as faults
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.workers.cluster_probe import ClusterProbe
from verl.workers.ray.calls import reason
from verl.workers.ray.cluster import RESOURCE, Cluster, worker_environment
from verl.workers.resources import ResourceRequest, placeable

_CLOCK_CALLS = 5
ProberActor = ray.remote(max_restarts=0, num_cpus=0)(ClusterProbe)


@dataclass(slots=True)
class ClusterReport:
    """`nodes`: facts of each (see `verl.workers.node_facts`), with "name", "devices" (that Ray was told of),
    "object_store" (bytes), "clock" (seconds ahead of ours) and "clock_error", or "problem" where none could be had.
    `unreachable`: (from, to, why). `sums`: {"over", "ranks", "bytes", "seconds", "latency"} or {"over", "problem"}.
    `folder`: names of the nodes that do not see the run folder; None where it was not looked for."""

    kind: str
    nodes: list[dict[str, Any]] = field(default_factory=list)
    unreachable: list[tuple[str, str, str]] = field(default_factory=list)
    sums: list[dict[str, Any]] = field(default_factory=list)
    folder: list[str] | None = None


@dataclass(slots=True)
class _Node:
    id: str
    name: str
    address: str
    entry: dict[str, Any]
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
        if folder is not None and len(working) > 1:
            found.folder = _seen(working, folder, timeout)
        if working:
            _sums(cluster, _ranks(working, pools), found, megabytes << 20, timeout, say)
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
    inflated = cluster.own and cluster.kind == "cpu"
    out = []
    for place, node in enumerate(nodes):
        name = f"{node.address}#{node.id[:6]}" if node.address in shared else node.address
        entry: dict[str, Any] = {
            "name": f"{name} (driver)" if place == 0 else name,
            "devices": min(node.devices, os.cpu_count() or 1) if inflated else node.devices,
            "object_store": said[node.id]["Resources"].get("object_store_memory"),
            "temporary": _temporary(said[node.id]),
        }
        out.append(_Node(node.id, entry["name"], node.address, entry))
    return out


def _temporary(node: dict[str, Any]) -> str | None:
    """Ray's folder on a node: the store's socket is TEMP/session_X/sockets/plasma_store."""
    socket_name = Path(str(node.get("ObjectStoreSocketName") or ""))
    return str(socket_name.parents[2]) if len(socket_name.parents) > 3 else None


def _start(node_id: str, **options: Any) -> Any:
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    env = {"env_vars": worker_environment(1)}
    return ProberActor.options(scheduling_strategy=where, runtime_env=env, **options).remote()


def _get(ref: Any, timeout: float) -> tuple[Any, str | None]:
    """(result, None) or (None, why there is none)."""
    try:
        return ray.get(ref, timeout=timeout), None
    except faults.GetTimeoutError:
        return None, f"no answer within {timeout:g} s"
    except faults.RayError as error:
        return None, _cause(error)


def _cause(error: faults.RayError) -> str:
    text = str(error)
    if "No module named 'verl" in text or "ModuleNotFoundError" in text:
        line = next((part for part in text.splitlines() if "ModuleNotFoundError" in part), "")
        return f"this code cannot be imported there: {line.strip() or 'ModuleNotFoundError'}"
    return reason(error)


def _facts(members: list[_Node], found: ClusterReport, model: str | None, timeout: float) -> None:
    for member in members:
        member.prober = _start(member.id)
    asked = [m.prober.facts.remote(m.address, m.entry["temporary"], model) for m in members]
    end = time.monotonic() + timeout
    for member, ref in zip(members, asked, strict=True):
        facts, problem = _get(ref, max(1.0, end - time.monotonic()))
        if problem is not None:
            ray.kill(member.prober)
            member.prober = None
            member.entry["problem"] = problem
        else:
            member.entry |= facts
        found.nodes.append(member.entry)


def _clocks(members: list[_Node], timeout: float) -> None:
    """Offset of each clock from ours: half of the fastest round trip is the uncertainty."""
    for member in members:
        best: tuple[float, float] | None = None
        for _ in range(_CLOCK_CALLS):
            before = time.time()
            theirs, problem = _get(member.prober.now.remote(), timeout)
            after = time.time()
            if problem is not None:
                break
            trip = after - before
            if best is None or trip / 2 < best[1]:
                best = theirs - (before + after) / 2, trip / 2
        if best is not None:
            member.entry["clock"], member.entry["clock_error"] = best


def _reach(members: list[_Node], found: ClusterReport, timeout: float) -> None:
    """Everybody listens on a free port of its own address, everybody connects to all."""
    ports = {}
    for member, ref in [(m, m.prober.listen.remote(m.address)) for m in members]:
        port, problem = _get(ref, timeout)
        if problem is not None:
            found.unreachable.append((member.name, member.name, f"cannot listen on its address: {problem}"))
        else:
            ports[member.id] = port
    listening = [m for m in members if m.id in ports]
    targets = [(m.address, ports[m.id]) for m in listening]
    for member, ref in [(m, m.prober.reach.remote(targets)) for m in members]:
        responses, problem = _get(ref, timeout)
        for other, response in zip(listening, responses or [problem] * len(listening), strict=True):
            if response is not None:
                found.unreachable.append((member.name, other.name, response))
    for member in members:
        member.prober.close.remote()


def _seen(members: list[_Node], folder: Path, timeout: float) -> list[str]:
    """Names of the nodes that do not see a file that the driver puts where the run folder is or will be."""
    place = folder.expanduser().absolute()
    while not place.is_dir():
        place = place.parent
    token = place / f".verl-doctor-{secrets.token_hex(8)}"
    try:
        token.touch(exist_ok=False)
    except OSError as error:
        return [f"{members[0].name}: {place} cannot be written ({error.strerror})"]
    try:
        asked = [(m, m.prober.sees.remote(str(token))) for m in members]
        return [m.name for m, ref in asked if not _get(ref, timeout)[0]]
    finally:
        token.unlink()


def _ranks(members: list[_Node], pools: Sequence[ResourceRequest]) -> list[_Node]:
    """One rank for each node that the run may use, two for a single one."""
    least = min((pool.devices for pool in pools), default=0)
    fit = [m for m in members if m.entry["devices"] >= least] or members
    return fit if len(fit) > 1 else fit * 2


def _sums(
    cluster: Cluster,
    ranks: list[_Node],
    found: ClusterReport,
    count: int,
    timeout: float,
    say: Callable[[str], None],
) -> None:
    """An all-reduce over the ranks, on devices where their nodes have free ones."""
    resource = RESOURCE.get(cluster.kind)
    if resource is not None and all(ranks.count(m) <= m.entry["devices"] for m in ranks):
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
    actors = [_start(member.id, **options) for member in ranks]
    try:
        started, _ = ray.wait([a.ready.remote() for a in actors], num_returns=len(actors), timeout=timeout)
        if len(started) < len(actors) and options:
            return None
        address = ranks[0].address
        port, problem = _get(actors[0].free_port.remote(address), timeout)
        if problem is None:
            joined = [
                a.join.remote(i, len(actors), address, port, kind, timeout) for i, a in enumerate(actors)
            ]
            problem = _first_problem(ranks, joined, timeout + 30)
        if problem is not None:
            return [{"over": kind, "problem": f"the ranks do not meet: {problem}"}]
        refs = [a.all_reduce.remote(count) for a in actors]
        problem = _first_problem(ranks, refs, timeout + 30)
        if problem is not None:
            return [{"over": kind, "problem": problem}]
        results = ray.get(refs[0])
        ray.wait([a.leave.remote() for a in actors], num_returns=len(actors), timeout=10)
        return [result | {"ranks": len(actors)} for result in results]
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
            return f"no answer within {timeout:g} s from {late}"
        _, problem = _get(done[0], 1.0)
        if problem is not None:
            return f"rank {refs.index(done[0])} on {ranks[refs.index(done[0])].name}: {problem}"
    return None
