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
from verl.workers import compare_nodes
from verl.workers.compare_nodes import BAD, GIB, NOTE, WARN, Facts, Finding, bad, compare, gib, graded
from verl.workers.resources import ResourceRequest, placeable, resource_requests

_AREAS = ("nodes", "versions", "limits", "room", "model", "network")
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
    from verl.workers.ray.cluster_report import Survey

    config = load(overrides)
    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    model = model or config.actor_rollout_ref.model.path
    if model and Path(model).expanduser().exists():
        model = str(Path(model).expanduser().absolute())
    pools = resource_requests(config, given)
    needs = compare_nodes.needs_of(config, *([model] if model else []))
    named = given & {"trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name"}
    folder = Path(config.trainer.default_local_dir) if named else None
    patience = min(timeout, config.trainer.ray_wait_register_center_timeout)
    found = Survey(pools, needs.models, folder, megabytes, timeout, patience, say).of(config)
    return judge(found, node_facts.collect(needs.models), pools, needs)


def judge(
    found: Any, driver: Facts, pools: Sequence[ResourceRequest], needs: compare_nodes.NodeNeeds
) -> list[Finding]:
    """What a survey means. `driver`: the facts of this process; `pools`, `needs`: what the run asks for.

    As at a run's start, nodes that are too small for every pool may differ from the driver.
    """
    least = min((pool.devices for pool in pools), default=0)
    alive = [node for node in found.nodes if "problem" not in node]
    used = [node for node in alive if node["devices"] >= least] or alive
    out = list(_nodes(found, pools, least))
    out += compare(used, driver, needs)
    for node in used:
        out += _room(node)
    for node in alive:
        out += _surroundings(node, alive)
    return sorted([*out, *found.between], key=lambda finding: _AREAS.index(finding.area))


def verdict(findings: list[Finding]) -> tuple[int, str]:
    """(exit status, one sentence): 1 if a run would stop."""
    return compare_nodes.verdict(
        findings, "A run on this cluster would stop", "A run can start on this cluster."
    )


def _nodes(found: Any, pools: Sequence[ResourceRequest], least: int) -> Iterator[Finding]:
    count = len(found.nodes)
    text = f"{count} node{'s' * (count != 1)}, devices: {found.kind}"
    if placeable([node["devices"] for node in found.nodes], pools):
        yield Finding("nodes", "nodes", text)
    else:
        have = ", ".join(f"{node['name']} has {node['devices']}" for node in found.nodes[:8])
        todo = "start Ray on more nodes or with more devices there (examples/ray_start.sh), or lower "
        todo += " or ".join(f"{pool.keys}.nnodes, {pool.keys}.n_gpus_per_node" for pool in pools)
        asked = " and ".join(map(str, pools))
        yield bad("nodes", "nodes", f"{text}; the run asks for {asked}; {have}", todo)
    for node in found.nodes:
        finding = _node(node, found.kind)
        small = node["devices"] < least
        yield Finding("nodes", finding.name, f"{finding.found}; {_SMALL}", NOTE) if small else finding


def _node(node: Facts, kind: str) -> Finding:
    if "problem" in node:
        todo = "install the same code on the node, or give it the path (PYTHONPATH, a shared folder)"
        return bad("nodes", node["name"], f"no worker runs there: {node['problem']}", todo)
    memory = "?" if node["memory"] is None else gib(node["memory"])
    parts = [f"{node['devices']} {kind} devices for Ray", f"{node['cores']} cores", memory]
    parts += dict.fromkeys(gpu.rsplit(",", 1)[0] for gpu in node["gpus"])
    there = {"cuda": len(node["gpus"]), "npu": node["npus"]}.get(kind, node["devices"])
    other = node["devices"] != there
    text = f"{node['hostname']}: {', '.join(parts)}" + (f"; the node has {there}" if other else "")
    todo = "ray stop, and start it with all devices visible"
    return graded("nodes", node["name"], text, (other, WARN, todo))


def _room(node: Facts) -> Iterator[Finding]:
    """Disks and memory."""
    for what, disk in node["disks"].items():
        full = what == "temporary files" and disk["free"] < disk["total"] * 0.05
        yield graded(
            "room",
            node["name"],
            f"{what} ({disk['path']}): {gib(disk['free'])} free of {gib(disk['total'])}",
            (disk["free"] < GIB // 4, BAD, "free some space there"),
            (
                full,
                WARN,
                "free some: Ray spills nothing to a disk that is 95 % full (or ray start --temp-dir)",
            ),
        )
    available, total = node["memory_available"], node["memory"]
    if available is not None and total:
        text = f"memory: {gib(available)} of {gib(total)} available"
        todo = "something else runs there: end it, or leave the node out"
        yield graded("room", node["name"], text, (available < total * 0.1, WARN, todo))


def _surroundings(node: Facts, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """The node's clock, and what its host name means there."""
    clock, error = node["clock"], node["clock_error"]
    side = "ahead of" if clock > 0 else "behind"
    text = f"{abs(clock):.3f} s {side} the driver's (measured to {error:.3f} s)"
    far = abs(clock) - error > _MAX_CLOCK_S
    yield graded("network", f"clock of {node['name']}", text, (far, WARN, "run chrony or ntpd there"))
    own = (node["resolves_to"] or "127.").startswith("127.")
    if own and len({other["address"] for other in nodes}) > 1:
        text = f"its host name ({node['hostname']}) means {node['resolves_to'] or 'nothing'} there, not {node['address']}"
        todo = "correct /etc/hosts, or set SOCKET_IFNAME of ray_start.sh (GLOO_SOCKET_IFNAME)"
        yield Finding("network", node["name"], text, WARN, todo)
