"""What `verl doctor --cluster` says of the nodes of a cluster, from the facts that each reports. Imports no ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl.workers.cluster_needs import ResourceRequest, placeable
from verl.workers.compare_nodes import (
    BAD,
    GIB,
    NOTE,
    WARN,
    Facts,
    Finding,
    NodeNeeds,
    bad,
    compare,
    count,
    gib,
    graded,
)

_MAX_CLOCK_S = 1.0
_SMALL = "the run leaves it alone: too few devices"


def judge(
    nodes: Sequence[Facts], driver: Facts, kind: str, pools: Sequence[ResourceRequest], needs: NodeNeeds
) -> Iterator[Finding]:
    """What `verl doctor --cluster` says of nodes with devices of a kind: facts of `NodeProbe.everything` and of
    `verl.preflight.cluster`. `driver`: the facts of this process; `pools`, `needs`: what the run asks for."""
    have = ", ".join(f"{node['name']} has {node['devices']}" for node in nodes)
    request = " and ".join(map(str, pools))
    todo = "start Ray on more nodes or with more devices there (examples/ray_start.sh), or lower "
    todo += " or ".join(f"{pool.keys}.nnodes, {pool.keys}.n_gpus_per_node" for pool in pools)
    fits = placeable([node["devices"] for node in nodes], pools)
    text = f"{len(nodes)} node{'s' * (len(nodes) != 1)}, devices: {kind}; the run asks for {request}; {have}"
    yield graded("nodes", "nodes", text, (not fits, BAD, todo))
    for node in nodes:
        finding = _node(node, kind)
        small = node["devices"] < _least(pools)
        yield Finding("nodes", finding.name, f"{finding.found}; {_SMALL}", NOTE) if small else finding
    used = large_enough(nodes, pools)
    yield from compare(used, driver, needs)
    for node in used:
        yield from _state(node)


def large_enough(nodes: Sequence[Facts], pools: Sequence[ResourceRequest]) -> list[Facts]:
    """The working nodes that can hold a part of a pool; all working ones if none can. A run leaves the others alone."""
    alive = [node for node in nodes if "problem" not in node]
    return [node for node in alive if node["devices"] >= _least(pools)] or alive


def _least(pools: Sequence[ResourceRequest]) -> int:
    return min((pool.devices for pool in pools), default=0)


def _node(node: Facts, kind: str) -> Finding:
    """What Ray was told of the devices, and what there is."""
    name = node["name"]
    if "problem" in node:
        todo = "install the same code on the node, or give it the path (PYTHONPATH, a shared folder)"
        return bad("nodes", name, f"no worker runs there: {node['problem']}", todo)
    accelerators = node["accelerators"].get(kind, ["core"] * node["devices"])
    names = ", ".join(dict.fromkeys(accelerators))
    text = (
        f"{node['hostname']}: {node['devices']} {kind} devices for Ray, {len(accelerators)} there ({names}), "
        f"{node['cores']} cores"
    )
    other = (node["devices"] != len(accelerators), WARN, "ray stop, and start it with all devices visible")
    return graded("nodes", name, text, other)


def _state(node: Facts) -> Iterator[Finding]:
    """What may be short on a node, and its clock."""
    name, disk, (total, available) = node["name"], node["disk"], node["memory"]
    text = f"temporary files ({disk['path']}): {gib(disk['free'])} free of {gib(disk['total'])}"
    todo = "free some: Ray spills nothing to a disk that is 95 % full (or ray start --temp-dir)"
    none, full = disk["free"] < GIB // 4, disk["free"] < disk["total"] * 0.05
    yield graded("room", name, text, (none, BAD, todo), (full, WARN, todo))
    if total:
        todo = "something else runs there: end it, or leave the node out"
        text = f"memory: {gib(available)} of {gib(total)} available"
        yield graded("room", name, text, (available < total * 0.1, WARN, todo))
    few = node["processes"] is not None and node["processes"] < 4096
    todo = "ulimit -u 65536 before `ray start`"
    yield graded("limits", name, f"processes {count(node['processes'])}", (few, WARN, todo))
    clock, error = node["clock"], node["clock_error"]
    text = f"{abs(clock):.3f} s {'ahead of' if clock > 0 else 'behind'} the driver's (± {error:.3f} s)"
    far = abs(clock) - error > _MAX_CLOCK_S
    yield graded("network", f"clock of {name}", text, (far, WARN, "run chrony or ntpd there"))
