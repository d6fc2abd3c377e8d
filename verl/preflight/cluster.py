"""Look at every node of a cluster, for `verl doctor --cluster`: facts, clocks, who reaches whom, an all-reduce.

connect ─▶ a probe on each node ─▶ facts · clock against ours · who reaches whom ─▶ ranks meet, sum, time it
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node

from verl.config import Config
from verl.errors import UserError
from verl.platform import platform_of
from verl.preflight.nodes import judge, large_enough
from verl.workers import node_facts
from verl.workers.cluster_needs import resource_requests
from verl.workers.compare_nodes import Facts, Finding, bad, needs_of
from verl.workers.ray.calls import kill
from verl.workers.ray.cluster import Cluster
from verl.workers.ray.nodes import ask_all, folder_is_shared, start_probe

_AREAS = ("nodes", "versions", "limits", "room", "model", "network")


def examine(config: Config, megabytes: int, timeout: float, say: Callable[[str], None]) -> list[Finding]:
    """Findings about the cluster that a run with this configuration would start or join. UserError when there is none,
    or its version is refused.

    megabytes: size of the all-reduce. timeout: seconds for each step, also for nodes that are still starting, which are
    waited for no longer than a run would. say: told what is going on.
    """
    try:
        pools, needs = resource_requests(config), needs_of(config)
    except ValueError as error:  # a name that nobody registered
        raise UserError(str(error)) from error
    cluster = Cluster(config, config.trainer.device)
    try:
        kind = cluster.settle_kind()
        patience = min(timeout, config.trainer.ray_wait_register_center_timeout)
        for pool in pools:
            with suppress(UserError):  # fewer nodes than asked for are a finding
                cluster.wait_for_nodes(pool.nodes, pool.devices, pool.keys, patience, say)
        nodes = _nodes(cluster)
        say(f"asking {len(nodes)} nodes …")
        probes = {node["name"]: start_probe(node["id"]) for node in nodes}
        _ask_facts(nodes, probes, needs.models, timeout)
        findings = list(judge(nodes, node_facts.collect(needs.models), kind, pools, needs))
        findings += _ports([node for node in nodes if "problem" not in node], probes, timeout)
        used = large_enough(nodes, pools)
        if used and needs.folder is not None and len(nodes) > 1:
            seeing = {node["name"]: probes[node["name"]] for node in used}
            findings.append(folder_is_shared(needs.folder, seeing, timeout))
        if used:  # one rank for each node, two on a single one
            ranks = used if len(used) > 1 else used * 2
            findings += _all_reduce(ranks, kind, megabytes, timeout, say)
        return sorted(findings, key=lambda finding: _AREAS.index(finding.area))
    finally:
        cluster.close()
        if not cluster.own and ray.is_initialized():
            ray.shutdown()


def _nodes(cluster: Cluster) -> list[Facts]:
    """The living nodes, the driver's first, each with a name of its own and what Ray says of it."""
    by_id = {node["NodeID"]: node for node in ray.nodes()}
    nodes = cluster.nodes()
    on_address = Counter(node.address for node in nodes)
    out: list[Facts] = []
    for node in nodes:
        name = node.address if on_address[node.address] == 1 else f"{node.address}#{node.id[:6]}"
        out.append(
            {
                "id": node.id,
                "name": f"{name} (driver)" if not out else name,
                "address": node.address,
                "devices": node.devices,
                "object_store": by_id[node.id]["Resources"].get("object_store_memory"),
                "temporary": str(Path(by_id[node.id]["ObjectStoreSocketName"]).parents[2]),
            }
        )
    return out


def _ask_facts(nodes: list[Facts], probes: dict[str, Any], models: Sequence[str], timeout: float) -> None:
    """Add what each node reports of itself, or "problem", and "clock", how far it is ahead of ours; half of a round
    trip is "clock_error"."""
    calls = {n["name"]: probes[n["name"]].everything.remote(models, n["temporary"]) for n in nodes}
    replies = ask_all(calls, timeout)
    for node in nodes:
        name = node["name"]
        facts, problem = replies[name]
        if problem is None:
            before = time.time()
            clock, problem = ask_all({name: probes[name].now.remote()}, timeout)[name]
            error = (time.time() - before) / 2
            node |= {**facts, "clock": (clock or before) - before - error, "clock_error": error}
        if problem is not None:
            node["problem"] = problem


def _ports(nodes: list[Facts], probes: dict[str, Any], timeout: float) -> Iterator[Finding]:
    """Every node listens on a free port of its own address, every node connects to all."""
    opened = ask_all({n["name"]: probes[n["name"]].free_port.remote(n["address"]) for n in nodes}, timeout)
    failed = {name: f"cannot listen on its address: {why}" for name, (_, why) in opened.items() if why}
    ports = {n["name"]: (n["address"], opened[n["name"]][0]) for n in nodes if n["name"] not in failed}
    calls = {n["name"]: probes[n["name"]].unreached.remote(ports) for n in nodes}
    for name, (unreached, why) in ask_all(calls, timeout).items():
        failed |= {name: why} if why else {f"{name} → {other}": text for other, text in unreached.items()}
    for pair, why in failed.items():
        todo = "open all ports between the nodes (firewall, security group, network policy)"
        yield bad("network", pair, why, todo)
    if not failed:
        yield Finding("network", "ports", "every node reaches every other on a free port")


def _all_reduce(
    ranks: list[Facts], kind: str, megabytes: int, timeout: float, say: Callable[[str], None]
) -> Iterator[Finding]:
    """What an all-reduce takes, on devices where the ranks' nodes have free ones, else in host memory."""
    world, address, resource = len(ranks), ranks[0]["address"], platform_of(kind).ray_resource
    free, options = available_resources_per_node(), dict[str, Any]()
    if resource and all(free.get(node["id"], {}).get(resource, 0) >= ranks.count(node) for node in ranks):
        options = {"num_gpus": 1} if resource == "GPU" else {"resources": {resource: 1}}
    kind = kind if options else "cpu"
    say(f"all-reduce over {world} ranks ({kind}) …")
    probes = [start_probe(node["id"], **options) for node in ranks]
    try:
        replies = ask_all({"rank 0": probes[0].free_port.remote(address)}, timeout)
        port, problem = replies["rank 0"]
        if problem is None:
            size = (world, address, port, kind, timeout, megabytes << 18)
            calls = {f"rank {i}": probe.all_reduce.remote(i, *size) for i, probe in enumerate(probes)}
            replies = ask_all(calls, 2 * timeout + 30)
        yield from _measured(replies, kind, megabytes)
    finally:
        for probe in probes:
            kill(probe)


def _measured(replies: dict[str, tuple[Any, str | None]], kind: str, megabytes: int) -> Iterator[Finding]:
    """A line for each library, from what the ranks said. A link carries each byte 2 (n - 1) / n times."""
    ranks = len(replies)
    if failed := {rank: why for rank, (_, why) in replies.items() if why}:
        todo = "name the interface between the nodes (SOCKET_IFNAME of ray_start.sh; GLOO_, NCCL_, HCCL_SOCKET_IFNAME)"
        text = "; ".join(f"{rank}: {why}" for rank, why in failed.items())
        yield bad("network", f"all-reduce ({kind})", f"the ranks do not meet: {text}", todo)
        return
    for name, seconds in replies["rank 0"][0].items():
        rate = megabytes * 2**20 * 2 * (ranks - 1) / ranks / seconds / 1e9
        text = f"{megabytes} MiB over {ranks} ranks in {seconds * 1000:.1f} ms ({rate:.2f} GB/s a link)"
        yield Finding("network", f"all-reduce ({name})", text)
