"""Do the nodes of a cluster fit a run? Facts of `node_facts` in, findings out; the same ones refuse a run at its start
and are shown by `verl doctor --cluster`. Imports no torch and no ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.rollout_engines import CAPABILITIES
from verl.versions import HOLES, satisfies
from verl.workers.node_facts import model_files

GIB = 1 << 30
OK, NOTE, WARN, BAD = "ok", "note", "warn", "bad"
Facts = dict[str, Any]
_MORE_SHM = "give the container more (docker run --shm-size, an emptyDir of medium Memory)"
_BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `level`: ok, note, warn, bad. `base`: if bad, training does not work at all."""

    area: str
    name: str
    found: str
    level: str = OK
    todo: str = ""
    base: bool = False


def bad(area: str, name: str, text: str, todo: str) -> Finding:
    """A finding that stops a run."""
    return Finding(area, name, text, BAD, todo, base=True)


@dataclass(frozen=True, slots=True)
class NodeNeeds:
    """What a run needs of every node.

    models    directories, or hub ids: the same everywhere
    packages  distributions that must have the driver's release
    files     how many a process must be able to open
    room      bytes of shared memory that a transfer of weights takes
    """

    models: tuple[str, ...] = ()
    packages: frozenset[str] = frozenset(("torch", "transformers", "ray"))
    files: int = 0
    room: int = 0


def needs_of(config: Any, *models: str) -> NodeNeeds:
    """Of a run with this configuration and these models, the policy's first."""
    arr, packages = config.actor_rollout_ref, set(NodeNeeds().packages)
    lora = arr.model.lora_rank > 0 or arr.model.lora_adapter_path
    packages |= set(CAPABILITIES[arr.rollout.name].packages)
    if lora:
        packages.add("peft")
    if config.trainer.device == "npu":
        packages.add("torch_npu")
    files = 1024 + 128 * config.trainer.nnodes * config.trainer.n_gpus_per_node
    # An adapter is small.
    room = 0 if lora or not models else _transfer_room(arr.rollout, models[0])
    return NodeNeeds(models, frozenset(packages), files, room)


def _transfer_room(rollout: Any, model: str) -> int:
    """Bytes of shared memory without which a transfer of weights fails on a node that samples: two buckets, or a model
    of two bytes a weight if that is less; 0 where its size is not known. A transfer that needs more says so itself."""
    from verl.weight_sync.shared_memory import host_bucket

    bucket = int(rollout.checkpoint_engine.update_weights_bucket_megabytes) << 20
    if not rollout.nnodes:  # no broadcast, whose buckets are as large as asked for
        bucket = host_bucket(bucket)
    return min(2 * bucket, int(model_files(model).get("bytes", 0)) // 2)


def compare(nodes: list[Facts], driver: Facts, needs: NodeNeeds) -> Iterator[Finding]:
    """What has to be like the driver's on every node, and what each must have for itself. A node is a dict of facts with
    a "name"; the driver's own node may be among them."""
    if not nodes:
        return
    yield from _versions(nodes, driver, needs)
    for node in nodes:
        yield _limits(node, needs.files)
    for node in nodes:
        yield _shared_memory(node, needs.room)
    for path in needs.models:
        yield from _model(path, nodes, driver)


def _versions(nodes: list[Facts], driver: Facts, needs: NodeNeeds) -> Iterator[Finding]:
    def python(version: str) -> list[str]:
        return version.split(".")[:2]

    def release(version: str) -> str:
        """Builds of one release may meet ("2.13.0+cpu" on a driver without a device)."""
        return version.partition("+")[0]

    yield _same("python", nodes, driver, lambda n: n["python"], "use one Python everywhere", stops=python)
    for name in dict.fromkeys(name for node in [driver, *nodes] for name in node["packages"]):

        def version(node: Facts, name: str = name) -> str:
            return str(node["packages"].get(name, "missing"))

        todo = f"pip install '{name}=={version(driver)}' on those nodes, as in the driver's environment"
        if version(driver) == "missing":
            todo = f"the driver has no {name}: start it from the environment of the nodes, or install it here"
        yield _same(name, nodes, driver, version, todo, stops=release if name in needs.packages else None)
        for node in nodes:
            if name in HOLES and version(node) != "missing" and satisfies(version(node), HOLES[name]):
                text = f"{version(node)} on {node['name']} has a known security hole; it is refused"
                yield bad("versions", name, text, f"pip install -U {name} there")
    todo = "copy the same files to every node, or let Ray ship them (ray job submit --working-dir)"
    yield _same("this code", nodes, driver, lambda n: n["code"], todo, stops=str, where="code_path")
    build, todo = (lambda n: n["torch_build"] or "none"), "install one build of torch"
    yield _same("torch build", nodes, nodes[0], build, todo, whose=nodes[0]["name"])


def _same(
    name: str,
    nodes: list[Facts],
    reference: Facts,
    value: Callable[[Facts], str],
    todo: str,
    *,
    stops: Callable[[str], Any] | None = None,
    where: str = "",
    whose: str = "the driver",
) -> Finding:
    """One line: all nodes have the reference's value, or who has which. A run stops where stops(value) differs."""

    def shown(node: Facts) -> str:
        return value(node) + (f" in {node[where]}" if where else "")

    mine = value(reference)
    other = [n for n in nodes if value(n) != mine]
    if not other:
        return Finding("versions", name, f"{mine} everywhere" if len(nodes) > 1 else mine)
    text = "; ".join([f"{whose} has {shown(reference)}", *(f"{n['name']} has {shown(n)}" for n in other)])
    if stops is not None and any(stops(value(n)) != stops(mine) for n in other):
        return bad("versions", name, text, todo)
    return Finding("versions", name, text, WARN, todo)


def _limits(node: Facts, needed: int) -> Finding:
    soft, hard = node["limits"].get("open files", (None, None))
    processes = node["limits"].get("processes", (None, None))[0]
    text = f"open files {count(soft)} (may be raised to {count(hard)}), processes {count(processes)}"
    todo = "ulimit -n 65536 before `ray start` on that node (limits.conf for good)"
    if hard is not None and hard < needed:
        return bad("limits", node["name"], f"{text}; the run needs {needed}", todo)
    if processes is not None and processes < 4096:
        return Finding("limits", node["name"], text, WARN, "ulimit -u 65536 before `ray start`")
    if soft is not None and soft < needed:
        return Finding("limits", node["name"], text, WARN, todo)
    return Finding("limits", node["name"], text)


def _shared_memory(node: Facts, room: int) -> Finding:
    shm, store = node["shm"], node.get("object_store")
    if shm is None:
        return Finding("room", node["name"], "no /dev/shm: weights and batches go through the disk", WARN)
    text = f"/dev/shm: {gib(shm['free'])} free of {gib(shm['total'])}"
    text += f", Ray's object store {gib(store)}" if store else ""
    if shm["free"] < room:
        text += f"; a transfer of weights takes {gib(room)}"
        return bad("room", node["name"], text, f"{_MORE_SHM}, or lower {_BUCKET}")
    if shm["total"] < 256 << 20 or (store and store > shm["total"]):
        return Finding("room", node["name"], text, WARN, _MORE_SHM)
    return Finding("room", node["name"], text)


def _model(path: str, nodes: list[Facts], driver: Facts) -> Iterator[Finding]:
    """Every node's model against the driver's; one that has yet to be fetched from a hub is no difference."""
    found = {n["name"]: n["models"][path] for n in nodes}
    if not any(name.endswith("(driver)") for name in found):
        found = {"the driver": driver["models"][path]} | found
    for name, model in found.items():
        if model.get("to_fetch"):
            text = f"{model['path']} is not in its cache of models: the run fetches it, and it cannot be compared"
            yield Finding("model", name, text, NOTE)
        elif "problem" in model:
            todo = "put the model at the same path on every node, or on a file system that all nodes see"
            yield bad("model", name, model["problem"], todo)
    have = {name: model for name, model in found.items() if "problem" not in model}
    if not have:
        return
    whose, first = next(iter(have.items()))
    for name, model in have.items():
        other = [part for part, text in model["parts"].items() if first["parts"].get(part) != text]
        if other:
            text = f"another {other[0]} ({model['parts'][other[0]]}) than {whose} ({first['parts'].get(other[0])})"
            todo = "copy the same model to every node (a hub's: fetch the same revision)"
            yield bad("model", name, f"{path}: {text}", todo)
            return
    same = sum(n["name"] in have for n in nodes)
    parts = ", ".join(" ".join(part) for part in first["parts"].items())
    text = f"{first['path']}, {gib(first['bytes'])}, {parts}"
    yield Finding("model", "model", f"{text}, the same on {same} nodes" if same > 1 else text)


def count(value: int | None) -> str:
    """A limit in words."""
    return "unlimited" if value is None else str(value)


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / GIB:.1f} GiB"
