"""`verl doctor --cluster`: do the nodes fit together, and would a run start on them?

What the nodes say is gathered by `verl.workers.ray.cluster_report`; `verl.workers.compare_nodes` says what would stop a
run at its start; the rest is put into words here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from verl.errors import UserError
from verl.workers.compare_nodes import (
    BAD,
    GIB,
    NOTE,
    OK,
    WARN,
    Facts,
    Finding,
    NodeNeeds,
    bad,
    compare,
    gib,
    needs_of,
)
from verl.workers.resources import ResourceRequest, placeable, resource_requests

_MAX_CLOCK_S = 1.0
_SMALL = "the run leaves it alone: too few devices"


def examine(
    overrides: list[str], *, model: str | None, megabytes: int, timeout: float, say: Callable[[str], None]
) -> list[Finding]:
    """Findings about the cluster that a run with these overrides would use. UserError where there is none."""
    from verl.config import load
    from verl.workers import node_facts

    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed here: pip install 'verl[ray]'")
    from verl.workers.ray.cluster_report import survey

    config = load(overrides)
    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    model = model or config.actor_rollout_ref.model.path
    if model and Path(model).expanduser().exists():
        model = str(Path(model).expanduser().absolute())
    pools = resource_requests(config, given)
    needs = needs_of(config, *([model] if model else []))
    named = given & {"trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name"}
    found = survey(
        config,
        pools=pools,
        model=model,
        folder=Path(config.trainer.default_local_dir) if named else None,
        megabytes=megabytes,
        timeout=timeout,
        patience=min(timeout, config.trainer.ray_wait_register_center_timeout),
        say=say,
    )
    return list(judge(found, node_facts.collect(needs.models), pools, needs))


def judge(
    found: Any, driver: Facts, pools: Sequence[ResourceRequest] = (), needs: NodeNeeds | None = None
) -> Iterator[Finding]:
    """What a survey means. `driver`: the facts of this process; `pools`, `needs`: what the run asks for.

    As at a run's start, nodes that are too small for every pool may differ from the driver.
    """
    least = min((pool.devices for pool in pools), default=0)
    alive = [n for n in found.nodes if "problem" not in n]
    yield from _nodes(found, pools, least)
    if alive:
        used = [n for n in alive if n["devices"] >= least] or alive
        yield from compare(used, driver, needs or NodeNeeds())
        if found.folder is not None:
            yield from found.folder or [Finding("model", "run folder", "seen by every node")]
        yield from _room(used)
        yield from _clock(alive)
        yield from _reach(found, alive)
        yield from _sums(found)


def verdict(findings: list[Finding]) -> tuple[int, str]:
    """(exit status, one sentence): 1 if a run would stop."""
    broken = [f.name for f in findings if f.level == BAD]
    others = [f.name for f in findings if f.level == WARN]
    if broken:
        names = ", ".join(dict.fromkeys(broken))
        return 1, f"A run on this cluster would stop until this is put right: {names}."
    worth = f" Worth a look: {', '.join(dict.fromkeys(others))}." if others else ""
    return 0, f"A run can start on this cluster.{worth}"


def _nodes(found: Any, pools: Sequence[ResourceRequest], least: int) -> Iterator[Finding]:
    count = len(found.nodes)
    text = f"{count} node{'s' * (count != 1)}, devices: {found.kind}"
    if placeable([n["devices"] for n in found.nodes], pools):
        yield Finding("nodes", "nodes", text)
    else:
        have = ", ".join(f"{n['name']} has {n['devices']}" for n in found.nodes[:8])
        todo = "start Ray on more nodes or with more devices there (examples/ray_start.sh), or lower "
        todo += " or ".join(f"{pool.keys}.nnodes, {pool.keys}.n_gpus_per_node" for pool in pools)
        asked = " and ".join(map(str, pools))
        yield bad("nodes", "nodes", f"{text}; the run asks for {asked}; {have}", todo)
    for node in found.nodes:
        finding = _node(node, found.kind)
        small = node["devices"] < least
        yield Finding("nodes", finding.name, f"{finding.found}; {_SMALL}", NOTE) if small else finding


def _node(node: Facts, kind: str) -> Finding:
    name, have = node["name"], node["devices"]
    if "problem" in node:
        todo = "install the same code on the node, or give it the path (PYTHONPATH, a shared folder)"
        return bad("nodes", name, f"no worker runs there: {node['problem']}", todo)
    memory = "?" if node["memory"] is None else gib(node["memory"])
    text = f"{node['hostname']}: {have} {kind} devices for Ray, {node['cores']} cores, {memory}"
    kinds = ", ".join(dict.fromkeys(g.rsplit(",", 1)[0] for g in node["gpus"]))
    text += f", {kinds}" if kinds else ""
    there = {"cuda": len(node["gpus"]), "npu": node["npus"]}.get(kind, have)
    if have != there:
        todo = "ray stop, and start it with all devices visible"
        return Finding("nodes", name, f"{text}; the node has {there}", WARN, todo)
    return Finding("nodes", name, text)


def _room(nodes: list[Facts]) -> Iterator[Finding]:
    """Disks and memory."""
    for node in nodes:
        for what, disk in node["disks"].items():
            text = f"{what} ({disk['path']}): {gib(disk['free'])} free of {gib(disk['total'])}"
            if disk["free"] < GIB // 4:
                yield bad("room", node["name"], text, "free some space there")
            elif what == "temporary files" and disk["free"] < disk["total"] * 0.05:
                todo = "free some space: Ray spills nothing to a disk that is 95 % full (or ray start --temp-dir)"
                yield Finding("room", node["name"], text, WARN, todo)
            else:
                yield Finding("room", node["name"], text)
        available = node["memory_available"]
        if available is not None and node["memory"]:
            few = available < node["memory"] * 0.1
            text = f"memory: {gib(available)} of {gib(node['memory'])} available"
            todo = "something else runs there: end it, or leave the node out" if few else ""
            yield Finding("room", node["name"], text, WARN if few else OK, todo)


def _clock(nodes: list[Facts]) -> Iterator[Finding]:
    known = [n for n in nodes if "clock" in n]
    far = [n for n in known if abs(n["clock"]) - n["clock_error"] > _MAX_CLOCK_S]
    for node in far:
        text = (
            f"{abs(node['clock']):.1f} s {'ahead of' if node['clock'] > 0 else 'behind'} the driver's clock"
        )
        yield Finding("network", f"clock of {node['name']}", text, WARN, "run chrony or ntpd there")
    if known and not far:
        most = max(abs(n["clock"]) for n in known)
        error = max(n["clock_error"] for n in known)
        text = f"at most {most * 1000:.0f} ms from the driver's (measured to {error * 1000:.0f} ms)"
        yield Finding("network", "clocks", text)


def _reach(found: Any, nodes: list[Facts]) -> Iterator[Finding]:
    if found.unreachable:
        todo = "open all ports between the nodes of the cluster (firewall, security group, network policy)"
        for source, target, why in found.unreachable[:8]:
            yield bad("network", f"{source} → {target}", why, todo)
        if len(found.unreachable) > 8:
            yield bad("network", "ports", f"and {len(found.unreachable) - 8} more pairs", todo)
    elif len(nodes) > 1:
        yield Finding("network", "ports", "every node reaches every other on a free port")
    else:
        yield Finding("network", "ports", "a free port can be opened and reached")
    for node in nodes if len({n["address"] for n in nodes}) > 1 else ():
        if (node["resolves_to"] or "127.").startswith("127."):
            name = f"GLOO_SOCKET_IFNAME={node['interface'] or 'eth0'}"
            text = f"its host name ({node['hostname']}) means {node['resolves_to'] or 'nothing'} there, not {node['address']}"
            todo = f"correct /etc/hosts, or set {name} before `ray start` (SOCKET_IFNAME of ray_start.sh)"
            yield Finding("network", node["name"], text, WARN, todo)


def _sums(found: Any) -> Iterator[Finding]:
    for one in found.sums:
        name = f"all-reduce ({one['over']})"
        if "problem" in one:
            todo = "name the interface between the nodes (SOCKET_IFNAME of ray_start.sh; GLOO_, NCCL_, HCCL_SOCKET_IFNAME)"
            yield bad("network", name, one["problem"], todo)
        elif "busy" in one:
            yield Finding("network", name, one["busy"], NOTE)
        else:
            share = 2 * (one["ranks"] - 1) / one["ranks"]
            rate = one["bytes"] * share / one["seconds"] / 1e9
            text = (
                f"{one['bytes'] / 2**20:.0f} MiB over {one['ranks']} ranks in {one['seconds'] * 1000:.1f} ms "
                f"({rate:.2f} GB/s a link), one number in {one['latency'] * 1e6:.0f} µs"
            )
            yield Finding("network", name, text)
