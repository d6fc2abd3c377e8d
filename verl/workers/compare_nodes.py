"""Do the nodes of a cluster fit a run? Facts of `node_facts` in, findings out; the same ones refuse a run at its start
and are shown by `verl doctor --cluster`. Imports no torch and no ray."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.rollout_engines import CAPABILITIES
from verl.versions import HOLES, satisfies
from verl.workers.node_facts import CODE, model_files

GIB = 1 << 30
OK, NOTE, WARN, BAD = "ok", "note", "warn", "bad"
Facts = dict[str, Any]
_MISSING = "missing"
_ADVICE = {
    "python": "use one Python everywhere",
    CODE: "copy the same files to every node, or let Ray ship them (ray job submit --working-dir)",
}
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


def graded(area: str, name: str, text: str, *faults: tuple[bool, str, str]) -> Finding:
    """A finding with the level and the advice of the first of `faults` (holds, level, what to do) that holds."""
    for holds, level, todo in faults:
        if holds:
            return Finding(area, name, text, level, todo, base=level == BAD)
    return Finding(area, name, text)


def verdict(findings: Collection[Finding], broken: str, fine: str) -> tuple[int, str]:
    """(exit status, one sentence): 1, and `broken` until …, if a finding says that it does not work at all; else `fine`."""
    stops = dict.fromkeys(f.name for f in findings if f.level == BAD and f.base)
    if stops:
        return 1, f"{broken} until this is put right: {', '.join(stops)}."
    others = dict.fromkeys(f.name for f in findings if f.level in (BAD, WARN))
    return 0, f"{fine} Worth a look: {', '.join(others)}." if others else fine


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
    for name in dict.fromkeys(name for node in [driver, *nodes] for name in node["versions"]):
        yield from _version(name, nodes, driver, needs.packages)
    yield from (_limits(node, needs.files) for node in nodes)
    yield from (_shared_memory(node, needs.room) for node in nodes)
    for path in needs.models:
        yield from _model(path, nodes, driver)


def _version(name: str, nodes: list[Facts], driver: Facts, packages: Collection[str]) -> Iterator[Finding]:
    """One line: all nodes have the driver's version, or which has which."""
    mine = driver["versions"].get(name, _MISSING)
    theirs = {node["name"]: node["versions"].get(name, _MISSING) for node in nodes}
    other = {who: version for who, version in theirs.items() if _same(version) != _same(mine)}
    if other:
        text = "; ".join(f"{who} has {version}" for who, version in ({"the driver": mine} | other).items())
        parts = {_decisive(name, version, packages) for version in (mine, *other.values())}
        yield graded("versions", name, text, (True, BAD if len(parts) > 1 else WARN, _advice(name, mine)))
    else:
        yield Finding("versions", name, f"{mine} everywhere" if len(nodes) > 1 else mine)
    for who, version in theirs.items():
        if name in HOLES and version != _MISSING and satisfies(version, HOLES[name]):
            text = f"{version} on {who} has a known security hole; it is refused"
            yield bad("versions", name, text, f"pip install -U {name} there")


def _same(version: str) -> str:
    """What is compared of a version's text: not where it lies."""
    return version.partition(" in ")[0]


def _decisive(name: str, version: str, packages: Collection[str]) -> str:
    """What must not differ of a version. Builds of one release may meet ("2.13.0+cpu" on a driver without a device)."""
    if name == "python":
        return ".".join(version.split(".")[:2])
    if name == CODE:
        return _same(version)
    return re.split("[+,]", version)[0] if name in packages else ""


def _advice(name: str, mine: str) -> str:
    if mine == _MISSING:
        return f"the driver has no {name}: start it from the environment of the nodes, or install it here"
    other = f"pip install '{name}=={mine.partition(',')[0]}' on those nodes, as in the driver's environment"
    return _ADVICE.get(name, other)


def _limits(node: Facts, needed: int) -> Finding:
    soft, hard = node["limits"].get("open files", (None, None))
    processes = node["limits"].get("processes", (None, None))[0]
    text = f"open files {count(soft)} (may be raised to {count(hard)}), processes {count(processes)}"
    todo = "ulimit -n 65536 before `ray start` on that node (limits.conf for good)"
    return graded(
        "limits",
        node["name"],
        f"{text}; the run needs {needed}",
        (hard is not None and hard < needed, BAD, todo),
        (processes is not None and processes < 4096, WARN, "ulimit -u 65536 before `ray start`"),
        (soft is not None and soft < needed, WARN, todo),
    )


def _shared_memory(node: Facts, room: int) -> Finding:
    shm, store = node["shm"], node.get("object_store") or 0
    if shm is None:
        return Finding("room", node["name"], "no /dev/shm: weights and batches go through the disk", WARN)
    text = f"/dev/shm: {gib(shm['free'])} free of {gib(shm['total'])}"
    text += f", Ray's object store {gib(store)}" if store else ""
    text += f", a transfer of weights takes {gib(room)}" if room else ""
    return graded(
        "room",
        node["name"],
        text,
        (shm["free"] < room, BAD, f"{_MORE_SHM}, or lower {_BUCKET}"),
        (shm["total"] < max(256 << 20, store), WARN, _MORE_SHM),
    )


def _model(path: str, nodes: list[Facts], driver: Facts) -> Iterator[Finding]:
    """Every node's model against the driver's; one that has yet to be fetched from a hub is no difference."""
    found = {node["name"]: node["models"][path] for node in nodes}
    if not any(name.endswith("(driver)") for name in found):
        found = {"the driver": driver["models"][path]} | found
    for name, model in found.items():
        if model.get("to_fetch"):
            text = f"{path} is not in its cache of models: the run fetches it, and it cannot be compared"
            yield Finding("model", name, text, NOTE)
        elif "problem" in model:
            todo = "put the model at the same path on every node, or on a file system that all nodes see"
            yield bad("model", name, model["problem"], todo)
    have = {name: model["text"] for name, model in found.items() if "text" in model}
    text = "; ".join(f"{name} has {text}" for name, text in have.items())
    if len(set(have.values())) > 1:
        todo = "copy the same model to every node (a hub's: fetch the same revision)"
        yield bad("model", "model", f"{path}: {text}", todo)
    elif have:
        yield Finding("model", "model", f"{path}: {next(iter(have.values()))}, the same wherever it is")


def count(value: int | None) -> str:
    """A limit in words."""
    return "unlimited" if value is None else str(value)


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / GIB:.1f} GiB"
